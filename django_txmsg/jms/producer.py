"""Sends messages to one fixed destination, or to any destination, and reports the
outcome.

Hop 4 of a message. A call raises every error of its arguments before it writes a byte.
Later errors go to the completion listener. The call encodes the frame, so later changes
to the message do not affect the frame.
"""

from __future__ import annotations

from functools import partial

from . import completion
from . import destination as destinations
from .bases import Closing, SendingSession
from .completion import CompletionFuture, CompletionListener
from .destination import Destination
from .errors import (
    IllegalStateError,
    MessageFormatError,
    MessageNotAccessibleError,
    UnsupportedOperationError,
    WindowFullError,
)
from .ledger import Pending
from .message import DEFAULT, Delivery, Encoded, Message
from .sends import AsyncSend, WaitedSend


class MessageProducer(Closing):
    """A producer, created by ``session.create_producer``."""

    def __init__(
        self, session: SendingSession, destination: Destination | None
    ) -> None:
        """Create a producer for this destination. If ``destination`` is None, every
        call must name a destination."""
        self.session = session
        self.destination = destination
        # The number of the last asynchronous send, among those of the session.
        self._last = 0
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
        """Send, and return when the broker has confirmed the message.

        Raises ``SendRejectedError`` or ``SendOutcomeUnknownError``. After any other
        error, nothing was written.

        In a transacted session, ``send`` returns when the frame is queued. The commit
        then stores all messages, or raises.

        ``timeout`` is in seconds. It limits the wait for room in the window, and then
        the wait for the receipt.
        """
        encoded = self._prepare(message, destination, delivery)
        session, link = self.session, self.session.link
        what = f"message {encoded.provided.message_id}"
        seconds = link.seconds(timeout)
        if session.transacted:
            self._send_in_transaction(message, encoded, what, seconds)
            return
        send = WaitedSend(link, what, seconds, session.sends, encoded.size)
        self._queue(message, encoded, send)
        send.wait()

    def send_async(
        self,
        message: Message,
        listener: CompletionListener | tuple[object, object],
        *,
        destination: str | Destination | None = None,
        delivery: Delivery | None = None,
        timeout: float | None = None,
    ) -> None:
        """Queue a frame with the message, and return. Later the listener is called
        exactly once, with the outcome. Until then, any access to the message's content
        raises ``MessageNotAccessibleError``.

        Blocks while the session's window is full. Raises ``WindowFullError`` if the
        window is still full after the timeout. In this case the message was not queued
        and stays accessible, and the listener is not called.
        """
        called = completion.as_listener(listener)
        self.session.link.options.check_asynchronous()
        self._send_async(message, called, destination, delivery, timeout)

    def submit(
        self,
        message: Message,
        *,
        destination: str | Destination | None = None,
        delivery: Delivery | None = None,
        timeout: float | None = None,
    ) -> CompletionFuture:
        """Send like ``send_async``, and return a future. Call ``result()`` on the
        future or await it."""
        future = CompletionFuture(self.session)
        self.session.link.options.check_asynchronous()
        send = self._send_async(message, future, destination, delivery, timeout)
        future._withdraw = partial(self.session.sends.withdraw, send)
        return future

    # -- implementation -----------------------------------------------------------

    def _send_async(
        self,
        message: Message,
        listener: CompletionListener,
        destination: str | Destination | None,
        delivery: Delivery | None,
        timeout: float | None,
    ) -> AsyncSend:
        encoded = self._prepare(message, destination, delivery)
        session, link = self.session, self.session.link
        what = f"message {encoded.provided.message_id}"
        seconds = link.seconds(timeout)
        sends, size, scope = session.sends, encoded.size, (link, session, self)
        send = AsyncSend(what, seconds, sends, message, listener, size, scope)
        self._queue(message, encoded, send)
        return send

    def _queue(
        self, message: Message, encoded: Encoded, send: WaitedSend | AsyncSend
    ) -> None:
        """Wait for room in the window, and queue the frame of the message."""
        session, link, sends = self.session, self.session.link, self.session.sends
        listened = isinstance(send, AsyncSend)
        send.receipt = link.ledger.new_receipt()
        with link.lock:
            self._check_accepts(message)
            if not sends.has_room(encoded.size, listened=listened):
                check = partial(self._check_accepts, message)
                sends.wait_for_room(
                    encoded.size, send.timeout, check, listened=listened
                )
            try:  # link.whole(), at less cost
                sends.take(encoded.size)
                if session.transacted:
                    self._put_in_transaction(encoded, send.what, send)
                else:
                    frame = encoded.frame(send.receipt)
                    link.put(frame, send, at_once=not listened)
                message._provided = encoded.provided
                if isinstance(send, AsyncSend):
                    message._in_flight = True
                    # It is in the ledger now, so it will be settled and reported.
                    self._last = sends.enqueue(send)
            except BaseException as error:
                link.broken_by(error)
                raise

    def _send_in_transaction(
        self, message: Message, encoded: Encoded, what: str, seconds: float
    ) -> None:
        link = self.session.link
        with link.lock:
            self._check_accepts(message)
            limit = link.options.max_in_flight_bytes
            if not link.writer.wait_for_room(limit, seconds):
                raise WindowFullError(
                    f"{what} was not written: the broker does not read what is queued."
                )
            self._check_accepts(message)
            with link.whole():
                self._put_in_transaction(encoded, what, None)
                message._provided = encoded.provided

    def _put_in_transaction(
        self, encoded: Encoded, what: str, send: Pending | None
    ) -> None:
        """Queue a SEND frame in the session's transaction. The caller holds the lock.

        If a SEND fails, the COMMIT should fail too. But ActiveMQ refuses the COMMIT
        only if the failed SEND requested no receipt. If that SEND requested a receipt,
        ActiveMQ commits the other messages. So the client requests a receipt from
        ActiveMQ only if the caller has given a listener.

        RabbitMQ sends the receipt of a SEND only after COMMIT. So for a send with a
        listener, the client queues a barrier behind the SEND. The receipt of the
        barrier completes the send.
        """
        link = self.session.link
        transaction = self.session.transaction()
        transaction.begin()
        name = transaction.name
        if send is not None:
            send.owner = transaction
        if not link.dialect.commit_proves_sends:
            confirm = transaction.new_confirm(what)
            link.put(encoded.frame(confirm.receipt, name), confirm)
            if send is not None:
                link.put_barrier(send)
        elif send is None:
            transaction.loose(encoded.frame(transaction=name))
        else:
            link.put(encoded.frame(send.receipt, name), send)

    def _prepare(
        self,
        message: Message,
        destination: str | Destination | None,
        delivery: Delivery | None,
    ) -> Encoded:
        """Check the arguments of the call and return the encoded frame."""
        self.session.link.refuse_inside()
        self._check_open()
        if not isinstance(message, Message):
            raise MessageFormatError(f"Send a jms.Message, not {message!r}.")
        target = self._target(destination)
        return self.session.encode(target, message, delivery or self.delivery)

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
        self.session.check_open()

    def _check_accepts(self, message: Message) -> None:
        session = self.session
        link = session.link
        # Checked again, because another thread may have closed it; only what can
        # change.
        if self._closed or session.closing or link.closed or link.error is not None:
            self._check_open()
        if message._in_flight:
            raise MessageNotAccessibleError(
                "This message is in flight already. Send another Message object, or "
                "send it again from its completion listener."
            )

    def close(self) -> None:
        """Accept no more sends, and wait for outstanding sends and their callbacks.

        Raises ``IllegalStateError`` inside a callback of this producer. Raises the same
        error inside any other callback of the session, if this producer still has
        outstanding sends with a listener.
        """
        session = self.session
        session.link.refuse_inside()
        completion.refuse_own(self, "close its own producer")
        if session.sends.finished < self._last:
            completion.refuse_own(
                session, "close a producer with callbacks outstanding"
            )
        if session.link.inherited:
            self._closed = True
            return
        with session.link.lock:
            self._closed = True
        session.sends.wait(self._last)
