"""Sending to one destination, or to any, and hearing what came of it.

Hop 4 of a message. Everything that can be wrong with a call is found before anything
is reserved or written, and raised in the caller; what is learnt later reaches the
completion listener. The frame is encoded at the call: what the caller changes
afterwards is not sent.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from . import completion, restrictions
from . import destination as destinations
from .closing import Closing
from .completion import CompletionFuture, CompletionListener
from .delivery import DEFAULT, Delivery, Encoded, encode_message
from .destination import Destination
from .errors import (
    IllegalStateError,
    MessageFormatError,
    MessageNotAccessibleError,
    UnsupportedOperationError,
    WindowFullError,
)
from .message import Message
from .sends import AsyncSend, SyncSend
from .transaction import Confirm

if TYPE_CHECKING:
    from .session import Session


class MessageProducer(Closing):
    """Made by ``session.create_producer``."""

    def __init__(self, session: Session, destination: Destination | None) -> None:
        """Send to the destination, or to the one each call names."""
        self.session = session
        self.destination = destination
        #: Asynchronous sends whose callback has not returned.
        self.outstanding = 0
        self.delivery = DEFAULT
        self._closed = False

    # -- the three ways to send ---------------------------------------------------

    def send(
        self,
        message: Message,
        *,
        destination: str | Destination | None = None,
        delivery: Delivery | None = None,
        timeout: float | None = None,
    ) -> None:
        """Send and return once the broker has confirmed the message.

        In a transacted session it returns once queued, since nothing is stored before
        the commit, which proves all its sends or raises. Raises ``SendRejectedError``,
        ``SendOutcomeUnknownError`` or, with nothing written, another error.
        """
        encoded = self._prepare(message, destination, delivery)
        session, link = self.session, self.session.link
        give_up = time.monotonic() + (timeout or link.options.send_timeout)
        what = f"message {encoded.provided.message_id}"
        if session.transacted:
            self._send_in_transaction(message, encoded, what, give_up)
            return
        entry = SyncSend(what, give_up, session, encoded.size)
        entry.receipt = link.ledger.new_receipt()
        frame = encoded.frame(entry.receipt)
        with link.lock:
            self._check_accepts(message)
            session.window.acquire(encoded.size, give_up)
            link.ledger.reserve(entry)
            link.writer.put_now(frame, entry)
            message._provided = encoded.provided
        entry.wait()

    def send_async(
        self,
        message: Message,
        listener: CompletionListener | tuple[object, object],
        *,
        destination: str | Destination | None = None,
        delivery: Delivery | None = None,
        timeout: float | None = None,
    ) -> None:
        """Send and return once queued; the listener is told the outcome, once.

        Blocks while the session's window is full, and raises ``WindowFullError`` when
        it stays so until the timeout: then the message was not written and the
        listener hears nothing. The message is not accessible until the listener is.
        """
        told = completion.as_listener(listener)
        restrictions.check(self.session.link.options)
        self._send_told(message, told, destination, delivery, timeout)

    def submit(
        self,
        message: Message,
        *,
        destination: str | Destination | None = None,
        delivery: Delivery | None = None,
        timeout: float | None = None,
    ) -> CompletionFuture:
        """Like ``send_async``, with a future that can be waited for or awaited."""
        future = CompletionFuture(self)
        restrictions.check(self.session.link.options)
        entry = self._send_told(message, future, destination, delivery, timeout)
        future._withdraw = entry.withdraw
        return future

    # -- how ----------------------------------------------------------------------

    def _send_told(
        self,
        message: Message,
        listener: CompletionListener,
        destination: str | Destination | None,
        delivery: Delivery | None,
        timeout: float | None,
    ) -> AsyncSend:
        encoded = self._prepare(message, destination, delivery)
        session, link = self.session, self.session.link
        give_up = time.monotonic() + (timeout or link.options.send_timeout)
        what = f"message {encoded.provided.message_id}"
        entry = AsyncSend(what, give_up, self, message, listener, encoded.size)
        entry.receipt = link.ledger.new_receipt()
        with link.lock:
            self._check_accepts(message)
            session.window.acquire(encoded.size, give_up)
            session.callbacks.enqueue(entry)
            message._in_flight = True
            message._provided = encoded.provided
            if not session.transacted:
                link.ledger.reserve(entry)
                link.writer.put(encoded.frame(entry.receipt), entry)
            else:
                self._put_in_transaction(encoded, what, entry)
        return entry

    def _send_in_transaction(
        self, message: Message, encoded: Encoded, what: str, give_up: float
    ) -> None:
        link = self.session.link
        with link.lock:
            self._check_accepts(message)
            limit = link.options.max_in_flight_bytes
            if not link.writer.wait_for_room(limit, give_up):
                raise WindowFullError(
                    f"{what} was not written: the broker does not read what is queued."
                )
            self._check_accepts(message)
            self._put_in_transaction(encoded, what, None)
            message._provided = encoded.provided

    def _put_in_transaction(
        self, encoded: Encoded, what: str, entry: AsyncSend | None
    ) -> None:
        """Queue a SEND of the session's transaction, with the lock held.

        Without a receipt, ActiveMQ makes COMMIT fail when the SEND failed; with one it
        would commit without the message. So only a listener's send asks for one.
        """
        link = self.session.link
        transaction = self.session.transaction()
        transaction.begin()
        name = transaction.name
        if link.dialect.commit_proves_sends:
            if entry is None:
                transaction.loose(encoded.frame(transaction=name))
                return
            entry.join(transaction)
            link.ledger.reserve(entry)
            link.writer.put(encoded.frame(entry.receipt, name), entry)
            return
        confirm = Confirm(what, transaction, entry)
        confirm.receipt = link.ledger.new_receipt()
        transaction.confirms.add(confirm)
        link.ledger.reserve(confirm)
        link.writer.put(encoded.frame(confirm.receipt, name), confirm)

    def _prepare(
        self,
        message: Message,
        destination: str | Destination | None,
        delivery: Delivery | None,
    ) -> Encoded:
        """Find every fault of the call, and encode the frame; nothing is reserved."""
        self._check_open()
        if not isinstance(message, Message):
            raise MessageFormatError(f"Send a jms.Message, not {message!r}.")
        target = self._target(destination)
        return encode_message(self.session, target, message, delivery or self.delivery)

    def _target(self, destination: str | Destination | None) -> Destination:
        if self.destination is None:
            if destination is None:
                raise UnsupportedOperationError(
                    "This producer has no destination of its own: name one in the call."
                )
            return destinations.parse(destination)
        if destination is not None:
            raise UnsupportedOperationError(
                f"This producer sends to {self.destination}. For other destinations "
                "make one with create_producer()."
            )
        return self.destination

    def _check_open(self) -> None:
        if self._closed:
            raise IllegalStateError("The producer is closed.")
        self.session.check_usable()

    def _check_accepts(self, message: Message) -> None:
        self._check_open()
        if message._in_flight:
            raise MessageNotAccessibleError(
                "This message is in flight already. Send another Message object, or "
                "send it again from its completion listener."
            )

    def close(self) -> None:
        """Wait for this producer's sends and their callbacks, then send no more.

        Raises ``IllegalStateError`` inside a callback of its own.
        """
        if completion.running_for.get() is self:
            raise IllegalStateError(
                "A completion callback cannot close its own producer: it would wait "
                "for itself. Close it from another thread."
            )
        self._closed = True
        if not self.session.link.inherited:
            self.session.callbacks.wait(self)
