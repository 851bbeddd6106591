"""Hops 4 to 6 on AMQP, in bytes: the frames that are built here, not by py-amqp.

These are the frames of each message: its publication with its content, and its
acknowledgement. `content.py` encodes the content's header.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from amqp import spec

from ... import wire
from ...errors import DispatchRejected
from ..base import Outgoing
from . import content

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
    """An encoded message, and the values by which to recognise it if it is returned."""

    frames: bytes
    route: bytes
    properties: bytes
    body: bytes


def published(outgoing: Outgoing, channel: int, frame_max: int) -> Ready:
    """Return the frames of a message, none of them longer than `frame_max`. Raises
    DispatchRejected for a name or headers that do not fit."""
    topic = wire.is_topic(outgoing.destination)
    name = outgoing.destination.removeprefix(wire.TOPIC_PREFIX)
    route = short(TOPICS if topic else "") + short(name)
    expiration = None
    if outgoing.time_to_live is not None:
        expiration = max(0, round(outgoing.time_to_live * 1000))
    properties = content.encode(outgoing.headers, expiration)
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
    """Return the frame that acknowledges a delivery, or with `multiple` all up to
    it."""
    return method(channel, spec.Basic.Ack, struct.pack(">QB", tag, multiple))


def refused(tag: int, channel: int) -> bytes:
    """Return the frame that returns a delivery to its queue."""
    return method(channel, spec.Basic.Nack, struct.pack(">QB", tag, 0b10))


def method(channel: int, called: tuple[int, int], arguments: bytes) -> bytes:
    """Return the frame of a method."""
    size = 4 + len(arguments)
    head = struct.pack(">BHIHH", METHOD, channel, size, *called)
    return head + arguments + _END


def short(text: str) -> bytes:
    """Return a name in AMQP's encoding. Raises DispatchRejected if it does not fit."""
    try:
        written = text.encode()
        return bytes([len(written)]) + written
    except ValueError:
        raise DispatchRejected(
            f"a queue or a topic is named by text of 255 bytes at most: {text!r}"
        ) from None
