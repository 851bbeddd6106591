"""How many messages, and bytes, of one session may be in flight.

Hop 4 of a message. Room is taken before a frame is queued and given back with its
outcome. Messages whose callbacks have not run yet are counted too, so that a slow
listener holds its senders up instead of filling the memory.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from . import completion
from .errors import WindowFullError

if TYPE_CHECKING:
    from .session import Session

#: Callbacks that may wait, in windows, before sends block.
_PARKED_WINDOWS = 4
#: What callbacks themselves may send beyond the window before it is an error.
_HARD_CAP = 65_536


class Window:
    """Room for sends; every method is called with the connection's lock held."""

    def __init__(self, session: Session, messages: int, max_bytes: int) -> None:
        """Bound the session's messages in flight and their bytes."""
        self._session = session
        self._messages = messages
        self._bytes = max_bytes
        self._in_flight = 0
        self._in_flight_bytes = 0
        self.parked = 0
        self.waiters = 0

    @property
    def in_flight(self) -> int:
        """Messages without an outcome."""
        return self._in_flight

    def acquire(self, size: int, give_up: float) -> None:
        """Wait for room and take it.

        Raises ``WindowFullError``. Sends from a callback never wait, since the
        callback's return is what makes room; only a hard cap stops them.
        """
        own = completion.running_for.get()
        if own is None or own.session.link is not self._session.link:
            self._wait_for_room(size, give_up)
        elif self._in_flight + self.parked >= max(16 * self._messages, _HARD_CAP):
            raise WindowFullError(
                "Callbacks have put far more messages in flight than the window "
                "allows; let them send fewer."
            )
        self._in_flight += 1
        self._in_flight_bytes += size

    def _has_room(self, size: int) -> bool:
        if self.parked >= _PARKED_WINDOWS * self._messages:
            return False
        if self._in_flight == 0:  # a message larger than the window goes alone
            return True
        full = self._in_flight >= self._messages
        return not full and self._in_flight_bytes + size <= self._bytes

    def _wait_for_room(self, size: int, give_up: float) -> None:
        while not self._has_room(size):
            left = give_up - time.monotonic()
            if left <= 0:
                raise WindowFullError(
                    f"{self._in_flight} messages are in flight, {self.parked} more "
                    "wait for their callbacks, and none finished in time. This message "
                    "was not written; send it again later."
                )
            self.waiters += 1
            try:
                self._session.link.changed.wait(min(left, 0.05))
            finally:
                self.waiters -= 1
            self._session.check_usable()

    def release(self, size: int) -> None:
        """Give room back."""
        self._in_flight -= 1
        self._in_flight_bytes -= size
        # Waking a sender for every receipt would cost more than the send: wait until
        # a sixteenth of the window is free. Waiters look by themselves now and then.
        if self.waiters and self._in_flight <= self._messages * 15 // 16:
            self._session.link.changed.notify_all()

    def unpark(self) -> None:
        """Count a callback that has returned."""
        self.parked -= 1
        if self.waiters and self.parked == _PARKED_WINDOWS * self._messages - 1:
            self._session.link.changed.notify_all()
