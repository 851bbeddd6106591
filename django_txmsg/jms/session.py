"""One order of sends, one window, one transaction at a time.

Hop 4 and 6 of a message. Under the connection's lock a send takes its place in the
window, in the order of callbacks and in the writer's queue at once, so that the order
on the wire is the order of the callbacks. Producers and consumers are made from it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import batch, completion, frames
from . import destination as destinations
from .callbacks import Callbacks
from .closing import Closing
from .consumer import AckMode, MessageConsumer
from .destination import Destination
from .errors import (
    IllegalStateError,
    MessageFormatError,
    MessagingError,
    TransactionRolledBackError,
)
from .producer import MessageProducer
from .transaction import Transaction
from .window import Window

if TYPE_CHECKING:
    from .connection import Connection
    from .message import Message


class Session(Closing):
    """Made by ``connection.create_session``; may be used from several threads."""

    def __init__(
        self,
        connection: Connection,
        *,
        transacted: bool,
        ack_mode: AckMode,
        max_in_flight: int | None,
    ) -> None:
        """Belong to the connection; nothing is written."""
        options = connection.link.options
        self.connection = connection
        self.link = connection.link
        self.transacted = transacted
        self.ack_mode = ack_mode
        self.max_in_flight = max_in_flight or options.max_in_flight
        self.window = Window(self, self.max_in_flight, options.max_in_flight_bytes)
        self.callbacks = Callbacks(self)
        self._closing = self._closed = False
        self._addresses: dict[Destination, bytes] = {}
        self._consumers: list[MessageConsumer] = []
        self._transaction: Transaction | None = None

    # -- making producers and consumers -------------------------------------------

    def create_producer(
        self, destination: str | Destination | None = None
    ) -> MessageProducer:
        """Make a producer, bound to the destination or, without one, to none."""
        self.check_usable()
        found = None if destination is None else destinations.parse(destination)
        return MessageProducer(self, found)

    def create_consumer(
        self,
        destination: str | Destination,
        *,
        prefetch: int = 10,
        subscription: str | None = None,
        selector: str | None = None,
        timeout: float | None = None,
    ) -> MessageConsumer:
        """Subscribe, and return once the broker has confirmed it.

        ``prefetch`` bounds the deliveries not yet acknowledged. ``subscription`` names
        a durable subscription to a topic, which collects messages while nobody reads.
        """
        self.check_usable()
        consumer = MessageConsumer(
            self, destinations.parse(destination), prefetch, subscription, selector
        )
        consumer.subscribe(timeout)
        self._consumers.append(consumer)
        return consumer

    def unsubscribe(self, consumer: MessageConsumer) -> None:
        """Close the consumer and delete its durable subscription."""
        consumer.close(delete_subscription=True)

    def consumer_closed(self, consumer: MessageConsumer) -> None:
        """Forget a closed consumer."""
        if consumer in self._consumers:
            self._consumers.remove(consumer)

    # -- sending ------------------------------------------------------------------

    def send_batch(
        self,
        messages: Sequence[tuple[str | Destination, Message]],
        *,
        timeout: float | None = None,
        isolate: bool = False,
        keys: Sequence[str] = (),
    ) -> list[MessagingError | None]:
        """Send many messages the fastest proven way of this broker.

        Returns one outcome per message, in order: ``None`` - proven to be stored;
        ``SendRejectedError`` - refused for good; ``SendOutcomeUnknownError`` - send it
        again with the same id. Never raises for a message's sake. ``isolate`` waits
        for each message before the next, to find the one that breaks a connection.
        ``keys``, one per message, keeps messages of a key in order: what follows one
        that is not stored is ``SendHeldBackError``, and was not sent. "" is no key.
        """
        self.check_usable()
        if self.transacted:
            raise IllegalStateError(
                "send_batch() proves each message on its own and cannot be part of a "
                "transaction. Use a session with transacted=False."
            )
        seconds = timeout or self.link.options.send_timeout
        return batch.send(self, messages, seconds, isolate=isolate, keys=keys)

    def address_lines(self, target: Destination) -> bytes:
        """Return the header lines that name a destination."""
        lines = self._addresses.get(target)
        if lines is None:
            if len(self._addresses) >= 1000:
                self._addresses.clear()
            headers = self.link.dialect.send_headers(target)
            lines = self._addresses[target] = frames.header_lines(headers.items())
        return lines

    # -- acknowledging ------------------------------------------------------------

    def note_received(self, message: Message) -> None:
        """Make it part of the transaction, or acknowledge it in AUTO mode."""
        if self.transacted:
            self.adopt(message)
        elif self.ack_mode is AckMode.AUTO:
            self.acknowledge(message)

    def acknowledge(
        self, message: Message, *, wait: bool = False, timeout: float | None = None
    ) -> None:
        """Tell the broker that this message, and no other, is done with.

        Returns once the frame is queued: an acknowledgement that is lost with its
        connection means a redelivery. ``wait`` asks for a receipt and waits for it. In
        a transacted session it happens at the commit, for every message received.
        """
        self.check_usable()
        consumer = message.consumer
        if consumer is None or consumer.session is not self:
            raise IllegalStateError(
                f"{message!r} was not received by this session; acknowledge it where "
                "it was received."
            )
        if message.ack_id is None:
            raise MessageFormatError(f"{message!r} came without an ack header.")
        if self.transacted:
            return
        consumer.settle(message)
        headers = {"id": message.ack_id}
        if wait:
            what = f"the acknowledgement of {message!r}"
            self.link.ask("ACK", headers, timeout=timeout, what=what).wait()
        else:
            self.link.post(frames.encode("ACK", headers))

    def recover(self) -> None:
        """Receive again, on this session, what was received and not acknowledged."""
        self._refuse_own_callback("recover")
        self.check_usable()
        if self.transacted:
            raise IllegalStateError("A transacted session recovers by rollback().")
        for consumer in list(self._consumers):
            consumer.take_back()

    # -- transactions -------------------------------------------------------------

    def transaction(self) -> Transaction:
        """Return the open transaction, a new one if there is none."""
        with self.link.lock:
            if self._transaction is None:
                self._transaction = Transaction(self.link)
            return self._transaction

    def adopt(self, message: Message) -> None:
        """Make a message received earlier part of the current transaction."""
        self.transaction().received.append(message)

    def commit(self, timeout: float | None = None, *, redeliver: bool = True) -> None:
        """Commit the sends, and the acknowledgements of all that was received.

        Raises ``TransactionRolledBackError`` - none of it happened, what was received
        is received again, unless `redeliver=False`, as for ``rollback`` - or
        ``TransactionInDoubtError``.
        """
        self._refuse_own_callback("commit")
        if self.link.error is None:  # a lost connection has rolled it back
            self.check_usable()
        transaction = self._end_transaction("commit")
        seconds = timeout or self.link.options.send_timeout
        transaction.settle_early(seconds)
        self.callbacks.wait()
        try:
            transaction.commit(seconds)
        except TransactionRolledBackError:
            if redeliver:
                transaction.give_back()
            raise

    def rollback(self, *, redeliver: bool = True, timeout: float | None = None) -> None:
        """Abort the transaction; what it received is received again.

        With `redeliver=False` it is not: it stays unacknowledged until the
        connection ends, unless the caller adopts it into the next transaction.
        """
        self._refuse_own_callback("rollback")
        transaction = self._end_transaction("rollback")
        seconds = timeout or self.link.options.send_timeout
        transaction.settle_early(seconds)
        self.callbacks.wait()
        transaction.abort(seconds)
        if redeliver:
            transaction.give_back()

    def _end_transaction(self, verb: str) -> Transaction:
        if not self.transacted:
            raise IllegalStateError(
                f"{verb}() needs a session made with create_session(transacted=True)."
            )
        with self.link.lock:
            transaction, self._transaction = self.transaction(), None
        return transaction

    # -- ending -------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raise ``IllegalStateError``, or the error the connection failed with."""
        if self._closing:
            raise IllegalStateError("The session is closed.")
        self.connection.check_usable()

    def _refuse_own_callback(self, verb: str) -> None:
        own = completion.running_for.get()
        if own is not None and own.session is self:
            raise IllegalStateError(
                f"A completion callback cannot {verb} its own session: it would wait "
                "for itself. Do it from another thread."
            )

    def drain(self, timeout: float = 30.0) -> None:
        """Wait without closing until every send has its outcome and was told it.

        Raises ``TimeoutError`` when some have not by then.
        """
        self._refuse_own_callback("drain")
        left = self.callbacks.wait_until(time.monotonic() + timeout)
        if left:
            raise TimeoutError(f"{left} sends have no outcome after {timeout:g} s.")

    def begin_close(self) -> None:
        """Accept no more sends."""
        self._refuse_own_callback("close")
        self._closing = True

    def close(self) -> None:
        """Wait for outstanding sends and their callbacks, then end.

        An open transaction is rolled back. Raises ``IllegalStateError`` inside an own
        callback.
        """
        self.begin_close()
        if self.link.inherited or self._closed:
            return
        if self.transacted:
            self.rollback(redeliver=False)
        self.callbacks.wait()
        self._closed = True
        for consumer in list(self._consumers):
            consumer.close()
        self.connection.session_closed(self)
