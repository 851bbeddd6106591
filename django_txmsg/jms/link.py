"""The wire to one broker: its two threads, its ledger, its loss.

Hop 4 and 6 of a message. The reader thread settles entries and feeds consumers, the
writer thread writes; neither runs a user's code. One lock guards the state of the link
and of everything that uses it, and is never held over a callback or over I/O that may
block. A link that is lost stays lost: reconnecting means a new one, so nothing is ever
replayed silently.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from . import frames
from .dialects import BY_NAME, recognize
from .errors import (
    ConnectionFailedError,
    ConnectionLostError,
    IllegalStateError,
    MessagingError,
)
from .ledger import Ledger
from .sends import Request
from .transport import Transport
from .writer import Writer

if TYPE_CHECKING:
    from .consumer import MessageConsumer
    from .factory import Options

logger = logging.getLogger("django_txmsg.jms.link")
_epochs = itertools.count(1)


class Link:
    """Logged in when made; ended by ``close``, or lost."""

    def __init__(
        self,
        address: tuple[str, int],
        options: Options,
        on_lost: Callable[[MessagingError], None],
    ) -> None:
        """Connect; raises ``ConnectionFailedError`` or ``OSError`` within the timeout.

        ``on_lost`` is called at most once, with the lock held.
        """
        self.address = address
        self.options = options
        self.dialect = BY_NAME[options.dialect or "activemq"]
        self.server = ""
        self.lock = threading.RLock()
        #: Notified when room, an outcome or an end may be what somebody waits for.
        self.changed = threading.Condition(self.lock)
        #: Why the link was lost, ``None`` while it was not.
        self.error: ConnectionLostError | None = None
        #: Whether consumers hand out messages.
        self.delivering = True
        self.closed = False
        self.ledger = Ledger(next(_epochs), lambda: self.description)
        self._tell_lost = on_lost
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        self._consumers: dict[str, MessageConsumer] = {}
        self._connected = threading.Event()
        self._refusal = ""
        self._said = ""
        self._leaving = False
        self._send_every: float | None = None
        self._transport = Transport(
            address, self, tls=options.tls, connect_timeout=options.connect_timeout
        )
        self.writer = Writer(self._transport, self, options)
        try:
            self._log_in()
        except BaseException:
            self.closed = True
            self._transport.disconnect_socket()
            self._transport.join(1.0)
            raise
        self.writer.start(self._send_every)

    @property
    def description(self) -> str:
        """Who is at the other end, for error texts."""
        return f"broker {self.address[0]}:{self.address[1]} ({self.dialect.name})"

    @property
    def inherited(self) -> bool:
        """Whether a fork copied this link; then its locks and socket are not ours."""
        return self._pid != os.getpid()

    def check_alive(self) -> None:
        """Raise ``IllegalStateError``, or ``ConnectionLostError`` once it is lost."""
        if self._pid != os.getpid():
            raise IllegalStateError(
                "This connection was inherited through a fork; its socket belongs to "
                "the parent process. Make a new connection in the child."
            )
        if self.error is not None:
            text, said = str(self.error), self._said
            raise ConnectionLostError(text, written=False, broker_said=said)
        if self.closed:
            raise IllegalStateError("The connection is closed.")

    def _log_in(self) -> None:
        options = self.options
        login = frames.encode_connect(options.connect_headers(self.address[0]))
        give_up = time.monotonic() + options.connect_timeout
        self._transport.start()
        self._transport.write(login, timeout=options.connect_timeout, tick=lambda: None)
        answered = self._connected.wait(max(0.0, give_up - time.monotonic()))
        if self._refusal or not answered:
            why = (
                f"{self._refusal}. Check the URL's user, password and virtual host"
                if self._refusal
                else f"no CONNECTED within {options.connect_timeout:g} s"
            )
            raise ConnectionFailedError(
                f"{self.address[0]}:{self.address[1]} refused the connection: {why}."
            )

    # -- what the transport tells, on its I/O thread ------------------------------

    def on_frames(self, arrived: list[frames.Frame | frames.Receipt]) -> None:
        """Settle receipts and hand messages to their consumers."""
        with self.lock:
            for frame in arrived:
                if isinstance(frame, frames.Receipt):
                    self.ledger.receipt(frame)
                elif frame.command == "MESSAGE":
                    name = frame.headers.get("subscription", "")
                    consumer = self._consumers.get(name)
                    if consumer is not None:
                        consumer.deliver(frame)
                elif frame.command == "RECEIPT":
                    self.ledger.receipt(frame.headers.get("receipt-id", "").encode())
                elif frame.command == "ERROR":
                    self._on_error(frame)
                elif frame.command == "CONNECTED" and not self._connected.is_set():
                    self._on_connected(frame.headers)

    def _on_connected(self, headers: dict[str, str]) -> None:
        self.server = headers.get("server", "")
        if self.options.dialect is None:
            self.dialect = recognize(self.server)
        version = headers.get("version", "1.0")
        if version != "1.2":
            self._refusal = f"it speaks STOMP {version}, not 1.2"
        sends, wants = (
            int(ms) / 1000 for ms in headers.get("heart-beat", "0,0").split(",")
        )
        ours = self.options.heartbeat
        # Silence for twice the agreed interval is death, and ours is half of it at
        # most: a busy machine is no dead one.
        if ours and wants:
            self._send_every = max(ours, wants) / 2
        if ours and sends:
            self._transport.silence_limit = 2 * max(ours, sends)
        self._connected.set()

    def _on_error(self, frame: frames.Frame) -> None:
        body = frame.body[:400].decode(errors="replace").strip()
        said = ": ".join(filter(None, (frame.headers.get("message"), body)))
        if not self._connected.is_set():
            self._refusal = said or "ERROR"
            self._connected.set()
            return
        receipt = frame.headers.get("receipt-id", "")
        names = self.dialect.errors_name_receipts
        blames = self.dialect.blames_frame(said)
        if not self.ledger.error(receipt, said, names_receipts=names, blames=blames):
            self._said = said
            self.lose(f"the broker answered ERROR: {said}")
        elif not receipt:
            self.changed.notify_all()
            logger.warning("%s answered ERROR: %s", self.description, said)

    def on_lost(self, reason: str) -> None:
        """Learn from the transport that the connection is over."""
        with self.lock:
            if self._connected.is_set():
                self.lose(reason)
            else:
                self._refusal = reason
                self._connected.set()

    def pass_deadlines(self) -> None:
        """Settle what is late; give up a broker that never answers."""
        with self.lock:
            self.ledger.expire(time.monotonic())
            limit = self.options.give_up_after_timeouts
            if limit and self.ledger.timeouts_in_a_row >= limit:
                self.lose(f"{limit} frames in a row had no answer in time")

    def lose(self, reason: str) -> None:
        """Give the link up, once: nothing on it can be trusted any more."""
        with self.lock:
            if self.closed or self._refusal or self.error is not None:
                return
            if self._leaving:  # after DISCONNECT the broker may well be the first to go
                self.ledger.lose(reason, self._said)
                return
            self.error = ConnectionLostError(
                f"Connection to {self.description} is lost: {reason}. "
                "Make a new one with the factory.",
                broker_said=self._said,
            )
            logger.warning("%s", self.error)
            self.writer.stop()
            self.ledger.lose(reason, self._said)
            self._transport.disconnect_socket()
            self.wake_all()
            self._tell_lost(self.error)

    def wake_all(self) -> None:
        """Let every waiting thread look at its condition again; with the lock held."""
        self.changed.notify_all()
        for consumer in self._consumers.values():
            consumer.arrived.notify_all()

    # -- what sessions, producers and consumers use -------------------------------

    def next_name(self, kind: str) -> str:
        """Make a name that no other transaction or subscription of this link has."""
        return f"{kind}{next(self._numbers)}"

    def post(self, data: bytes, owner: object = None) -> None:
        """Queue frames that ask for no receipt."""
        with self.lock:
            self.check_alive()
            self.ledger.note_loose(owner)
            self.writer.put(data)

    def ask(
        self,
        command: str,
        headers: dict[str, str],
        *,
        timeout: float | None = None,
        owner: object = None,
        what: str = "",
    ) -> Request:
        """Queue a frame with a receipt and return the request to wait for."""
        deadline = time.monotonic() + (timeout or self.options.send_timeout)
        request = Request(what or command, deadline, owner)
        request.receipt = self.ledger.new_receipt()
        data = frames.encode(command, {**headers, "receipt": request.receipt.decode()})
        with self.lock:
            self.check_alive()
            self.ledger.reserve(request)
            self.writer.put_now(data, request)
        return request

    def barrier(self, *, timeout: float | None = None, owner: object = None) -> Request:
        """Ask for a proof that the broker has handled every frame before this.

        A transaction begun and aborted at once: frames of one connection are handled
        in order, so its receipt says that those before it were.
        """
        name = {"transaction": self.next_name("barrier-")}
        what = "the barrier"
        with self.lock:
            self.post(frames.encode("BEGIN", name), owner)
            return self.ask("ABORT", name, timeout=timeout, owner=owner, what=what)

    def register(self, consumer: MessageConsumer) -> None:
        """Route deliveries to the consumer."""
        with self.lock:
            self._consumers[consumer.subscription_id] = consumer

    def unregister(self, consumer: MessageConsumer) -> None:
        """Route no more deliveries to the consumer."""
        with self.lock:
            self._consumers.pop(consumer.subscription_id, None)

    def say_goodbye(self) -> None:
        """Have the broker handle what was queued, and let it know we leave."""
        try:
            with self.lock:
                request = self.ask("DISCONNECT", {}, timeout=self.options.close_timeout)
                self._leaving = True
            request.wait()
        except MessagingError as error:  # an unanswered goodbye harms nobody
            logger.debug("DISCONNECT was not answered: %s", error)

    def close(self) -> None:
        """End both threads and the socket; what has no outcome stays unknown."""
        with self.lock:
            self.closed = True
            self.writer.stop()
            self.ledger.lose("the connection was closed", self._said)
            self.wake_all()
        self._transport.disconnect_socket()
        self.writer.join(5.0)
        self._transport.join(5.0)

    def abandon(self) -> None:
        """Let go of the socket in a forked child; the parent's goes on."""
        self._transport.abandon()
