"""The message class that users of this client send and receive, the options of its
delivery, and the bytes of its SEND frame.

Hops 4 and 6. The body is text, bytes, or a JSON value. The headers are text. The client
sets an id, a time, a priority and other values, which are readable after the send has
completed. While a send is in flight, reading or changing the message raises
MessageNotAccessibleError.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import Any, NamedTuple

from .. import wire
from ..envelope import serializers
from ..errors import DecodeError
from .destination import Destination
from .errors import MessageFormatError, MessageNotAccessibleError
from .frames import Frame

#: The header with a message's identity, the same in every resend.
ID_HEADER = wire.MESSAGE_ID
#: Headers of the protocol; a message cannot set them.
RESERVED_HEADERS = wire.OF_A_DELIVERY
#: The fixed bits of a random UUID, version and variant, and the mask of the others.
_VERSION_4 = 4 << 76 | 0b10 << 62
_RANDOM_BITS = ~(0xF << 76 | 0b11 << 62)


class DeliveryMode(Enum):
    """Says whether the broker keeps a message when the broker restarts."""

    PERSISTENT = "true"
    NON_PERSISTENT = "false"


class Provided(NamedTuple):
    """The values that the client sets on a message when it sends or receives the
    message."""

    message_id: str | None = None
    destination: Destination | None = None
    timestamp: datetime | None = None
    delivery_mode: DeliveryMode = DeliveryMode.PERSISTENT
    priority: int = 4
    expiration: datetime | None = None


_NOTHING = Provided()


class Message:
    """A body and headers. The same object may be sent again after its send has
    completed."""

    __slots__ = (
        "_body", "_headers", "_in_flight", "_provided",
        "ack_id", "cut", "problem", "raw_body", "raw_headers", "redelivered",
        "subscription",
    )  # fmt: skip

    def __init__(
        self, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> None:
        """``body`` is a str, bytes, a JSON value, or ``None`` for no body."""
        self._body = body
        self._headers = dict(headers) if headers else {}
        self._in_flight = False
        self._provided = _NOTHING
        #: The id of its subscription, and its own; ``None`` unless received.
        self.subscription: str | None = None
        self.ack_id: str | None = None
        #: Whether the broker has delivered it before.
        self.redelivered = False
        #: The frame as it arrived; empty unless received.
        self.raw_headers: dict[str, str] = {}
        self.raw_body = b""
        #: The fault of a received frame; ``None`` if there is none.
        self.problem: str | None = None
        #: Whether only the beginning of a body that is too long was kept.
        self.cut = False

    @classmethod
    def received(
        cls, frame: Frame, subscription: str, destination: Destination
    ) -> Message:
        """Return the message of a MESSAGE frame. Its body is decoded at the first
        access."""
        message = cls()
        headers = frame.headers
        message.subscription = subscription
        message.ack_id = headers.get("ack")
        message.redelivered = headers.get("redelivered") == "true"
        message.raw_headers = message._headers = headers
        message.raw_body = frame.body
        message.problem, message.cut = frame.problem, frame.cut
        priority = headers.get("priority", "4")
        message._provided = Provided(
            message_id=headers.get(ID_HEADER) or headers.get("message-id"),
            destination=destination,
            delivery_mode=DeliveryMode(
                "true" if headers.get("persistent") == "true" else "false"
            ),
            priority=int(priority) if re.fullmatch("[0-9]", priority) else 4,
        )
        return message

    def __repr__(self) -> str:
        """Describe the message, even while it is in flight."""
        if self._in_flight:
            return "<Message in flight>"
        return f"<Message {self._provided.message_id or 'not sent'}>"

    def copy(self) -> Message:
        """Return a new message with the same body and the application's headers. The
        new message has no id."""
        self._accessible()
        copy = Message(self._body)
        copy._headers = {
            name: value
            for name, value in self._headers.items()
            if name != ID_HEADER and wire.travels(name)
        }
        copy.raw_headers, copy.raw_body = self.raw_headers, self.raw_body
        return copy

    def encoded(self) -> tuple[bytes, str | None]:
        """Return the body as bytes, and the content type of these bytes.

        Raises ``MessageFormatError`` unless the body is text, bytes or JSON.
        """
        self._accessible()
        if self._body is None and self.raw_body:  # received, and never looked at
            return self.raw_body, self.raw_headers.get("content-type")
        return encode_body(self._body)

    def _accessible(self) -> None:
        if self._in_flight:
            raise MessageNotAccessibleError(
                "The message is in flight. Read or change it in the completion "
                "listener, or send another Message object."
            )

    @property
    def headers(self) -> dict[str, str]:
        """The headers that the application has set, or all headers of a received
        message."""
        self._accessible()
        return self._headers

    @property
    def body(self) -> Any:
        """The body. If the message was received, the body is decoded according to its
        content type.

        Raises ``MessageFormatError`` if a received body does not match its content
        type. ``raw_body`` then still returns the bytes.
        """
        self._accessible()
        if self._body is None and self.raw_body:
            self._body = _decode(self.raw_body, self.raw_headers)
        return self._body

    @body.setter
    def body(self, body: Any) -> None:
        self._accessible()
        self._body = body

    @property
    def message_id(self) -> str | None:
        """The message's id. The first send sets the id, and a resend keeps it."""
        self._accessible()
        return self._provided.message_id

    @property
    def destination(self) -> Destination | None:
        """The destination to which the message was sent, or from which it was
        received."""
        self._accessible()
        return self._provided.destination

    @property
    def timestamp(self) -> datetime | None:
        """The time at which this process sent the message."""
        self._accessible()
        return self._provided.timestamp

    @property
    def delivery_mode(self) -> DeliveryMode:
        """Whether the broker keeps the message through a restart."""
        self._accessible()
        return self._provided.delivery_mode

    @property
    def priority(self) -> int:
        """The priority of the message, from 0 to 9. The default is 4."""
        self._accessible()
        return self._provided.priority

    @property
    def expiration(self) -> datetime | None:
        """The time after which the broker may drop the message, or ``None`` if the
        message does not expire."""
        self._accessible()
        return self._provided.expiration


def encode_body(body: Any) -> tuple[bytes, str | None]:
    """Return a body's bytes and content type.

    Raises ``MessageFormatError`` unless the body is text, bytes or JSON.
    """
    if isinstance(body, bytes):
        return body, "application/octet-stream"
    if body is None:
        return b"", None
    try:
        if isinstance(body, str):
            return body.encode(), "text/plain;charset=utf-8"
        if isinstance(body, (bytearray, memoryview)):
            return bytes(body), "application/octet-stream"
        text = json.dumps(body, allow_nan=False, separators=(",", ":"))
        return text.encode(), "application/json"
    except (RecursionError, TypeError, ValueError) as error:
        raise MessageFormatError(
            f"A body of type {type(body).__name__} cannot be sent: {error}"
        ) from error


def _decode(raw: bytes, headers: Mapping[str, str]) -> Any:
    kind = headers.get("content-type", "")
    try:
        return serializers.decode(raw, kind)
    except DecodeError as error:
        raise MessageFormatError(
            f"The body is no {kind}, although its content type says so: {error}"
        ) from error


@dataclass(frozen=True, slots=True)
class Delivery:
    """Delivery options, for all sends of a producer or for one send."""

    mode: DeliveryMode = DeliveryMode.PERSISTENT
    priority: int = 4
    #: How long the broker keeps the message; 0 means without limit.
    time_to_live: timedelta = timedelta(0)
    #: How long the broker waits before it delivers the message.
    delay: timedelta = timedelta(0)

    def __post_init__(self) -> None:
        """Refuse values that no broker supports."""
        if not isinstance(self.mode, DeliveryMode):
            raise ValueError(f"A mode is a DeliveryMode, not {self.mode!r}.")
        if type(self.priority) is not int or not 0 <= self.priority <= 9:
            raise ValueError(f"A priority is 0 to 9, not {self.priority!r}.")
        for given in (self.time_to_live, self.delay):
            if not isinstance(given, timedelta):
                raise ValueError(f"A duration is a timedelta, not {given!r}.")
        if min(self.time_to_live, self.delay) < timedelta(0):
            raise ValueError("time_to_live and delay must not be negative.")


#: The options of a send that sets none.
DEFAULT = Delivery()


def new_id() -> str:
    """Return a random UUID without the overhead of `uuid4`. The random bits come from
    the operating system. A fork would copy a generator in this process, and the child
    would then repeat the ids."""
    number = int.from_bytes(os.urandom(16), "big")
    digits = "%032x" % (number & _RANDOM_BITS | _VERSION_4)
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


class Encoded:
    """An encoded SEND frame without a receipt header, and the values that are set on
    its message when it is sent."""

    __slots__ = ("body", "head", "provided", "size")

    def __init__(self, head: bytes, body: bytes, provided: Provided) -> None:
        """``head``: the header lines, without the length of the body."""
        self.head = head
        self.body = body
        self.provided = provided
        self.size = len(head) + len(body) + 64

    def frame(self, receipt: bytes = b"", transaction: str = "") -> bytes:
        """Return the whole SEND frame. Each argument that is not empty adds a header:
        the receipt's id or the transaction's name."""
        lines = b"receipt:%s\n" % receipt if receipt else b""
        if transaction:
            lines += transaction_line(transaction)
        return self.frame_with(lines)

    def frame_with(self, lines: bytes) -> bytes:
        """Return the whole SEND frame, with additional header lines."""
        body = self.body
        parts = self.head, len(body), lines, body
        return b"SEND\n%scontent-length:%d\n%s\n%s\x00" % parts


def transaction_line(name: str) -> bytes:
    """Return the header line that puts a frame into the named transaction."""
    return b"transaction:%s\n" % name.encode()
