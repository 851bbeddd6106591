"""The sends of one session, in the order of their callbacks.

Hop 4 of a message. The order of callbacks is the order in which frames are queued. A
callback runs when the outcome of its own send and the outcomes of all earlier sends are
known. The session owns no thread. A task in the connection's pool runs the callbacks
that are due.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from . import completion
from .completion import CompletionListener
from .errors import WindowFullError
from .ledger import ACKED, CANCELLED, QUEUED, Pending
from .link import Link, Request
from .message import Message

#: Limit of outstanding listeners, as a multiple of the window. At this limit, a send
#: with a listener blocks.
_UNCOMPLETED_WINDOWS = 4
#: The smallest limit of messages in flight for a send from a callback. Beyond the
#: limit, the send raises an error.
_HARD_CAP = 65_536
#: Limit of their bytes, as a multiple of the window.
_HARD_CAP_WINDOWS = 16
logger = logging.getLogger("django_txmsg.jms.sends")
callbacks_logger = logging.getLogger("django_txmsg.jms.callbacks")

#: Most callbacks that one task runs before other sessions get their turn.
_IN_A_ROW = 256


class WaitedSend(Request):
    """A send whose caller waits for the outcome."""

    __slots__ = ("_sends", "_size")

    is_send = True

    def __init__(
        self, link: Link, what: str, timeout: float, sends: Sends, size: int
    ) -> None:
        """``sends`` are the sends of the session. ``size`` is the size of this send in
        bytes."""
        super().__init__(link, what, timeout)
        self._sends = sends
        self._size = size

    def on_settled(self) -> None:
        """Release the send's room in the window, and wake the caller."""
        self._sends.release(self._size)
        super().on_settled()


class AsyncSend(Pending):
    """A send whose listener is called with the outcome, in the order of the session's
    sends."""

    __slots__ = ("_listener", "_scope", "_sends", "message", "size")

    is_send = True

    def __init__(
        self,
        what: str,
        timeout: float,
        sends: Sends,
        message: Message,
        listener: CompletionListener,
        size: int,
        scope: tuple[object, ...],
    ) -> None:
        """``scope`` holds the objects that the callback must not wait for."""
        super().__init__(what, timeout)
        self._sends = sends
        self.message = message
        self._listener: CompletionListener | None = listener
        self.size = size
        self._scope = scope

    def on_settled(self) -> None:
        """Release the send's room in the window, and start the callbacks that are due.
        If the send has failed, its transaction fails too."""
        self._sends.release(self.size)
        if self.error is not None and self.owner is not None:
            self.owner.fail(self.error)
        self._sends.completed()

    def tell(self) -> None:
        """Call the listener, on a pool thread. If the listener raises, log the
        exception."""
        message, error = self.message, self.error
        listener, self._listener = self._listener, None  # a future's has this object
        assert listener is not None
        cancelled = self.state is CANCELLED
        if not cancelled:  # it may be sent again by now
            message._in_flight = False
        before = completion.run_for(self._scope)
        try:
            if cancelled:
                listener.on_withdrawn()  # type: ignore[attr-defined]  # only ours are cancelled
            elif error is None:
                listener.on_completion(message)
            else:
                listener.on_exception(message, error)
        except BaseException:
            logger.exception("The completion listener of %s failed.", self.what)
        finally:
            completion.run_for(before)


class Sends:
    """The sends of one session. They use the connection's lock. Callers hold the lock
    for the methods of the window.

    A send takes room in the window when its frame is queued, and releases the room when
    its outcome is known. A second limit applies to the sends whose listeners have not
    returned. So a slow listener slows down the senders, and does not fill the memory.
    """

    def __init__(self, link: Link) -> None:
        """Limit in-flight messages and bytes as the connection's options say."""
        self._link = link
        self._messages = link.options.max_in_flight
        self._max_bytes = link.options.max_in_flight_bytes
        self._most_uncompleted = _UNCOMPLETED_WINDOWS * self._messages
        self._uncompleted_bytes = 0
        self._in_flight_bytes = 0
        #: Sends without an outcome.
        self.in_flight = 0
        #: The number of sends with a listener so far, and of callbacks that have
        #: returned. Callbacks run in the order of the sends.
        self.accepted = 0
        self.finished = 0
        self.waiters = 0
        self._order: deque[AsyncSend] = deque()
        self._telling = False
        self._awaited: list[int] = []

    # -- the window ---------------------------------------------------------------

    @property
    def uncompleted(self) -> int:
        """The number of sends whose callback has not returned."""
        return self.accepted - self.finished

    def wait_for_room(
        self, size: int, timeout: float, check: Callable[[], None], *, listened: bool
    ) -> None:
        """Wait until there is room for a send of that size.

        Raises ``WindowFullError``, or the error that ``check`` raises after a wait.

        A callback must not wait for room, because room becomes free only after the
        callback returns. Instead, callbacks have a much higher limit, and immediately
        get ``WindowFullError`` if they reach it.
        """
        if completion.is_running_for(self._link):
            most = max(16 * self._messages, _HARD_CAP)
            held = self._in_flight_bytes + self._uncompleted_bytes
            if self.in_flight + self.uncompleted >= most or (
                held and held + size > _HARD_CAP_WINDOWS * self._max_bytes
            ):
                raise WindowFullError(
                    "Callbacks have put far more messages in flight than the window "
                    "allows; let them send fewer."
                )
            return
        give_up = time.monotonic() + timeout
        while not self.has_room(size, listened=listened):
            left = give_up - time.monotonic()
            if left <= 0:
                raise WindowFullError(
                    f"{self.in_flight} messages are in flight, {self.uncompleted} wait "
                    "for their callbacks, and too few finished in time. This message "
                    "was not written; send it again later."
                )
            self.waiters += 1
            try:
                self._link.changed.wait(min(left, 0.05))
            finally:
                self.waiters -= 1
            check()

    def has_room(self, size: int, *, listened: bool) -> bool:
        """Return whether the window has room for a send of that size. Pass
        ``listened=True`` if the send has a listener."""
        # A message larger than the window is sent alone.
        in_flight = self.in_flight
        if in_flight and (
            in_flight >= self._messages
            or self._in_flight_bytes + size > self._max_bytes
        ):
            return False
        uncompleted = self.accepted - self.finished if listened else 0
        return not uncompleted or (
            uncompleted < self._most_uncompleted
            and self._uncompleted_bytes + size <= self._max_bytes
        )

    def take(self, size: int) -> None:
        """Count one more send as in flight."""
        self.in_flight += 1
        self._in_flight_bytes += size

    def release(self, size: int) -> None:
        """Count a send as no longer in flight, because it has its outcome."""
        self.in_flight -= 1
        self._in_flight_bytes -= size
        # Waking a sender for every receipt would cost more than the send, so wait until
        # a sixteenth of the window is free. Waiting threads also check periodically.
        if self.waiters and self.in_flight <= self._messages * 15 // 16:
            self._link.changed.notify_all()

    # -- callbacks ----------------------------------------------------------------

    def enqueue(self, send: AsyncSend) -> int:
        """Append a send, and return its number. The caller holds the lock."""
        self._order.append(send)
        self._uncompleted_bytes += send.size
        self.accepted += 1
        if send.state >= ACKED:
            self.completed()
        return self.accepted

    def withdraw(self, send: AsyncSend) -> bool:
        """Cancel a send, if its frame has not been taken for writing."""
        with self._link.lock:
            if send.state is not QUEUED or send.owner is not None:
                return False
            send.message._in_flight = False
            return self._link.ledger.settle(send, CANCELLED, None)

    def completed(self) -> None:
        """Start a pool task for the callbacks that are due. The caller holds the
        lock."""
        if self._telling:
            if self._link.pool.stranded:
                self._link.pool.start_thread()
        elif self._order and self._order[0].state >= ACKED:
            self._telling = True
            self._link.pool.submit(self._tell)

    def _tell(self) -> None:
        """Run the callbacks that are due, in order. Runs on a pool thread."""
        send: AsyncSend | None = None
        order = self._order
        for _ in range(_IN_A_ROW):
            with self._link.lock:
                if send is not None:
                    self._finish(send)
                if not order or order[0].state < ACKED:
                    self._telling = False
                    return
                send = order.popleft()
            send.tell()  # which raises nothing
        with self._link.lock:
            if send is not None:
                self._finish(send)
        self._link.pool.submit(self._tell)

    def _finish(self, send: AsyncSend) -> None:
        self.finished += 1
        self._uncompleted_bytes -= send.size
        has_room = self.uncompleted == self._most_uncompleted - 1
        if self.finished in self._awaited or (self.waiters and has_room):
            self._link.changed.notify_all()

    # -- waiting ------------------------------------------------------------------

    def wait(self, number: int | None = None) -> None:
        """Wait until the callbacks of all sends up to the send ``number`` have
        returned. The default is the last send so far.

        Every send gets an outcome by its deadline at the latest. If a callback takes
        long to return, a warning is logged, and the wait continues.
        """
        number = self.accepted if number is None else number
        if self._wait(number, self._link.options.close_timeout):
            callbacks_logger.warning(
                "Still waiting for %d asynchronous sends or their callbacks. If one of "
                "these callbacks waits for this thread, neither wait ends.",
                number - self.finished,
            )
            self._wait(number, float("inf"))

    def wait_until(self, give_up: float) -> int:
        """Wait for all callbacks, at most until the monotonic time ``give_up``. Return
        the number of callbacks that have not returned."""
        return self._wait(self.accepted, give_up - time.monotonic())

    def _wait(self, number: int, seconds: float) -> int:
        give_up = time.monotonic() + seconds
        with completion.waiting():
            self._awaited.append(number)
            try:
                while self.finished < number:
                    with self._link.lock:
                        left = give_up - time.monotonic()
                        if self.finished >= number or left <= 0:
                            break
                        self._link.changed.wait(min(left, 0.5))
                    self._link.pool.help_out()
            finally:
                self._awaited.remove(number)
        return max(0, number - self.finished)

    def wait_for_outcomes(self) -> None:
        """Wait until every send has an outcome. The wait ends earlier if the connection
        is lost, or when the deadlines of all sends have passed."""
        with self._link.lock:
            self.waiters += 1
            try:
                while self.in_flight and self._link.error is None:
                    self._link.changed.wait(0.5)
            finally:
                self.waiters -= 1
