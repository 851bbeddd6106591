"""The interface of codecs, which convert JSON to objects of a user's classes and back.

Pure: no Django, no I/O. The built-in codec uses pydantic (`pydantic_codec`). Codecs in
TXMSG["CODECS"] take precedence.
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

#: Most errors reported for one body.
MAX_ERRORS = 20
MAX_PATH = 200


class Misfit(TxmsgError):
    """A body does not fit its type.

    Each item of `errors` is a path in the body and the kind of the error. No item
    contains a value of the body, which may be personal data.
    """

    def __init__(self, errors: Sequence[tuple[str, str]]) -> None:
        self.errors = list(errors)
        shown = [f"{path[:MAX_PATH]}: {kind}" for path, kind in errors[:MAX_ERRORS]]
        if len(errors) > MAX_ERRORS:
            shown.append(f"and {len(errors) - MAX_ERRORS} more")
        super().__init__("; ".join(shown))


class Codec(ABC):
    """Reads and writes bodies of the annotations for which `handles()` returns True."""

    @abstractmethod
    def handles(self, annotation: Any) -> bool:
        """Return whether this codec can convert bodies of this type: the annotation of
        a handler, or the class of a sent object."""

    @abstractmethod
    def decode(self, annotation: Any, body: bytes) -> Any:
        """Return the object for JSON text in UTF-8. Raises Misfit if the text does not
        fit the annotation."""

    @abstractmethod
    def encode(self, annotation: Any, value: Any) -> bytes:
        """Return the value as JSON text in UTF-8 that `decode()` can read. Raises
        Misfit for a value that `decode()` would not read."""

    def schema(self, annotation: Any) -> dict[str, Any] | None:
        """Return the JSON Schema (draft 2020-12) of the bodies that the codec reads, or
        None if it is unknown."""
        return None


def from_json(body: bytes | str) -> Any:
    """Parse JSON. Fractional numbers become Decimals, because a float would lose
    digits. Raises DecodeError if the body is not JSON."""
    return serializers.loads(body, parse_float=decimal.Decimal)


def to_json(value: Any) -> bytes:
    """Return a value from `from_json()` as JSON text. Decimals become numbers with the
    same digits. Raises ValueError for NaN and infinities, which JSON does not have."""
    text = json.dumps(value, default=_plain, ensure_ascii=False, allow_nan=False)
    return _NUMBER.sub(r"\1", text).encode()


def _plain(value: object) -> str:
    if isinstance(value, decimal.Decimal):
        if not value.is_finite():
            raise ValueError("JSON has no such number")
        return f"{_MARK}{value}"
    return serializers.as_text(value)


# json can write our numbers only as text; no user's text begins with this mark.
_MARK = uuid.uuid4().hex
_NUMBER = re.compile(f'"{_MARK}([^"]*)"')
