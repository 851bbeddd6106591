"""A link to one broker, through which sessions, producers and consumers write.

Hop 4 and 6 of a message: frames with a receipt, frames without one, barriers, and
DISCONNECT.
"""

from __future__ import annotations

import logging
import threading
import time

from . import frames
from .errors import MessagingError
from .ledger import Owner, Pending
from .line import Line

logger = logging.getLogger("django_txmsg.jms.link")


class Request(Pending):
    """A frame with a thread that waits for the answer; the reader wakes it."""

    __slots__ = ("_answered", "_link")

    def __init__(
        self, link: Link, what: str, timeout: float, owner: Owner | None = None
    ) -> None:
        """Describe the frame for error texts."""
        super().__init__(what, timeout, owner)
        self._link = link
        self._answered = threading.Event()

    def on_settled(self) -> None:
        """Wake the waiting thread."""
        self._answered.set()

    def wait(self) -> None:
        """Wait for the outcome and raise its error; the deadline bounds the wait."""
        self._link.refuse_inside()
        while not self._answered.wait(1.0):
            pass
        if self.error is not None:
            raise self.error


class Link(Line):
    """Logged in when created; ended by ``close``, or lost."""

    def next_name(self, kind: str) -> str:
        """Return a name that no other transaction or subscription of this link has."""
        return f"{kind}{next(self._numbers)}"

    def seconds(self, timeout: float | None) -> float:
        """Return a timeout, by default the connection's.

        Raises ``ValueError`` for an invalid one.
        """
        if timeout is None:
            return self.options.send_timeout
        if not timeout > 0:
            raise ValueError(f"A timeout is more than 0 seconds, not {timeout!r}.")
        return timeout

    def put(self, data: bytes, pending: Pending, *, at_once: bool = False) -> None:
        """Queue a frame with a receipt, the lock held; ``at_once``: write it now if no
        other frame waits."""
        self.ledger.reserve(pending, time.monotonic())
        put = self.writer.put_now if at_once else self.writer.put
        put(data, pending)

    def post(self, data: bytes, owner: Owner | None = None) -> None:
        """Queue frames that ask for no receipt."""
        with self.lock, self.whole:
            self.check_alive()
            self.ledger.note_loose(owner)
            self.writer.put(data)

    def ask(
        self,
        command: str,
        headers: dict[str, str],
        *,
        timeout: float | None = None,
        owner: Owner | None = None,
        what: str = "",
    ) -> Request:
        """Queue a frame with a receipt and return the request to wait for."""
        request = Request(self, what or command, self.seconds(timeout), owner=owner)
        self.submit(request, command, headers)
        return request

    def submit(self, pending: Pending, command: str, headers: dict[str, str]) -> None:
        """Queue a frame that carries no message, with a receipt."""
        pending.receipt = self.ledger.new_receipt()
        data = frames.encode(command, {**headers, "receipt": pending.receipt.decode()})
        with self.lock, self.whole:
            self.check_alive()
            self.put(data, pending, at_once=True)

    def barrier(
        self, *, timeout: float | None = None, owner: Owner | None = None
    ) -> Request:
        """Request proof that the broker has handled every frame before this one."""
        request = Request(self, "the barrier", self.seconds(timeout), owner=owner)
        self.put_barrier(request)
        return request

    def put_barrier(self, pending: Pending) -> None:
        """Queue a barrier; its answer settles the pending frame.

        The barrier is a transaction begun and aborted at once. Frames of one connection
        are handled in order, so its receipt proves that those before it were handled.
        """
        name = {"transaction": self.next_name("barrier-")}
        with self.lock:
            self.post(frames.encode("BEGIN", name), pending.owner)
            self.submit(pending, "ABORT", name)

    def say_goodbye(self) -> None:
        """Let the broker handle the queued frames, and disconnect."""
        try:
            with self.lock:
                request = self.ask("DISCONNECT", {}, timeout=self.options.close_timeout)
                self._leaving = True
            request.wait()
        except MessagingError as error:  # an unanswered goodbye harms nobody
            logger.debug("DISCONNECT was not answered: %s", error)

    def drop(self) -> None:
        """Make the threads end, from wherever an object is freed; takes no lock."""
        self._transport.drop()

    def close(self) -> None:
        """End both threads and the socket; frames without an outcome stay unknown."""
        with self.lock:
            self.closed = True
            self.writer.stop()
            self.ledger.lose("the connection was closed", self._said)
            self.wake_all()
        self._transport.disconnect_socket()
        self.writer.join(5.0)
        self._transport.join(5.0)

    def abandon(self) -> None:
        """Close the socket in a forked child; the parent's connection goes on."""
        self._transport.abandon()
