"""A session: it creates producers and consumers, and has one transaction for sends and
acknowledgements.

Hops 4 and 6 of a message.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from . import batch, frames
from . import destination as destinations
from .consumer import AckMode, MessageConsumer
from .destination import Destination
from .errors import (
    IllegalStateError,
    MessageFormatError,
    MessagingError,
    TransactionRolledBackError,
)
from .liveness import Liveness
from .message import Message
from .producer import MessageProducer
from .sending import SendingSession
from .transaction import Transaction

logger = logging.getLogger("django_txmsg.jms.session")


class Session(SendingSession):
    """A session, created by ``connection.create_session``. Several threads may use
    it."""

    def __init__(
        self,
        connection: Liveness,
        *,
        transacted: bool,
        ack_mode: AckMode,
        max_in_flight: int | None,
        on_closed: Callable[[Session], None],
    ) -> None:
        """Use this connection. It is notified of the session's end. Writes nothing."""
        super().__init__(connection, transacted=transacted, max_in_flight=max_in_flight)
        self.ack_mode = ack_mode
        self._on_closed = on_closed
        self._closed = False
        self._consumers: dict[str, MessageConsumer] = {}
        # The transaction of a commit() or rollback() that has not returned.
        self._ends: Transaction | None = None

    # -- making producers and consumers -------------------------------------------

    def create_producer(
        self, destination: str | Destination | None = None
    ) -> MessageProducer:
        """Create a producer, bound to the destination, or to none if none is given."""
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
        """Subscribe, and return once the broker has confirmed that.

        ``prefetch`` limits the unacknowledged deliveries. ``subscription`` names a
        durable subscription to a topic, which collects messages while it has no
        consumer.
        """
        self.check_usable()
        consumer = MessageConsumer(
            self.link,
            destinations.parse(destination),
            prefetch,
            subscription,
            selector,
            on_received=self._received,
            on_closed=self._consumer_closed,
        )
        consumer.subscribe(timeout)
        self._consumers[consumer.subscription_id] = consumer
        return consumer

    def unsubscribe(self, consumer: MessageConsumer) -> None:
        """Close the consumer and delete its durable subscription."""
        consumer.close(delete_subscription=True)

    def _consumer_closed(self, consumer: MessageConsumer) -> None:
        self._consumers.pop(consumer.subscription_id, None)

    # -- sending ------------------------------------------------------------------

    def send_batch(
        self,
        messages: Sequence[batch.Item],
        *,
        timeout: float | None = None,
        isolate: bool = False,
        keys: Sequence[str] = (),
    ) -> list[MessagingError | None]:
        """Send many messages in the fastest proven way of this broker.

        Returns one outcome per message, in order: ``None`` - proven to be stored;
        ``SendRejectedError`` - refused for good; ``SendOutcomeUnknownError`` - send it
        again with the same id. Never raises because of a message. ``isolate`` waits for
        each message before the next, to find the one that breaks a connection.
        ``keys``, one per message, keeps messages of a key in order: a message after one
        that is not stored is ``SendHeldBackError``, and was not sent. "" is no key.
        """
        self.check_usable()
        if self.transacted:
            raise IllegalStateError(
                "send_batch() proves each message on its own and cannot be part of a "
                "transaction. Use a session with transacted=False."
            )
        seconds = self.link.seconds(timeout)
        with self.sends.one_more():  # for close() to wait for
            return batch.send(self, messages, seconds, isolate=isolate, keys=keys)

    # -- acknowledging ------------------------------------------------------------

    def _received(self, message: Message) -> None:
        if self.transacted:
            self.adopt(message)
        elif self.ack_mode is AckMode.AUTO:
            self.acknowledge(message)

    def acknowledge(
        self, message: Message, *, wait: bool = False, timeout: float | None = None
    ) -> None:
        """Acknowledge this message, and no other.

        Returns once the frame is queued; if the acknowledgement is lost with its
        connection, the message is redelivered. With ``wait``, request a receipt and
        wait for it. In a transacted session the commit acknowledges every message
        received.
        """
        self.check_usable()
        consumer = self._consumers.get(message.subscription or "")
        if consumer is None:
            raise IllegalStateError(
                f"{message!r} was not received by this session: acknowledge it where "
                "it was received. If its consumer was closed, the broker delivers it "
                "again."
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
        """Receive unacknowledged messages again, on this session."""
        self.refuse_own("recover")
        self.check_usable()
        if self.transacted:
            raise IllegalStateError("A transacted session recovers by rollback().")
        for consumer in list(self._consumers.values()):
            consumer.take_back()

    # -- transactions -------------------------------------------------------------

    def commit(self, timeout: float | None = None, *, redeliver: bool = True) -> None:
        """Commit the sends, and the acknowledgements of all received messages.

        Waits until those sends have their outcomes and callbacks. Messages that are
        sent during that time belong to the next transaction. Raises
        ``TransactionRolledBackError`` if nothing of it happened. Received messages are
        then received again, unless `redeliver=False`, as for ``rollback``. Raises
        ``TransactionInDoubtError`` if the outcome is unknown. The next commit completes
        an interrupted one, and raises if that one did not happen.
        """
        seconds = self._before_end("commit", timeout)
        if self.link.error is None:  # a lost connection has rolled it back
            self.check_usable()
        with self._ending:
            interrupted = self._ends is not None
            self._commit(seconds, redeliver=redeliver)
            if interrupted:
                self._commit(seconds, redeliver=redeliver)

    def _commit(self, seconds: float, *, redeliver: bool) -> None:
        transaction = self._end_transaction()
        self.sends.wait(transaction.last_send)
        try:
            transaction.commit(seconds)
        except MessagingError as error:
            self._ends = None
            if redeliver and isinstance(error, TransactionRolledBackError):
                self._give_back(transaction)
            transaction.free()
            raise
        self._ends = None
        for message in transaction.received:
            consumer = self._consumers.get(message.subscription or "")
            if consumer is not None:
                consumer.forget(message)

    def rollback(self, *, redeliver: bool = True, timeout: float | None = None) -> None:
        """Abort the transaction. Its received messages are received again.

        With `redeliver=False` they are not: they stay unacknowledged until the
        connection ends, unless the caller adopts them into the next transaction. Raises
        ``IllegalStateError`` or ``TransactionInDoubtError`` if an earlier commit was
        interrupted and has, or may have, happened.
        """
        seconds = self._before_end("rollback", timeout)
        with self._ending:
            interrupted = self._ends
            if interrupted is not None and interrupted.committing is not None:
                try:
                    self._commit(seconds, redeliver=redeliver)
                except TransactionRolledBackError:
                    interrupted = None
            else:
                interrupted = None
            for _ in range(1 if self._ends is None else 2):
                transaction = self._end_transaction()
                self.sends.wait(transaction.last_send)
                transaction.abort(seconds)
                self._ends = None
                if redeliver:
                    self._give_back(transaction)
            if interrupted is not None:
                raise IllegalStateError("The commit that was interrupted has happened.")

    def _before_end(self, verb: str, timeout: float | None) -> float:
        self.refuse_own(verb)
        if not self.transacted:
            raise IllegalStateError(
                f"{verb}() needs a session made with create_session(transacted=True)."
            )
        return self.link.seconds(timeout)

    def _end_transaction(self) -> Transaction:
        """Take the open transaction, or a transaction whose end was interrupted."""
        with self.link.lock:
            transaction = self._ends
            if transaction is None:
                transaction = self._ends = self.transaction()
                transaction.last_send = self.sends.accepted
                self._transaction = None
            elif transaction.committing is None and not transaction.is_empty:
                transaction.fail(IllegalStateError("its end was interrupted"))
            return transaction

    def _give_back(self, transaction: Transaction) -> None:
        """Make the transaction's received messages available again."""
        for name in {message.subscription for message in transaction.received}:
            consumer = self._consumers.get(name or "")
            if consumer is not None:
                consumer.take_back()

    # -- ending -------------------------------------------------------------------

    def drain(self, timeout: float = 30.0) -> None:
        """Wait, without closing, until every send has its outcome and its callback has
        returned.

        Raises ``TimeoutError`` if the time is up before that.
        """
        self.refuse_own("drain")
        left = self.sends.wait_until(time.monotonic() + timeout)
        if left:
            raise TimeoutError(f"{left} sends have no outcome after {timeout:g} s.")

    def begin_close(self) -> None:
        """Accept no more sends."""
        if not self.link.inherited:
            self.refuse_own("close")
        self.closing = True

    def close(self) -> None:
        """Wait for outstanding sends and their callbacks, then end.

        An open transaction is rolled back; the broker's errors about that are logged.
        Raises ``IllegalStateError`` inside one of its own callbacks.
        """
        self.begin_close()
        if self.link.inherited or self._closed:
            return
        if self.transacted:
            try:
                self.rollback(redeliver=False)
            except MessagingError as error:
                logger.warning("A session was closed: %s", error)
        self.sends.wait()
        self.sends.wait_for_outcomes()
        self._closed = True
        for consumer in list(self._consumers.values()):
            consumer.close()
        self._on_closed(self)
