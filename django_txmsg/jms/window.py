"""Limits the messages and bytes of one session in flight.

Hop 4 of a message. Room is taken when a send is queued and released with its outcome. A
send whose listener has not returned counts, too, so that a slow listener slows its
senders instead of filling the memory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from . import completion
from .errors import WindowFullError
from .link import Link

#: How many listeners may be outstanding, in windows, before sends with one block.
_UNTOLD_WINDOWS = 4
#: How much callbacks themselves may send beyond the window before it is an error, ...
_HARD_CAP = 65_536
#: ... and their bytes, in windows.
_HARD_CAP_WINDOWS = 16


class Window:
    """Room for sends; every method except ``one_more`` is called with the lock held."""

    def __init__(self, link: Link, messages: int, max_bytes: int) -> None:
        """Limit in-flight messages and bytes."""
        self._link = link
        self._messages = messages
        self._max_bytes = max_bytes
        self._most_untold = _UNTOLD_WINDOWS * messages
        self._untold_bytes = 0
        self._in_flight_bytes = 0
        #: Sends without an outcome.
        self.in_flight = 0
        #: Sends with a listener so far, and those whose callback has returned:
        #: callbacks run in order, so these are all up to that number.
        self.accepted = 0
        self.finished = 0
        self.waiters = 0

    @property
    def untold(self) -> int:
        """Sends whose callback has not returned."""
        return self.accepted - self.finished

    def wait_for_room(
        self, size: int, timeout: float, check: Callable[[], None], *, told: bool
    ) -> None:
        """Wait until there is room for a send of that size.

        Raises ``WindowFullError``, or what ``check`` raises after a wait. Sends from a
        callback never wait, since its return is what makes room; only a hard limit
        stops them.
        """
        if completion.is_running_for(self._link):
            most = max(16 * self._messages, _HARD_CAP)
            held = self._in_flight_bytes + self._untold_bytes
            if self.in_flight + self.untold >= most or (
                held and held + size > _HARD_CAP_WINDOWS * self._max_bytes
            ):
                raise WindowFullError(
                    "Callbacks have put far more messages in flight than the window "
                    "allows; let them send fewer."
                )
            return
        give_up = time.monotonic() + timeout
        while not self.has_room(size, told=told):
            left = give_up - time.monotonic()
            if left <= 0:
                raise WindowFullError(
                    f"{self.in_flight} messages are in flight, {self.untold} wait for "
                    "their callbacks, and too few finished in time. This message was "
                    "not written; send it again later."
                )
            self.waiters += 1
            try:
                self._link.changed.wait(min(left, 0.05))
            finally:
                self.waiters -= 1
            check()

    def has_room(self, size: int, *, told: bool) -> bool:
        """Return whether a send of that size fits; ``told``: one with a listener."""
        # A message larger than the window is sent alone.
        in_flight = self.in_flight
        if in_flight and (
            in_flight >= self._messages
            or self._in_flight_bytes + size > self._max_bytes
        ):
            return False
        untold = self.accepted - self.finished if told else 0
        return not untold or (
            untold < self._most_untold and self._untold_bytes + size <= self._max_bytes
        )

    def take(self, size: int) -> None:
        """Count one more in flight."""
        self.in_flight += 1
        self._in_flight_bytes += size

    def release(self, size: int) -> None:
        """Record one more outcome."""
        self.in_flight -= 1
        self._in_flight_bytes -= size
        # Waking a sender for every receipt would cost more than the send, so wait until
        # a sixteenth of the window is free. Waiting threads also check periodically.
        if self.waiters and self.in_flight <= self._messages * 15 // 16:
            self._link.changed.notify_all()

    @contextlib.contextmanager
    def one_more(self) -> Iterator[None]:
        """Count the block as one more send in flight."""
        with self._link.lock, self._link.whole:
            self.take(0)
        try:
            yield
        finally:
            with self._link.lock:
                self.release(0)
