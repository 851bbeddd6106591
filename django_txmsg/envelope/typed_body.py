"""Bodies of declared types: how a stage reads them, and how they are sent.

A reader takes what its version reads: older bodies by their upgraders, newer ones as
far as their sender says that they fit. Pure: no Django, no I/O.
"""

from __future__ import annotations

import typing
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

from .. import wire
from ..errors import ConfigurationError, DecodeError, InvalidMessage, NewerCodeNeeded
from . import serializers, upgraders
from .codec import Codec, Misfit, from_json
from .failure import class_name, is_interrupt
from .message_type import class_of, unaliased
from .type_header import TypeHeader


@dataclass(frozen=True)
class BodyType:
    """One type of bodies, as it is read and sent here.

    `name` "" is a type that no header names: a list, a dict, a number.
    """

    annotation: Any
    codec: Codec
    name: str = ""
    version: int = 1
    oldest_reader: int = 1

    @property
    def cls(self) -> type:
        """The class of the bodies, `object` where they have no class of their own."""
        return class_of(self.annotation) or object

    @property
    def is_typed_dict(self) -> bool:
        """Whether its objects are dicts when the program runs."""
        return issubclass(self.cls, dict)

    @cached_property
    def header(self) -> str:
        """What `txmsg-type` says of what is sent."""
        return str(TypeHeader(self.name, self.version, self.oldest_reader))

    def encode(self, value: Any) -> bytes:
        """Return the body's bytes. Raises InvalidMessage for what does not fit."""
        try:
            return self.codec.encode(self.annotation, value)
        except Misfit as error:
            raise InvalidMessage(
                f"The body does not fit {self.name or self.annotation!r}: {error}."
            ) from None


class BodyReader:
    """Reads the bodies of one handler: of a type, or of the members of a union."""

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
        """The types that are read, one unless it is a union."""
        return tuple(self._types.values())

    @property
    def reads(self) -> tuple[tuple[str, int], ...]:
        """The names and versions of the types that this code reads."""
        return tuple((one.name, one.version) for one in self._types.values())

    def read(self, body: bytes, content_type: str, header: str | None) -> Any:
        """Return the object that a body stands for.

        Raises DecodeError for what does not fit, and NewerCodeNeeded.
        """
        if header is None:
            return self._decoded(self._unnamed(), _json_text(body, content_type))
        given = TypeHeader.parse(header)
        known = self._only if self._only and not self._only.name else None
        known = known or self._types.get(given.name)
        if known is None:
            raise DecodeError(
                "invalid_body",
                f"txmsg-type: {given.name} is unknown here; "
                f"known: {', '.join(sorted(self._types))}",
            )
        if known.name and known.version < given.oldest_reader:
            raise NewerCodeNeeded(given.name, given.oldest_reader, known.version)
        text = _json_text(body, content_type)
        version = given.version or known.version
        if not upgraders.needed(known.name, version, known.version):
            return self._decoded(known, text)
        value = from_json(text)
        try:
            value = upgraders.upgraded(known.name, value, version, known.version)
        except MemoryError:
            raise
        except BaseException as error:
            if is_interrupt(error):
                raise
            _refuse(f"upgrade from {version}: {class_name(error)}")
        return self._decoded(known, value, parsed=True)

    def _unnamed(self) -> BodyType:
        """Return the type of a body that brings no header."""
        if self._only is not None:
            return self._only
        if _is_tagged(self._annotation):
            codec = next(iter(self._types.values())).codec
            return BodyType(self._annotation, codec)
        raise DecodeError(
            "invalid_body",
            f"no txmsg-type, and one of {', '.join(sorted(self._types))} is read here",
        )

    def _decoded(self, known: BodyType, body: Any, *, parsed: bool = False) -> Any:
        decode = known.codec.decode_value if parsed else known.codec.decode
        try:
            return decode(known.annotation, body)
        except Misfit as error:
            _refuse(str(error))
        except (ConfigurationError, DecodeError, MemoryError):
            raise
        except BaseException as error:
            if is_interrupt(error):
                raise
            # A validator of the user's own: no repetition mends that either. One that
            # raises SystemExit would stop each worker that the message comes to.
            _refuse(f"$: {class_name(error)}")


def members(annotation: Any) -> list[Any]:
    """Return the members of a union, or the annotation itself."""
    bare = annotation = unaliased(annotation)
    if _is_annotated(annotation) and class_of(annotation) is None:
        bare = annotation.__origin__
    # Both `A | B` and Union[A, B], which are two things before Python 3.14.
    if type(bare).__name__ in ("UnionType", "_UnionGenericAlias", "Union"):
        return [one for part in typing.get_args(bare) for one in members(part)]
    return [annotation]


def _json_text(body: bytes, content_type: str) -> bytes:
    """Return the JSON in a body. What says nothing of itself, as a foreign sender's
    text or bytes, is read as JSON."""
    given = content_type.partition(";")[0].strip().lower()
    if serializers.is_json(content_type) or given == wire.BYTES:
        return body
    if given.startswith("text/"):
        text: str = serializers.decode(body, content_type)
        return text.encode()
    raise DecodeError("invalid_body", f"content-type: {given[:80]!r} is no JSON")


def _is_annotated(annotation: Any) -> bool:
    return typing.get_origin(annotation) is typing.Annotated


def _is_tagged(annotation: Any) -> bool:
    """Return whether a field of the body tells a union's members apart, as pydantic's
    `Field(discriminator=…)` says."""
    return _is_annotated(annotation) and any(
        getattr(one, "discriminator", None) is not None
        for one in annotation.__metadata__
    )


def _refuse(detail: str) -> NoReturn:
    # Without the error it came from, whose text may show what is in the body.
    raise DecodeError("invalid_body", detail) from None
