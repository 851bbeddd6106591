"""Hops 4 to 6 over AMQP: headers and frames, encoded and read without py-amqp.

The first part of this module encodes and reads headers. The second part encodes the
frames that every message needs: to publish the message, and to acknowledge its
delivery.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

from amqp import spec

from ... import wire
from ...errors import DispatchRejected
from ..base import Outgoing, unstorable

# Converting a message's headers to AMQP's properties and back, like RabbitMQ's STOMP
# plugin: a message is the same by either protocol.
#
# No delivery raises here: RabbitMQ has checked that it is well-formed, and any other
# fault is a `problem` of that one message.

#: The properties in order: the flag, our header, and whether it is text.
_PROPERTIES = (
    (0x8000, "content-type", "text"),
    (0x4000, "content-encoding", "text"),
    (0x2000, "", "table"),
    (0x1000, "persistent", "octet"),
    (0x0800, "priority", "octet"),
    (0x0400, "correlation-id", "text"),
    (0x0200, "reply-to", "text"),
    (0x0100, "expiration", "text"),
    (0x0080, "amqp-message-id", "text"),
    (0x0040, "timestamp", "long"),
    (0x0020, "type", "text"),
    (0x0010, "user-id", "text"),
    (0x0008, "app-id", "text"),
    (0x0004, "cluster-id", "text"),
)
#: Properties that hold a sender's header, if it is short enough.
_SENT = frozenset({"content-type", "content-encoding", "correlation-id", "type"})
#: Lists of further queues to which RabbitMQ delivered the message. A copy does not need
#: them, and RabbitMQ refuses them if they are not lists.
_ROUTES = frozenset({"BCC", "CC"})
_PERSISTENT = b"\x02"
#: Most bytes of a short text, and of a name in the table.
SHORT = 255
_NUMBERS = {
    b"b": ">b", b"B": ">B", b"s": ">h", b"U": ">h", b"u": ">H", b"I": ">i",
    b"i": ">I", b"l": ">q", b"L": ">q", b"f": ">f", b"d": ">d",
}  # fmt: skip


def encode(headers: Mapping[str, str], expiration: int | None) -> bytes:
    """Return the property flags and the properties of a durable message. The message
    expires after `expiration` milliseconds. With None, it never expires.

    Raises DispatchRejected for headers that receivers could not read.
    """
    short: dict[str, bytes] = {}
    table = bytearray()
    try:
        for name, value in headers.items():
            written = value.encode()
            if name in _SENT and len(written) <= SHORT and b"\0" not in written:
                short[name] = written
                continue
            if "\0" in value:
                raise DispatchRejected(f"header {name!r} has a NUL")
            table += _named(name)
            table += struct.pack(">I", len(written))
            table += written
    except (AttributeError, UnicodeEncodeError) as error:
        raise DispatchRejected(f"a header is not text: {error}") from error
    if expiration is not None:
        short["expiration"] = str(expiration).encode()
    flags, out = 0x3000, bytearray()
    for flag, name, _ in _PROPERTIES:
        if flag == 0x2000:
            out += struct.pack(">I", len(table))
            out += table
        elif flag == 0x1000:
            out += _PERSISTENT
        elif name in short:
            flags |= flag
            out.append(len(short[name]))
            out += short[name]
    return struct.pack(">H", flags) + bytes(out)


@lru_cache(maxsize=1024)
def _named(name: str) -> bytes:
    written = name.encode()
    if not 0 < len(written) <= SHORT or b"\0" in written:
        raise DispatchRejected(
            f"header {name[:40]!r} cannot be named so: a name has 1 to {SHORT} bytes"
        )
    return bytes([len(written)]) + written + b"S"


class Reader:
    """Reads the properties of one delivery."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        #: The fault of the headers, or "".
        self.problem = ""
        #: The table's values as received.
        self.table: dict[str, Any] = {}

    def headers(self) -> dict[str, str]:
        """Return all headers as text. If a header cannot be read, `problem` describes
        the fault."""
        found: dict[str, str] = {}
        try:
            self._read(found)
        except (struct.error, ValueError, ArithmeticError, RecursionError) as error:
            self.problem = self.problem or f"its properties cannot be read: {error}"
        self.problem = self.problem or unstorable(found)
        return found

    def _read(self, found: dict[str, str]) -> None:
        flags = self._number(">H")
        for flag, name, kind in _PROPERTIES:
            if not flags & flag:
                continue
            if kind == "table":
                self.table = self._fields(self._at + 4 + self._number(">I"))
                for key, value in self.table.items():
                    if key not in _ROUTES or isinstance(value, str):
                        found.setdefault(key, text(value))
            elif kind == "text":
                found[name] = self._text(self._number(">B"))
            elif name == "persistent":
                if self._number(">B") == 2:
                    found[name] = "true"
            else:
                found[name] = str(self._number(">B" if kind == "octet" else ">Q"))

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return value

    def _bytes(self, length: int) -> bytes:
        piece = self._data[self._at : self._at + length]
        if len(piece) < length:
            raise ValueError("they end too soon")
        self._at += length
        return piece

    def _text(self, length: int) -> str:
        piece = self._bytes(length)
        try:
            return piece.decode()
        except UnicodeDecodeError as error:
            self.problem = self.problem or f"one of its headers is not text: {error}"
            return piece.decode(errors="backslashreplace")

    def _fields(self, end: int) -> dict[str, Any]:
        found = {}
        while self._at < end:
            name = self._text(self._number(">B"))
            found[name] = self._value()
        return found

    def _value(self) -> Any:
        kind = self._bytes(1)
        if kind == b"S":
            return self._text(self._number(">I"))
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == b"t":
            return bool(self._number(">B"))
        if kind == b"V":
            return None
        if kind == b"x":
            return base64.b64encode(self._bytes(self._number(">I"))).decode()
        if kind == b"D":
            scale, digits = self._number(">B"), self._number(">i")
            return Decimal(digits).scaleb(-scale)
        if kind == b"T":
            return _instant(self._number(">Q"))
        if kind == b"F":
            return self._fields(self._at + 4 + self._number(">I"))
        if kind == b"A":
            end = self._at + 4 + self._number(">I")
            found = []
            while self._at < end:
                found.append(self._value())
            return found
        raise ValueError(f"a value of the unknown type {kind!r}")


def _instant(seconds: int) -> Any:
    try:
        return dt.datetime.fromtimestamp(seconds, dt.timezone.utc).isoformat()
    except (ValueError, OverflowError, OSError):
        return seconds


def text(value: Any) -> str:
    """Return a value of AMQP's header table as text."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, bool | dict | list):
        return json.dumps(value, default=str)
    return str(value)


METHOD, HEADER, BODY, BEAT = 1, 2, 3, 8
#: The exchange that RabbitMQ's STOMP plugin uses for topics, too.
TOPICS = "amq.topic"
_END = b"\xce"
HEARTBEAT = b"\x08\x00\x00\x00\x00\x00\x00" + _END
_BASIC = spec.Basic.Publish[0]
_MANDATORY = b"\x01"
#: Bytes of a frame around its payload.
_AROUND = 8


@dataclass(slots=True)
class Ready:
    """An encoded message: its `frames`, and the values that identify the message if
    RabbitMQ returns it."""

    frames: bytes
    route: bytes
    properties: bytes
    body: bytes


def published(outgoing: Outgoing, channel: int, frame_max: int) -> Ready:
    """Return the frames of a message, each of at most `frame_max` bytes. Raises
    DispatchRejected if the destination's name or the headers are too long."""
    topic = wire.is_topic(outgoing.destination)
    name = outgoing.destination.removeprefix(wire.TOPIC_PREFIX)
    route = short(TOPICS if topic else "") + short(name)
    expiration = None
    if outgoing.time_to_live is not None:
        expiration = max(0, round(outgoing.time_to_live * 1000))
    properties = encode(outgoing.headers, expiration)
    body, size = outgoing.body, len(outgoing.body)
    arguments = b"\0\0" + route + (b"\0" if topic else _MANDATORY)
    length, most = 12 + len(properties), frame_max - _AROUND
    if length > most:
        # RabbitMQ would hang up: bodies are split into frames, headers are not.
        raise DispatchRejected(f"{length} bytes of headers; AMQP has room for {most}")
    pieces = [
        method(channel, spec.Basic.Publish, arguments),
        struct.pack(">BHIHHQ", HEADER, channel, length, _BASIC, 0, size),
        properties,
        _END,
    ]
    for at in range(0, size, most):
        piece = body[at : at + most]
        pieces += [struct.pack(">BHI", BODY, channel, len(piece)), piece, _END]
    return Ready(b"".join(pieces), route, properties, body)


def acknowledged(tag: int, channel: int, *, multiple: bool = False) -> bytes:
    """Return the frame that acknowledges the delivery with this tag. With `multiple`,
    the frame also acknowledges all earlier deliveries."""
    return method(channel, spec.Basic.Ack, struct.pack(">QB", tag, multiple))


def method(channel: int, called: tuple[int, int], arguments: bytes) -> bytes:
    """Return the frame that calls an AMQP method."""
    size = 4 + len(arguments)
    head = struct.pack(">BHIHH", METHOD, channel, size, *called)
    return head + arguments + _END


def short(text: str) -> bytes:
    """Return a name in AMQP's encoding. Raises DispatchRejected if the name is too
    long."""
    try:
        written = text.encode()
        return bytes([len(written)]) + written
    except ValueError:
        raise DispatchRejected(
            f"a queue or a topic is named by text of 255 bytes at most: {text!r}"
        ) from None
