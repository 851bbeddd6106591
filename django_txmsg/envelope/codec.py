"""A codec: it makes objects of a user's classes from JSON, and JSON of them.

Pure: no Django, no I/O. Ours is pydantic's (`pydantic_codec`); TXMSG["CODECS"] names
others, which come first.
"""

from __future__ import annotations

import decimal
import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from ..errors import TxmsgError
from . import serializers

#: The most errors that are reported of one body.
MAX_ERRORS = 20
MAX_PATH = 200


class Misfit(TxmsgError):
    """A body does not fit its type.

    `errors` are pairs of the path in the body and the kind of the error. They never
    say what is there: it may be personal.
    """

    def __init__(self, errors: Sequence[tuple[str, str]]) -> None:
        self.errors = list(errors)
        shown = [f"{path[:MAX_PATH]}: {kind}" for path, kind in errors[:MAX_ERRORS]]
        if len(errors) > MAX_ERRORS:
            shown.append(f"and {len(errors) - MAX_ERRORS} more")
        super().__init__("; ".join(shown))


class Codec(ABC):
    """Reads and writes bodies of the annotations that it handles."""

    @abstractmethod
    def handles(self, annotation: Any) -> bool:
        """Return whether this codec knows what to do with a handler's annotation, or
        with the class of what is sent."""

    @abstractmethod
    def decode(self, annotation: Any, body: bytes) -> Any:
        """Return the object that JSON text in UTF-8 stands for. Raises Misfit."""

    @abstractmethod
    def encode(self, annotation: Any, value: Any) -> bytes:
        """Return JSON text in UTF-8 that `decode()` reads. Raises Misfit for a value
        that it would not read."""

    def decode_value(self, annotation: Any, value: Any) -> Any:
        """Return the object that a parsed body stands for, in which numbers that have a
        fraction are Decimals. Raises Misfit."""
        return self.decode(annotation, to_json(value))

    def schema(self, annotation: Any) -> dict[str, Any] | None:
        """Return the JSON Schema (draft 2020-12) of what is read; None: unknown."""
        return None


def from_json(body: bytes | str) -> Any:
    """Parse JSON, with numbers that have a fraction as Decimals: a float would cut
    their digits. Raises DecodeError where it is not JSON."""
    return serializers.loads(body, parse_float=decimal.Decimal)


def to_json(value: Any) -> bytes:
    """Write what `from_json()` read, with Decimals as numbers again, digit by digit."""
    text = json.dumps(value, default=_plain, ensure_ascii=False)
    return _NUMBER.sub(r"\1", text).encode()


def _plain(value: object) -> str:
    if isinstance(value, decimal.Decimal):
        return f"{_MARK}{value}"
    return serializers.as_text(value)


# json writes no number of ours, but text; nobody's text has this in front.
_MARK = uuid.uuid4().hex
_NUMBER = re.compile(f'"{_MARK}([^"]*)"')
