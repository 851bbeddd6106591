"""Reads typed bodies for stages, and encodes typed bodies to send.

A reader accepts bodies of its own version. It upgrades older bodies. It accepts newer
bodies if their sender declares that this version can read them. Pure: no Django, no
I/O.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NoReturn

from .. import wire
from ..errors import (
    ConfigurationError,
    DecodeError,
    InvalidMessage,
    NewerCodeNeeded,
    TxmsgError,
)
from . import message_type as message_types
from . import serializers
from .codec import Codec, Misfit, from_json, to_json
from .failure import class_name, is_interrupt
from .message_type import MAX_VERSION, class_of, is_name, unaliased

_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class TypeHeader:
    """A message type's name, the version of the body, and the oldest version of the
    code that can read the body.

    `version` is None if the header has only a name. The reader then assumes its own
    version.
    """

    name: str
    version: int | None = None
    oldest_reader: int = 1

    def __str__(self) -> str:
        return f"{self.name};v={self.version};min={self.oldest_reader}"

    @classmethod
    @lru_cache(100)  # few: a header may have 120 KB
    def parse(cls, text: str) -> TypeHeader:
        """Parse the header `txmsg-type`.

        Ignore parameters that a later release may add. Raises DecodeError, reason
        `invalid_body`, if the name or the version is invalid.
        """
        name, *parts = (part.strip() for part in text.split(";"))
        given = dict(part.partition("=")[::2] for part in parts)
        version = cls._number(given.get("v"), text)
        oldest = cls._number(given.get("min"), text)
        if not is_name(name) or (version or MAX_VERSION) < (oldest or 1):
            raise cls._absurd(text)
        return cls(name, version, oldest or version or 1)

    @classmethod
    def _number(cls, text: str | None, whole: str) -> int | None:
        if text is None:
            return None
        if not _NUMBER.fullmatch(text) or not 1 <= int(text) <= MAX_VERSION:
            raise cls._absurd(whole)
        return int(text)

    @staticmethod
    def _absurd(text: str) -> DecodeError:
        return DecodeError(
            "invalid_body", f"txmsg-type: not a type and version: {text[:80]!r}"
        )


@dataclass(frozen=True)
class BodyType:
    """A type of message bodies, with the codec that reads and writes them.

    If `name` is "", bodies have no header `txmsg-type`. Examples are lists, dicts and
    numbers.
    """

    annotation: Any
    codec: Codec
    name: str = ""
    version: int = 1
    oldest_reader: int = 1

    @property
    def cls(self) -> type:
        """The class of the bodies, also for `cls | None`, or `object` if they have no
        class."""
        return next(filter(None, map(class_of, members(self.annotation))), object)

    @cached_property
    def header(self) -> str:
        """The value of `txmsg-type` for sent bodies."""
        return str(TypeHeader(self.name, self.version, self.oldest_reader))

    def encode(self, value: Any) -> bytes:
        """Return the body's bytes. Raises InvalidMessage if the body does not fit."""
        try:
            return self.codec.encode(self.annotation, value)
        except Misfit as error:
            raise InvalidMessage(
                f"The body does not fit {self.name or self.annotation!r}: {error}."
            ) from None


class BodyReader:
    """Reads the bodies for one handler. Each body has the type that the handler
    declares or, if the handler declares a union, one type of the union."""

    def __init__(self, annotation: Any, types: Sequence[BodyType]) -> None:
        self._annotation, self._only = annotation, types[0] if len(types) == 1 else None
        self._types = {one.name: one for one in types}
        if len(self._types) < len(types) or (self._only is None and "" in self._types):
            raise ConfigurationError(
                f"The members of {annotation!r} are told apart by the names of their "
                f"types. Each is a class with a name= of its own (@message_type)."
            )

    @property
    def types(self) -> tuple[BodyType, ...]:
        """The types that this reader accepts: the single type, or the types of the
        union's members."""
        return tuple(self._types.values())

    @property
    def reads(self) -> tuple[tuple[str, int], ...]:
        """The names and versions of the types that this code reads."""
        return tuple((one.name, one.version) for one in self._types.values())

    def read(self, body: bytes, content_type: str, header: str | None) -> Any:
        """Return the object for a body.

        Raises DecodeError if the body does not fit the type. Raises NewerCodeNeeded if
        this code cannot read the version of the body.
        """
        if header is None:
            return self._decoded(self._unnamed(), _json_text(body, content_type))
        given = TypeHeader.parse(header)
        known = self._only if self._only and not self._only.name else None
        known = known or self._types.get(given.name)
        if known is None:
            raise DecodeError(
                "invalid_body",
                f"txmsg-type: {given.name!r} is unknown here; "
                f"known: {', '.join(sorted(self._types))}",
            )
        if known.name and known.version < given.oldest_reader:
            raise NewerCodeNeeded(given.name, given.oldest_reader, known.version)
        text = _json_text(body, content_type)
        version = given.version or known.version
        if not message_types.needed(known.name, version, known.version):
            return self._decoded(known, text)
        value, where = from_json(text), f"upgrade from {version}"

        def upgraded() -> bytes:
            try:
                newer = message_types.upgraded(
                    known.name, value, version, known.version
                )
            except TxmsgError as error:
                # The consumer would park the message, or would never stop trying.
                _refuse(f"{where}: {class_name(error)}")
            return to_json(newer)

        return self._decoded(known, _by_user(where, upgraded))

    def _unnamed(self) -> BodyType:
        """Return the type of a body without a type header."""
        if self._only is not None:
            return self._only
        if _is_tagged(self._annotation):
            codec = next(iter(self._types.values())).codec
            return BodyType(self._annotation, codec)
        raise DecodeError(
            "invalid_body",
            f"no txmsg-type, and one of {', '.join(sorted(self._types))} is read here",
        )

    def _decoded(self, known: BodyType, body: bytes) -> Any:
        return _by_user("$", lambda: known.codec.decode(known.annotation, body))


def _by_user(where: str, call: Callable[[], Any]) -> Any:
    """Call a user's validators or upgraders. If they raise an error, raise DecodeError:
    repetition does not help, and SystemExit would stop each worker that receives the
    message."""
    try:
        return call()
    except Misfit as error:
        _refuse(str(error))
    except (ConfigurationError, DecodeError, MemoryError):
        raise
    except BaseException as error:
        if is_interrupt(error):
            raise
        _refuse(f"{where}: {class_name(error)}")


def members(annotation: Any) -> list[Any]:
    """Return the members of a union, or the annotation itself."""
    bare = annotation = unaliased(annotation)
    if _is_annotated(annotation) and class_of(annotation) is None:
        bare = annotation.__origin__
    # Both `A | B` and Union[A, B], which are two types before Python 3.14.
    if type(bare).__name__ in ("UnionType", "_UnionGenericAlias", "Union"):
        return [one for part in typing.get_args(bare) for one in members(part)]
    return [annotation]


def _json_text(body: bytes, content_type: str) -> bytes:
    """Return the JSON text of a body. Bodies with the content type of text or bytes are
    also read as JSON, because foreign senders may not declare JSON."""
    given = content_type.partition(";")[0].strip().lower()
    if serializers.is_json(content_type) or given == wire.BYTES:
        return body
    if given.startswith("text/"):
        text: str = serializers.decode(body, content_type)
        return text.encode()
    raise DecodeError("invalid_body", f"content-type: {given[:80]!r} is not JSON")


def _is_annotated(annotation: Any) -> bool:
    return typing.get_origin(annotation) is typing.Annotated


def _is_tagged(annotation: Any) -> bool:
    """Return whether a field of the body selects the member of a union. pydantic
    declares such a field with `Field(discriminator=…)`."""
    return _is_annotated(annotation) and any(
        getattr(one, "discriminator", None) is not None
        for one in annotation.__metadata__
    )


def _refuse(detail: str) -> NoReturn:
    # Raised without its cause, whose text may contain parts of the body.
    raise DecodeError("invalid_body", detail) from None
