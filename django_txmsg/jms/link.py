"""A link to one broker, through which sessions, producers and consumers write.

Hops 4 and 6 of a message. The reader thread settles frames and passes deliveries to
consumers. The writer thread writes frames. Neither thread runs user code. One lock
guards all state. No thread holds this lock during a callback, during blocking I/O or in
a log handler. A lost link is never used again. A reconnect creates a new link, so no
frame is silently sent twice.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from weakref import WeakMethod

from . import frames
from .completion import CompletionPool
from .dialect import BY_NAME, recognize
from .errors import (
    ConnectionFailedError,
    ConnectionLostError,
    IllegalStateError,
    MessagingError,
)
from .ledger import Ledger, Owner, Pending
from .options import Options
from .transport import Transport, Writer

logger = logging.getLogger("django_txmsg.jms.link")
Deliver = WeakMethod[Callable[[frames.Frame], None]]
_epochs = itertools.count(1)


class Request(Pending):
    """A frame whose sender waits for the answer. The reader thread wakes the sender."""

    __slots__ = ("_answered", "_link")

    def __init__(
        self, link: Link, what: str, timeout: float, owner: Owner | None = None
    ) -> None:
        """``what`` describes the frame in error texts."""
        super().__init__(what, timeout, owner)
        self._link = link
        self._answered = threading.Event()

    def on_settled(self) -> None:
        """Wake the waiting thread."""
        self._answered.set()

    def wait(self) -> None:
        """Wait for the outcome, at most until the deadline. If the frame has failed,
        raise its error."""
        self._link.refuse_inside()
        while not self._answered.wait(1.0):
            pass
        if self.error is not None:
            raise self.error


class Link:
    """The socket connection to one broker, with its two threads and its pending frames.

    The constructor logs in to the broker. After ``close``, or after the loss of the
    connection, the link cannot be used again.
    """

    def __init__(self, address: tuple[str, int], options: Options) -> None:
        """Connect. Raises ``ConnectionFailedError`` or ``OSError`` within the
        timeout."""
        self.address = address
        self.options = options
        self.dialect = BY_NAME[options.dialect or "activemq"]
        self.lock = threading.RLock()
        #: Notified when room, an outcome, a delivery or an end may concern a waiting
        #: thread.
        self.changed = threading.Condition(self.lock)
        #: Why the link was lost; ``None`` while it is not.
        self.error: ConnectionLostError | None = None
        #: Whether consumers return messages.
        self.delivering = True
        self.closed = False
        self.ledger = Ledger(next(_epochs), lambda: self.description)
        self.pool = CompletionPool(options.callback_threads)
        # Created under the lock, logged without it: a log handler may block.
        self._to_log: deque[str] = deque()
        self._logged = ""
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        self._routes: dict[str, Deliver] = {}
        self._connected = threading.Event()
        self._refusal = ""
        self._broker_message = ""
        self._leaving = False
        #: Whether the connection is being closed, which ends its subscriptions.
        self.ending = False
        self._send_every: float | None = None
        self.transport = Transport(address, self, options)
        self.writer = Writer(self.transport, self.lock, self.ledger)
        try:
            self._log_in()
            self.writer.start(self._send_every)
        except BaseException:
            self.closed = True
            self.transport.disconnect_socket()
            self.transport.join(1.0)
            raise

    @property
    def description(self) -> str:
        """The broker and address, for error texts."""
        return f"broker {self.address[0]}:{self.address[1]} ({self.dialect.name})"

    @property
    def inherited(self) -> bool:
        """Whether this process is a fork of the link's process. The parent process then
        owns the link's locks and socket."""
        return self._pid != os.getpid()

    def check_alive(self) -> None:
        """Raise ``ConnectionLostError`` if the connection is lost. Raise
        ``IllegalStateError`` if the link is closed, or in a forked child."""
        if self._pid != os.getpid():
            self.check_own()
        if self.error is not None:
            raise self.error.unwritten(str(self.error))
        if self.closed:
            raise IllegalStateError("The connection is closed.")

    def check_own(self) -> None:
        """Raise ``IllegalStateError`` in a forked child."""
        if self.inherited:
            raise IllegalStateError(
                "This connection was inherited through a fork; its socket belongs to "
                "the parent process. Make a new connection in the child."
            )

    def refuse_inside(self) -> None:
        """Raise ``IllegalStateError`` in a signal handler that has interrupted a send
        on this thread. The interrupted send holds the lock, so the signal handler would
        wait for the lock for ever."""
        if self.lock._is_owned() and not self.inherited:  # type: ignore[attr-defined]  # RLock's own
            raise IllegalStateError(
                "A signal handler has interrupted this thread in the middle of a send, "
                "and would wait for it. Set a flag, or an event, in the handler."
            )

    def _log_in(self) -> None:
        options = self.options
        login = frames.encode_connect(options.connect_headers(self.address[0]))
        give_up = time.monotonic() + options.connect_timeout
        self.transport.start()
        left = max(0.01, give_up - time.monotonic())
        self.transport.write(login, timeout=left)
        answered = self._connected.wait(max(0.0, give_up - time.monotonic()))
        if self._refusal or not answered:
            why = (
                f"{self._refusal.rstrip('.')}. Check the URL's port, user, password "
                "and virtual host"
                if self._refusal
                else f"no CONNECTED within {options.connect_timeout:g} s"
            )
            raise ConnectionFailedError(
                f"{self.address[0]}:{self.address[1]} refused the connection: {why}."
            )

    # -- calls of the transport, on its threads ------------------------------------

    def on_frames(self, arrived: list[frames.Frame | frames.Receipt]) -> None:
        """Settle receipts and pass messages to their consumers."""
        with self.lock:
            for frame in arrived:
                if isinstance(frame, frames.Receipt):
                    self.ledger.receipt(frame)
                elif frame.command == "MESSAGE":
                    self._deliver(frame)
                elif frame.command == "RECEIPT":
                    self.ledger.receipt(frame.headers.get("receipt-id", "").encode())
                elif frame.command == "ERROR":
                    self._on_error(frame)
                elif frame.command == "CONNECTED" and not self._connected.is_set():
                    self._on_connected(frame.headers)
            if self.ledger.answered:
                self.ledger.answered = False
                self.ledger.silent_since = time.monotonic()
        self._log()

    def _deliver(self, frame: frames.Frame) -> None:
        route = self._routes.get(frame.headers.get("subscription", ""))
        deliver = None if route is None else route()
        if deliver is not None:
            deliver(frame)
            self.changed.notify_all()

    def _log(self) -> None:
        while self._to_log:
            self._logged = self._to_log.popleft()
            logger.warning("%s", self._logged)

    def _on_connected(self, headers: dict[str, str]) -> None:
        if self.options.dialect is None:
            self.dialect = recognize(headers.get("server", ""))
        self.dialect = replace(self.dialect, existing=self.options.existing)
        version = headers.get("version", "1.0")
        if version != "1.2":
            self._refusal = f"it speaks STOMP {version}, not 1.2"
        sends, wants = (
            int(ms) / 1000 for ms in headers.get("heart-beat", "0,0").split(",")
        )
        # A broker that is silent for twice the agreed interval is dead. Our own pauses
        # are half of that at most, so a busy machine does not count as dead.
        ours = self.options.heartbeat
        if ours and wants:
            self._send_every = max(ours, wants) / 2
        if ours and sends:
            self.transport.silence_limit = 2 * max(ours, sends)
        self._connected.set()

    def _on_error(self, frame: frames.Frame) -> None:
        body = frame.body[:400].decode(errors="replace")
        body = body.partition("\n\tat ")[0].strip()  # without Java's stack trace
        broker_message = ": ".join(filter(None, (frame.headers.get("message"), body)))
        if not self._connected.is_set():
            self._refusal = broker_message or "ERROR"
            self._connected.set()
            return
        receipt = frame.headers.get("receipt-id", "")
        names = self.dialect.errors_name_receipts
        # RabbitMQ has ended this subscription, because its queue was deleted.
        ended = "subscription" in frame.headers
        blames = not ended and self.dialect.blames_frame(broker_message)
        if not self.ledger.error(
            receipt, broker_message, names_receipts=names, blames=blames
        ):
            self._broker_message = broker_message
            if self.error is not None:  # the writer was first to notice the end
                self.error.broker_message = broker_message
            self.lose(f"the broker answered ERROR: {broker_message}")
        elif not receipt:
            self.changed.notify_all()
            line = f"{self.description} answered ERROR: {broker_message}"
            # A full queue sends one for each frame.
            if line not in self._to_log and line != self._logged:
                self._to_log.append(line)

    def on_progress(self) -> None:
        """Restart the time-outs of pending frames, because the broker is reading
        again."""
        with self.lock:
            self.ledger.defer(time.monotonic())

    def on_lost(self, reason: str, *, silent: bool = False) -> None:
        """Handle the loss of the connection. If the login is complete, mark the link as
        lost. Otherwise, make the login fail with this reason."""
        with self.lock:
            if self._connected.is_set():
                self.lose(reason, silent=silent)
            else:
                self._refusal = reason
                self._connected.set()
        self._log()

    def tick(self) -> None:
        """Give frames that are past their deadline the outcome "unknown". Disconnect if
        several frames in a row were not answered in time."""
        if self.pool.stranded:
            self.pool.start_thread()
        with self.lock:
            now, ledger = time.monotonic(), self.ledger
            ledger.expire(now)
            limit = self.options.give_up_after_timeouts
            silent_until = ledger.silent_since + self.options.send_timeout
            if limit and ledger.timeouts_in_a_row >= limit and silent_until <= now:
                self.lose(f"{limit} frames in a row had no answer in time", silent=True)

    def lose(self, reason: str, *, silent: bool = False) -> None:
        """Mark the link as lost, and disconnect. Later calls have no effect. Pass
        ``silent=True`` if the broker has stopped reading or answering."""
        with self.lock:
            if self.closed or self._refusal or self.error is not None:
                return
            if self._leaving:  # after DISCONNECT the broker may well be the first to go
                self.ledger.lose(reason, self._broker_message, silent=silent)
                return
            self.error = ConnectionLostError(
                f"Connection to {self.description} is lost: {reason}. "
                "Make a new one with the factory.",
                broker_message=self._broker_message,
                silent=silent,
            )
            self._to_log.append(str(self.error))
            self.writer.stop()
            self.ledger.lose(reason, self._broker_message, silent=silent)
            self.transport.disconnect_socket()
            self.changed.notify_all()

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """A critical section, used with the lock held. If an exception interrupts the
        section, the link is lost: a signal handler may raise an exception between any
        two lines of the section, so the state of the link is unknown."""
        try:
            yield
        except BaseException as error:
            self.broken_by(error)
            raise

    def broken_by(self, error: BaseException) -> None:
        """Disconnect after an exception. Do nothing after a ``MessagingError``, which
        leaves the link in a known state."""
        if not isinstance(error, MessagingError):
            self.lose(f"a send was interrupted by {error!r}")

    def route(self, name: str, deliver: Callable[[frames.Frame], None]) -> None:
        """Pass the deliveries of a subscription to the method ``deliver``, as long as
        the method's object exists. The reader thread calls ``deliver`` with the lock
        held, and then wakes the waiting threads."""
        with self.lock:
            self._routes[name] = WeakMethod(deliver)

    def unroute(self, name: str) -> None:
        """Stop passing on deliveries of the subscription."""
        with self.lock:
            self._routes.pop(name, None)

    def next_name(self, kind: str) -> str:
        """Return a name that no other transaction or subscription of this link has."""
        return f"{kind}{next(self._numbers)}"

    def seconds(self, timeout: float | None) -> float:
        """Return the timeout in seconds. For ``None``, return the connection's default.

        Raises ``ValueError`` for an invalid timeout.
        """
        if timeout is None:
            return self.options.send_timeout
        if not timeout > 0:
            raise ValueError(f"A timeout is more than 0 seconds, not {timeout!r}.")
        return timeout

    def patience(self, timeout: float | None) -> Callable[[], float]:
        """Return a function that returns how long the next of several steps may wait,
        in seconds. For ``None``, each step has the connection's default. Otherwise, the
        steps share the timeout.

        Raises ``ValueError`` for an invalid timeout.
        """
        seconds = self.seconds(timeout)
        if timeout is None:
            return lambda: seconds
        give_up = time.monotonic() + seconds
        return lambda: max(0.001, give_up - time.monotonic())

    def put(self, data: bytes, pending: Pending, *, at_once: bool = False) -> None:
        """Queue a frame that asks for a receipt. With ``at_once``, write the frame
        immediately if no other frame is queued. The caller holds the lock."""
        self.ledger.reserve(pending, time.monotonic())
        put = self.writer.put_now if at_once else self.writer.put
        put(data, pending)

    def post(self, data: bytes, owner: Owner | None = None) -> None:
        """Queue frames that ask for no receipt."""
        with self.lock, self.whole():
            self.check_alive()
            self.ledger.note_loose(owner)
            self.writer.put(data)

    def ask(
        self,
        command: str,
        headers: dict[str, str],
        *,
        timeout: float | None = None,
        what: str = "",
    ) -> Request:
        """Queue a frame that asks for a receipt. Return the request, on which the
        caller can wait."""
        request = Request(self, what or command, self.seconds(timeout))
        self.submit(request, command, headers)
        return request

    def submit(self, pending: Pending, command: str, headers: dict[str, str]) -> None:
        """Queue a frame with this command, which must not be SEND. The frame asks for a
        receipt, and ``pending`` gets the frame's outcome."""
        pending.receipt = self.ledger.new_receipt()
        data = frames.encode(command, {**headers, "receipt": pending.receipt.decode()})
        with self.lock, self.whole():
            self.check_alive()
            self.put(data, pending, at_once=True)

    def barrier(
        self, *, timeout: float | None = None, owner: Owner | None = None
    ) -> Request:
        """Queue a barrier. Its answer proves that the broker has handled every earlier
        frame."""
        request = Request(self, "the barrier", self.seconds(timeout), owner=owner)
        self.put_barrier(request)
        return request

    def put_barrier(self, pending: Pending) -> None:
        """Queue a barrier. The broker's answer to the barrier settles ``pending``.

        The barrier is a transaction that is begun and immediately aborted. The broker
        handles the frames of one connection in order. So the barrier's receipt proves
        that the broker has handled all earlier frames.
        """
        name = {"transaction": self.next_name("barrier-")}
        with self.lock:
            self.post(frames.encode("BEGIN", name), pending.owner)
            self.submit(pending, "ABORT", name)

    def say_goodbye(self) -> None:
        """Send DISCONNECT, and wait until the broker has handled all earlier frames."""
        try:
            with self.lock:
                request = self.ask("DISCONNECT", {}, timeout=self.options.close_timeout)
                self._leaving = True
            request.wait()
        except MessagingError as error:  # an unanswered DISCONNECT does no harm
            logger.debug("DISCONNECT was not answered: %s", error)

    def close(self) -> None:
        """End both threads and close the socket. The outcome of all pending frames
        becomes unknown."""
        with self.lock:
            self.closed = True
            self.writer.stop()
            self.ledger.lose("the connection was closed", self._broker_message)
            self.changed.notify_all()
        self.transport.disconnect_socket()
        self.writer.join(5.0)
        self.transport.join(5.0)
