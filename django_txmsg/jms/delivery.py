"""The options of a delivery, and the bytes of a SEND frame.

Hop 4 of a message. If the application changes the message later, the frame stays the
same.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

from .message import DeliveryMode, Provided

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
