"""The sends of one session: how many there may be, and the order of their callbacks.

Hop 4 of a message. A send takes its place as it is queued; its callback runs once its
outcome and those of all before it are known. The session owns no thread: while there
is something to tell, one task of the connection's pool tells it. A send whose listener
was not told yet is counted, so that a slow listener holds its senders up instead of
filling the memory.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator

from . import completion, pool
from .completion import CompletionListener
from .errors import WindowFullError
from .ledger import Pending, State
from .link import Link
from .message import Message

logger = logging.getLogger("django_txmsg.jms.sends")
callbacks_logger = logging.getLogger("django_txmsg.jms.callbacks")

#: Callbacks told in one task, before other sessions get their turn.
_IN_A_ROW = 256
#: Listeners that are not told yet, in windows, before sends with one block.
_UNTOLD_WINDOWS = 4
#: What callbacks themselves may send beyond the window before it is an error, ...
_HARD_CAP = 65_536
#: ... and their bytes, in windows.
_HARD_CAP_WINDOWS = 16


class Callback:
    """A listener to be told, in its turn, what became of a send."""

    __slots__ = ("listener", "message", "pending", "scope", "size")

    def __init__(
        self,
        pending: Pending,
        message: Message,
        listener: CompletionListener,
        size: int,
        scope: tuple[object, ...],
    ) -> None:
        """``scope``: what must not be waited for while the callback runs."""
        self.pending = pending
        self.message = message
        self.listener = listener
        self.size = size
        self.scope = scope

    def run(self) -> None:
        """Tell the listener, on a pool thread; its errors are logged and end there."""
        message, error = self.message, self.pending.error
        if self.pending.state is not State.CANCELLED:  # it may be sent again by now
            message._in_flight = False
        before = completion.run_for(self.scope)
        try:
            if self.pending.state is State.CANCELLED:
                self.listener.on_withdrawn()  # type: ignore[attr-defined]
            elif error is None:
                self.listener.on_completion(message)
            else:
                self.listener.on_exception(message, error)
        except BaseException:
            what = self.pending.what
            logger.exception("The completion listener of %s failed.", what)
        finally:
            completion.run_for(before)


class Sends:
    """What one session has in flight; its lock is the connection's."""

    def __init__(self, link: Link, messages: int, max_bytes: int) -> None:
        """Bound the messages without an outcome, and all their bytes."""
        self._link = link
        self._messages = messages
        self._max_bytes = max_bytes
        self._order: deque[Callback] = deque()
        self._telling = False
        self._runs_in: threading.Thread | None = None
        self._untold_bytes = 0
        self._in_flight_bytes = 0
        #: Sends without an outcome.
        self.in_flight = 0
        #: Sends with a listener so far, and those of them whose callback has returned:
        #: since they are told in their order, all up to that number.
        self.accepted = 0
        self.finished = 0
        self.waiters = 0
        self._awaited: list[int] = []

    @property
    def untold(self) -> int:
        """Sends whose callback has not returned."""
        return self.accepted - self.finished

    # -- room; with the lock held -------------------------------------------------

    def wait_for_room(
        self, size: int, timeout: float, check: Callable[[], None], *, told: bool
    ) -> None:
        """Wait until a send of that size may go, one with a listener if ``told``.

        Raises ``WindowFullError``, or what ``check`` raises after a wait. Sends from a
        callback never wait, since its return is what makes room; only a hard cap stops
        them.
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
        if self._has_room(size, told=told):
            return
        give_up = time.monotonic() + timeout
        while not self._has_room(size, told=told):
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

    def _has_room(self, size: int, *, told: bool) -> bool:
        # A message larger than the window goes alone.
        if self.in_flight and (
            self.in_flight >= self._messages
            or self._in_flight_bytes + size > self._max_bytes
        ):
            return False
        return not (told and self.untold) or (
            self.untold < _UNTOLD_WINDOWS * self._messages
            and self._untold_bytes + size <= self._max_bytes
        )

    def take(self, size: int) -> None:
        """Count one more in flight."""
        self.in_flight += 1
        self._in_flight_bytes += size

    def release(self, size: int) -> None:
        """Note that one more outcome is known."""
        self.in_flight -= 1
        self._in_flight_bytes -= size
        # Waking a sender for every receipt would cost more than the send: wait until
        # a sixteenth of the window is free. Waiters look by themselves now and then.
        if self.waiters and self.in_flight <= self._messages * 15 // 16:
            self._link.changed.notify_all()

    @contextlib.contextmanager
    def one_more(self) -> Iterator[None]:
        """Count what goes on inside as one in flight."""
        with self._link.lock, self._link.whole:
            self.take(0)
        try:
            yield
        finally:
            with self._link.lock:
                self.release(0)

    # -- callbacks ----------------------------------------------------------------

    def enqueue(self, callback: Callback) -> int:
        """Give it its place, and return its number; with the lock held."""
        self._order.append(callback)
        self._untold_bytes += callback.size
        self.accepted += 1
        if callback.pending.settled:
            self.completed()
        return self.accepted

    def completed(self) -> None:
        """Let callbacks run whose turn it is; with the lock held."""
        if self._telling:
            if self._link.pool.stranded:
                self._link.pool.start_thread()
        elif self._order and self._order[0].pending.settled:
            self._telling = True
            self._link.pool.submit(self._tell)

    def _tell(self) -> None:
        """Run the callbacks at the head of the order, on a pool thread."""
        callback: Callback | None = None
        for _ in range(_IN_A_ROW):
            with self._link.lock:
                if callback is not None:
                    self._finish(callback)
                if not self._order or not self._order[0].pending.settled:
                    self._telling = False
                    return
                callback = self._order.popleft()
            self._runs_in = threading.current_thread()
            callback.run()  # which raises nothing
            self._runs_in = None
        with self._link.lock:
            if callback is not None:
                self._finish(callback)
        self._link.pool.submit(self._tell)

    def _finish(self, callback: Callback) -> None:
        self.finished += 1
        self._untold_bytes -= callback.size
        full = _UNTOLD_WINDOWS * self._messages - 1
        if self.finished in self._awaited or (self.waiters and self.untold == full):
            self._link.changed.notify_all()

    # -- waiting ------------------------------------------------------------------

    def wait(self, number: int | None = None) -> None:
        """Wait until the callbacks of all sends so far, or up to one, have returned.

        Sends end by their deadlines; a callback that never returns is waited for, and
        a warning says so.
        """
        number = self.accepted if number is None else number
        if self._wait(number, self._link.options.close_timeout):
            callbacks_logger.warning(
                "Still waiting for %d asynchronous sends or their callbacks.%s",
                number - self.finished,
                self._who_waits_for_whom(),
            )
            self._wait(number, float("inf"))

    def _who_waits_for_whom(self) -> str:
        """Name the callback that is waited for, and where it is: it may have handed
        this very wait to another thread, and be waiting for that."""
        runs_in = self._runs_in
        if runs_in is None:
            return ""
        frame = sys._current_frames().get(runs_in.ident or 0)
        stack = "".join(traceback.format_stack(frame))
        return (
            f" Thread {threading.current_thread().name!r} waits for a callback that "
            f"runs in {runs_in.name!r}; if that one waits in turn for the first, "
            f"neither ends:\n{stack}"
        )

    def wait_until(self, give_up: float) -> int:
        """Wait until then for all callbacks; return how many sends are left."""
        return self._wait(self.accepted, give_up - time.monotonic())

    def _wait(self, number: int, seconds: float) -> int:
        give_up = time.monotonic() + seconds
        with pool.waiting():
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
        """Wait until nothing is in flight; the sends' deadlines, and the connection's
        loss, bound the wait."""
        with self._link.lock:
            self.waiters += 1
            try:
                while self.in_flight and self._link.error is None:
                    self._link.changed.wait(0.5)
            finally:
                self.waiters -= 1
