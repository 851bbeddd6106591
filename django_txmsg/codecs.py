"""Chooses the codec for a type of bodies: first a codec of TXMSG["CODECS"], then
pydantic.

To write your own codec, extend `Codec` and raise `Misfit`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from django.apps import apps
from django.conf import settings as django_settings
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from . import conf
from .envelope import message_type as message_types
from .envelope.codec import Codec, Misfit
from .envelope.message_type import class_of, declaration, name_of, unaliased
from .envelope.pydantic_codec import PydanticCodec
from .envelope.typed_body import BodyReader, BodyType, members
from .errors import ConfigurationError

__all__ = ["Codec", "Misfit"]

log = logging.getLogger("django_txmsg.codecs")

_pydantic = PydanticCodec()

#: Classes that JSON supports directly: their objects are sent without a codec.
_PLAIN = (dict, list, tuple, str, int, float, bytes, bytearray, memoryview)


def reader(annotation: Any) -> BodyReader:
    """Return the reader of bodies for a handler with this annotation.

    Raises ConfigurationError if no codec handles the annotation, if pydantic is
    missing, or if the annotation cannot be hashed.
    """
    try:
        hash(annotation)
    except TypeError as error:
        raise ConfigurationError(
            f"{annotation!r} cannot be the type of a body: {error}. Give Annotated "
            f"only metadata that can be hashed, such as a tuple in place of a list."
        ) from None
    return _reader(annotation)


@cache
def _reader(annotation: Any) -> BodyReader:
    annotation = unaliased(annotation)
    return BodyReader(annotation, list(_types(annotation)))


@cache
def body_type(annotation: Any) -> BodyType:
    """Return the type of bodies for an annotation, with its codec. Raises
    ConfigurationError if no codec handles the annotation."""
    return _named(annotation, class_of(annotation))


def type_of(value: object) -> BodyType | None:
    """Return the type of an object to send, with its codec. Returns None if JSON
    supports the object directly, or if no codec handles the object."""
    kind: Any = type(value)
    if kind in _PLAIN or value is None:
        return None
    return _type_of(kind)


def codec_of(annotation: Any) -> Codec:
    """Return the first codec that handles an annotation. Raises ConfigurationError if
    none does."""
    for codec in (*_codecs(), _pydantic):
        if codec.handles(annotation):
            return codec
    raise ConfigurationError(f"No codec handles {annotation!r}.")


@cache
def _codecs() -> tuple[Codec, ...]:
    return tuple(import_string(path)() for path in conf.get().CODECS)


def _types(annotation: Any) -> Iterator[BodyType]:
    parts = [one for one in members(annotation) if one is not type(None)]
    if len(parts) == 1 or not any(map(class_of, parts)):
        # No union, an Optional, or a union of unnamed types: one type for its readers.
        yield _named(annotation, class_of(parts[0]) if len(parts) == 1 else None)
    else:
        yield from map(body_type, parts)


def _named(annotation: Any, cls: type | None) -> BodyType:
    codec = codec_of(annotation)
    if cls is None:
        return BodyType(annotation, codec)
    declared = declaration(cls)
    name = declared.name or name_of(cls, _label(cls))
    oldest = declared.readable_from
    if oldest is None:
        oldest = _oldest_reader(name, declared.version)
    return BodyType(annotation, codec, name, declared.version, oldest)


def _oldest_reader(name: str, version: int) -> int:
    """Return the oldest version whose code can read bodies of `version`, according to
    the committed contract. If `version` is newer than the contract, return `version`
    itself. If the contract does not have the type, assume that old code reads bodies
    which need no upgrader."""
    known = _committed().get(name, {})
    if known.get("x-txmsg-version", version) < version:
        return version
    if known.get("x-txmsg-version") == version:
        return int(known.get("x-txmsg-readable-from", version))
    return message_types.last_break(name, version)


def contract_path() -> Path:
    """Return the path of the committed contract."""
    given = conf.get().CONTRACT
    if given is not None:
        return Path(given)
    return Path(getattr(django_settings, "BASE_DIR", "."), "asyncapi.json")


@cache
def _committed() -> dict[str, Any]:
    """Return the messages of the committed contract, if there is one. Log an error if
    its file cannot be read."""
    file = None
    try:
        file = contract_path()
        contract = json.loads(file.read_text("utf-8"))
        messages = dict(contract["components"]["messages"])
        return {name: dict(one) for name, one in messages.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError) as error:
        log.error(
            "the contract %s cannot be read, so messages do not say which versions "
            "read them, and code that is too old for one would bury it: %r",
            file,
            error,
        )
        return {}


def _label(cls: type) -> str:
    """Return the label of the app that contains a class, or else the name of its
    package."""
    app = apps.get_containing_app_config(cls.__module__) if apps.apps_ready else None
    label: str = app.label if app else cls.__module__.partition(".")[0]
    return label.strip("_") or "main"


@cache
def _type_of(kind: Any) -> BodyType | None:
    if issubclass(kind, _PLAIN) or class_of(kind) is None:
        return None
    try:
        return body_type(kind)
    except ConfigurationError:
        # A class that no codec handles is not an error here: JSON may support the
        # value, or refuse it.
        if hasattr(kind, "__dataclass_fields__") or declaration(kind).name:
            raise
        return None


def forget() -> None:
    """Clear the caches, after a change of TXMSG or of declared types."""
    for found in (_codecs, _reader, body_type, _type_of, _committed):
        found.cache_clear()


def _reset(*, setting: str, **_: object) -> None:
    if setting == "TXMSG":
        forget()


setting_changed.connect(_reset)
