"""Encodes a message into the bytes of its SEND frame.

Hop 4 of a message. The encoder reports every error of a message before the session
writes a byte. If the application changes the message later, the frame stays the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from . import frames
from .destination import Destination
from .dialect import Dialect
from .errors import MessageFormatError, UnsupportedOperationError
from .message import (
    ID_HEADER,
    RESERVED_HEADERS,
    DeliveryMode,
    Message,
    Provided,
)

_MILLISECOND = timedelta(milliseconds=1)
#: The header line of a message that the broker keeps through a restart.
_KEPT = b"persistent:true\n"
#: The fixed bits of a random UUID, version and variant, and the mask of the others.
_VERSION_4 = 4 << 76 | 0b10 << 62
_RANDOM_BITS = ~(0xF << 76 | 0b11 << 62)


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
    """An encoded SEND frame without a receipt header, and the id of its message."""

    __slots__ = ("body", "head", "message_id", "size")

    def __init__(self, head: bytes, body: bytes, message_id: str) -> None:
        """``head``: the header lines, without the length of the body."""
        self.head = head
        self.body = body
        self.message_id = message_id
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


class EncodedMessage(Encoded):
    """An encoded message, and the values that are set on the message when it is
    sent."""

    __slots__ = ("provided",)

    def __init__(self, head: bytes, body: bytes, provided: Provided) -> None:
        """Keep the bytes of the frame, and the values to set on the message."""
        super().__init__(head, body, provided.message_id or "")
        self.provided = provided


def transaction_line(name: str) -> bytes:
    """Return the header line that puts a frame into the named transaction."""
    return b"transaction:%s\n" % name.encode()


def encode_message(
    target: Destination,
    message: Message,
    delivery: Delivery,
    properties: Mapping[str, str],
    *,
    dialect: Dialect,
    address_lines: Callable[[Destination], bytes],
    transacted: bool,
) -> EncodedMessage:
    """Encode a message for one destination of a broker. ``properties`` are default
    headers; ``address_lines`` makes the header lines for a destination.

    Raises ``InvalidDestinationError``, ``MessageFormatError``,
    ``MessageNotAccessibleError`` or ``UnsupportedOperationError``.
    """
    application = message.headers
    if properties:
        application = {**properties, **application}
    if not RESERVED_HEADERS.isdisjoint(application):
        names = ", ".join(sorted(RESERVED_HEADERS.intersection(application)))
        raise MessageFormatError(
            f"Headers {names} belong to the protocol; rename them in the message. To "
            "send on what was received, send its copy()."
        )
    dialect.check_headers(application)
    body, content_type = message.encoded()
    now = datetime.now(timezone.utc)
    message_id = application.get(ID_HEADER) or message._provided.message_id or new_id()
    headers = {**application, ID_HEADER: message_id}
    if content_type is not None:
        headers.setdefault("content-type", content_type)
    expiration = None
    via = target
    if delivery is not DEFAULT:
        if delivery.priority != DEFAULT.priority:
            headers["priority"] = str(delivery.priority)
        if delivery.time_to_live:
            expiration = now + delivery.time_to_live
            left = delivery.time_to_live // _MILLISECOND
            headers |= dialect.expiry_headers(int(now.timestamp() * 1000), left)
        if held := delivery.delay // _MILLISECOND:
            via, held_by = dialect.delayed(target, held, transacted=transacted)
            if delivery.time_to_live and dialect.time_to_live_header in held_by:
                raise UnsupportedOperationError(
                    f"{dialect.name} delays a message by letting it expire: it cannot "
                    "have a time to live as well."
                )
            headers |= held_by
    head = b"%s%s%s" % (
        address_lines(via),
        _KEPT if delivery.mode is DeliveryMode.PERSISTENT else dialect.volatile_line,
        frames.header_lines(headers.items()),
    )
    mode, priority = delivery.mode, delivery.priority
    provided = Provided(message_id, target, now, mode, priority, expiration)
    return EncodedMessage(head, body, provided)
