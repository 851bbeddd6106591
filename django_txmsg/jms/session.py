"""A session creates producers and consumers. If the session is transacted, its sends
and acknowledgements belong to one transaction.

Hops 4 and 6 of a message.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from . import batch, frames
from . import destination as destinations
from .bases import Liveness, SendingSession
from .consumer import AckMode, MessageConsumer
from .destination import Destination
from .errors import (
    IllegalStateError,
    MessageFormatError,
    MessagingError,
    TransactionRolledBackError,
)
from .message import Message
from .producer import MessageProducer
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
        on_closed: Callable[[Session], None],
    ) -> None:
        """Create a session of this connection, without writing to the broker.
        ``on_closed`` is called when the session is closed."""
        super().__init__(connection, transacted=transacted)
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
        """Create a producer for this destination. Without a destination, each send must
        name a destination."""
        self.check_usable()
        found = None if destination is None else destinations.parse(destination)
        return MessageProducer(self, found)

    def create_consumer(
        self,
        destination: str | Destination,
        *,
        prefetch: int = 10,
        subscription: str | None = None,
        timeout: float | None = None,
    ) -> MessageConsumer:
        """Subscribe to a destination, and return the consumer after the broker has
        confirmed the subscription.

        ``prefetch`` limits the unacknowledged deliveries. ``subscription`` names a
        durable subscription to a topic. A durable subscription collects messages while
        it has no consumer.
        """
        self.check_usable()
        consumer = MessageConsumer(
            self.link,
            destinations.parse(destination),
            prefetch,
            subscription,
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
        """Send many messages in the fastest way that this broker allows.

        Returns one outcome per message, in order. The errors in this list are returned
        as outcomes, and not raised:

        - ``None``: the broker has stored the message;
        - ``SendRejectedError``: the broker refused the message permanently;
        - ``SendOutcomeUnknownError``: send the message again with the same id;
        - ``SendHeldBackError``: an earlier message of the same key is not stored, so
          this message was not sent.

        ``keys`` contains the key of each message, or "" for a message without a key.
        Messages of one key stay in order. With ``isolate``, the call sends a message
        only after the previous outcome is known. The caller thus finds the message that
        breaks a connection.

        All steps of the call share ``timeout``. By default, the connection's
        ``send_timeout`` limits the wait for each answer of the broker: a COMMIT with
        too little time would be in doubt, and its messages would be sent again.
        """
        self.check_usable()
        if self.transacted:
            raise IllegalStateError(
                "send_batch() proves each message on its own and cannot be part of a "
                "transaction. Use a session with transacted=False."
            )
        patience = self.link.patience(timeout)
        with self.link.lock, self.link.whole():
            self.sends.take(0)  # for close() to wait for
        try:
            return batch.send(self, messages, patience, isolate=isolate, keys=keys)
        finally:
            with self.link.lock:
                self.sends.release(0)

    # -- acknowledging ------------------------------------------------------------

    def _received(self, message: Message) -> None:
        if self.transacted:
            self.adopt(message)
        elif self.ack_mode is AckMode.AUTO:
            self.acknowledge(message)

    def acknowledge(
        self, message: Message, *, wait: bool = False, timeout: float | None = None
    ) -> None:
        """Acknowledge only this message.

        The call returns when the frame is queued. If the connection is lost before the
        broker reads the frame, the broker redelivers the message. With ``wait``, the
        call waits for the broker's receipt.

        In a transacted session this call only checks the message, because the commit
        acknowledges every received message.
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
        """Make the consumers of this session receive unacknowledged messages again."""
        self.refuse_own("recover")
        self.check_usable()
        if self.transacted:
            raise IllegalStateError("A transacted session recovers by rollback().")
        for consumer in list(self._consumers.values()):
            consumer.take_back()

    # -- transactions -------------------------------------------------------------

    def commit(self, timeout: float | None = None, *, redeliver: bool = True) -> None:
        """Commit all sends, and acknowledge all received messages.

        Waits until all sends of the transaction have their outcomes and their callbacks
        have returned. Messages that are sent during the wait belong to the next
        transaction.

        Raises ``TransactionRolledBackError`` if the broker has rolled the transaction
        back. The consumers then get the transaction's received messages again, unless
        ``redeliver`` is False. Raises ``TransactionInDoubtError`` if the outcome is
        unknown.

        If an exception interrupts a commit, the next call first completes the
        interrupted commit, and raises if that fails.
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
            transaction.commit(lambda: seconds)
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
        """Abort the transaction. The consumers get its received messages again.

        With ``redeliver=False`` these messages stay unacknowledged until the connection
        ends, unless the caller adopts them into the next transaction. Raises
        ``IllegalStateError`` if an earlier commit was interrupted and the broker has
        committed. Raises ``TransactionInDoubtError`` if the broker may have committed.
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
        """Return the transaction to commit or abort. This is the open transaction, or
        an earlier one whose commit or abort was interrupted."""
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
        """Put the transaction's received messages back into the buffers of their
        consumers."""
        for name in {message.subscription for message in transaction.received}:
            consumer = self._consumers.get(name or "")
            if consumer is not None:
                consumer.take_back(transaction.received)

    # -- ending -------------------------------------------------------------------

    def drain(self, timeout: float = 30.0) -> None:
        """Wait until every send has its outcome and every callback has returned. The
        session stays open.

        Raises ``TimeoutError`` if sends are still outstanding after ``timeout``
        seconds.
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
        """Wait for outstanding sends and their callbacks, then close the session.

        An open transaction is rolled back. If the rollback fails, the error is logged.
        Raises ``IllegalStateError`` inside a callback of this session.
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
