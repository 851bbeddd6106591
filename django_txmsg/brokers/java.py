"""Converts messages to and from Java programs that use JMS on ActiveMQ.

ActiveMQ turns a SEND with a content-length into a BytesMessage, unless a header
requests a TextMessage. The method `getText()` of a TextMessage throws on characters
above U+FFFF, so these characters are escaped in JSON bodies. The name of a Java
property cannot contain a hyphen, so each of our headers has a copy whose name has no
hyphen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from .. import wire
from ..envelope import serializers

#: Makes ActiveMQ create a TextMessage.
KIND = "amq-msg-type"

#: A character above U+FFFF in UTF-8 ...
_ABOVE = re.compile(rb"[\xf0-\xf4][\x80-\xbf]{3}")
#: ... and in Java's encoding: two surrogates, each encoded like a character.
_PAIR = re.compile(rb"\xed[\xa0-\xaf][\x80-\xbf]\xed[\xb0-\xbf][\x80-\xbf]")


def for_java(headers: dict[str, str], body: bytes) -> bytes:
    """Prepare a message for a JMS client. Adds to `headers` the headers that the client
    needs, and returns the body for the client."""
    for name, twin in wire.TWINS.items():
        if name in headers:
            headers[twin] = headers[name]
    text = text_for_java(headers.get(wire.CONTENT_TYPE, wire.BYTES), body)
    if text is None:
        return body
    headers[KIND] = "text"
    return text


def text_for_java(content_type: str, body: bytes) -> bytes | None:
    """Return the body for a TextMessage, or None if a TextMessage cannot contain this
    body."""
    json = serializers.is_json(content_type)
    if not (json or _is_text(content_type)) or not _is_utf8(body):
        return None
    if not _ABOVE.search(body):
        return body
    return _ABOVE.sub(_escaped, body) if json else None


def from_java(
    headers: Mapping[str, str], body: bytes
) -> tuple[Mapping[str, str], bytes]:
    """Return the original headers and the original body of a received message. The
    copies of headers that `for_java()` has added are removed. Java's surrogate pairs
    become single characters."""
    if KIND in headers or not wire.TWIN_NAMES.isdisjoint(headers):
        given = headers
        headers = {
            name: value
            for name, value in given.items()
            if name != KIND and name not in wire.TWIN_NAMES
        }
        for name, twin in wire.TWINS.items():
            if twin in given:
                headers.setdefault(name, given[twin])
    content_type = headers.get(wire.CONTENT_TYPE)
    if content_type is None:
        # A TextMessage from Java has neither a content type nor a length; a
        # BytesMessage has a length.
        text = wire.CONTENT_LENGTH not in headers
    else:
        text = serializers.is_json(content_type) or _is_text(content_type)
    if text and b"\xed" in body:
        body = _PAIR.sub(_joined, body)
    return headers, body


def _is_text(content_type: str) -> bool:
    return content_type.lower().startswith("text/")


def _is_utf8(body: bytes) -> bool:
    """Return whether a body is valid UTF-8 without NUL."""
    if b"\x00" in body:
        return False
    try:
        return body.isascii() or bool(body.decode())
    except UnicodeDecodeError:
        return False


def _escaped(found: re.Match[bytes]) -> bytes:
    pair = found[0].decode().encode("utf-16-be").hex()
    return f"\\u{pair[:4]}\\u{pair[4:]}".encode()


def _joined(found: re.Match[bytes]) -> bytes:
    pair = found[0].decode("utf-8", "surrogatepass")
    return pair.encode("utf-16", "surrogatepass").decode("utf-16").encode()
