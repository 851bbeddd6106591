"""Encodes bodies as bytes, and decodes bytes to bodies. Values are sent as JSON, and
bytes are sent unchanged.

Decimals, dates, times, durations and UUIDs become the JSON strings that Django's JSON
encoder writes. The receiver gets these strings. No body is ever unpickled.
"""

from __future__ import annotations

import codecs
import datetime as dt
import decimal
import json
import math
import re
import uuid
from collections.abc import Callable
from typing import Any

from .. import wire
from ..errors import DecodeError, InvalidMessage

#: Charsets of domain names. Python takes hours to decode a body of 16 MB in them.
_SLOW_CHARSETS = frozenset({"idna", "punycode"})

#: Other names are refused unseen: Python keeps every name that it looks up, for ever.
_CHARSET_NAME = re.compile(r"[\w.:\- ]{1,40}", re.ASCII)

_SURROGATE = re.compile("[\ud800-\udfff]")


def encode(body: object) -> tuple[bytes, str]:
    """Return the body's bytes and their content type.

    Raises InvalidMessage if the body cannot be sent: a value of an unknown type, NaN or
    an infinity, a lone surrogate, or a circular reference.
    """
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body), wire.BYTES
    try:
        return _ENCODER.encode(body).encode(), wire.JSON
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidMessage(
            f"The body cannot be encoded as JSON: {error}. Send a dict, list, str, "
            f"number, None, or bytes."
        ) from error


def decode(body: bytes, content_type: str) -> Any:
    """Return the sender's value: a JSON value or a text, or bytes for other content
    types.

    Raises DecodeError if the bytes do not match their content type.
    """
    if is_json(content_type):
        return loads(body)
    media_type, _, parameters = content_type.partition(";")
    media_type = media_type.strip().lower()
    if media_type.startswith("text/"):
        charset = _charset(parameters)
        try:
            named = _CHARSET_NAME.fullmatch(charset)
            if not named or codecs.lookup(charset).name in _SLOW_CHARSETS:
                raise LookupError("this charset is refused")
            text = body.decode(charset)
            text.encode()  # some charsets permit lone surrogates
            return text
        except (LookupError, ValueError) as error:
            raise DecodeError(
                "undecodable_body", f"not text in {charset}: {error}"
            ) from error
    return body


def loads(text: bytes | str, parse_float: Callable[[str], Any] | None = None) -> Any:
    """Parse JSON. Raises DecodeError, reason `undecodable_body`, if the text is not
    JSON, or if a number is too large for a float."""
    try:
        return json.loads(
            text, parse_constant=_refuse_constant, parse_float=parse_float or _finite
        )
    except (ValueError, RecursionError, ArithmeticError) as error:
        raise DecodeError("undecodable_body", f"not valid JSON: {error}") from error


def is_storable(value: Any) -> bool:
    """Return whether PostgreSQL can store a JSON value in a column of JSON: no text in
    it contains a NUL or a lone surrogate."""
    text = json.dumps(value, ensure_ascii=False).replace("\\\\", "")
    return "\\u0000" not in text and not _SURROGATE.search(text)


def is_json(content_type: str) -> bool:
    """Return whether this content type means JSON."""
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type == wire.JSON or media_type.endswith("+json")


def _charset(parameters: str) -> str:
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset":
            return value.strip().strip('"') or "utf-8"
    return "utf-8"


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError("a number is too large for a float")
    return value


def as_text(value: object) -> str:
    """Return text for a value for which JSON has no type. Raises TypeError for any
    other value."""
    if isinstance(value, uuid.UUID | decimal.Decimal):
        return str(value)
    if isinstance(value, dt.datetime | dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, dt.timedelta):
        return _duration(value)
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} in it")


def _duration(value: dt.timedelta) -> str:
    """Return a duration in the format of ISO 8601. Months and years have no fixed
    length, so the text contains only days and smaller units."""
    sign = "-" if value < dt.timedelta(0) else ""
    value = abs(value)
    seconds = f"{value.seconds}"
    if value.microseconds:
        seconds += f".{value.microseconds:06d}"
    return f"{sign}P{value.days}DT{seconds}S"


_ENCODER = json.JSONEncoder(
    default=as_text, allow_nan=False, ensure_ascii=False, separators=(",", ":")
)
