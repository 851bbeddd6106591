"""Sends messages to one fixed destination, or to any destination, and reports the
outcome.

Hop 4 of a message. A call raises every error of its arguments before it writes a byte.
Later errors go to the completion listener. The call encodes the frame, so later changes
to the message do not affect the frame.

A session keeps the sends of its producers in order, limits the number of sends in
flight, and has one transaction at a time. With one lock held, it reserves room in the
window, a place in the order of callbacks, and a place in the writer's queue. So
callbacks run in the order in which the frames are written.
"""

from __future__ import annotations

import threading
from datetime import datetime, timedelta, timezone
from functools import lru_cache, partial

from . import completion, frames
from . import destination as destinations
from .completion import CompletionFuture, CompletionListener
from .destination import Destination
from .dialect import Dialect
from .errors import (
    IllegalStateError,
    MessageFormatError,
    MessageNotAccessibleError,
    UnsupportedOperationError,
    WindowFullError,
)
from .ledger import Pending
from .liveness import Closing, Liveness
from .message import (
    DEFAULT,
    ID_HEADER,
    RESERVED_HEADERS,
    Delivery,
    DeliveryMode,
    Encoded,
    Message,
    Provided,
    new_id,
)
from .sends import AsyncSend, Sends, WaitedSend
from .transaction import Transaction

_MILLISECOND = timedelta(milliseconds=1)


def _address_lines(dialect: Dialect, target: Destination) -> bytes:
    return frames.header_lines(dialect.send_headers(target).items())


class SendingSession(Closing):
    """The part of a session that producers and batches use."""

    def __init__(self, connection: Liveness, *, transacted: bool) -> None:
        """Create a session of this connection, without writing to the broker."""
        self.connection = connection
        self.link = link = connection.link
        self.transacted = transacted
        self.sends = Sends(link)
        #: Whether it accepts no more sends.
        self.closing = False
        self._address_lines = lru_cache(1000)(partial(_address_lines, link.dialect))
        self._transaction: Transaction | None = None
        # Held by the thread that commits or rolls back.
        self._ending = threading.RLock()

    # -- state --------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise ``IllegalStateError`` if the session or its link is closed, and in a
        forked child. Raise ``ConnectionLostError`` if the connection is lost."""
        if self.closing:
            raise IllegalStateError("The session is closed.")
        self.link.check_alive()

    def check_usable(self) -> None:
        """Raise the same errors as ``check_open``. Also raise ``IllegalStateError`` in
        a signal handler that has interrupted a send. Methods call this before they wait
        or write."""
        self.link.refuse_inside()
        self.check_open()

    def refuse_own(self, verb: str) -> None:
        """Raise ``IllegalStateError`` where waiting for the session would never end: in
        a callback of this session, in a signal handler that has interrupted the
        session, and in a forked child."""
        self.link.check_own()
        self.link.refuse_inside()
        if self._ending._is_owned():  # type: ignore[attr-defined]  # RLock's own
            raise IllegalStateError(
                f"A signal handler cannot {verb} the session whose commit() or "
                "rollback() it has interrupted. Set a flag, or an event, in it."
            )
        completion.refuse_own(self, f"{verb} its own session")

    # -- sending ------------------------------------------------------------------

    def encode(
        self, target: Destination, message: Message, delivery: Delivery
    ) -> Encoded:
        """Check a message for every error, before the session writes a byte. Return the
        message's encoded frame.

        Raises ``InvalidDestinationError``, ``MessageFormatError``,
        ``MessageNotAccessibleError`` or ``UnsupportedOperationError``.
        """
        application = message.headers
        if not RESERVED_HEADERS.isdisjoint(application):
            names = ", ".join(sorted(RESERVED_HEADERS.intersection(application)))
            raise MessageFormatError(
                f"Headers {names} belong to the protocol; rename them in the message. "
                "To send on what was received, send its copy()."
            )
        dialect = self.link.dialect
        dialect.check_headers(application)
        body, content_type = message.encoded()
        now = datetime.now(timezone.utc)
        known = application.get(ID_HEADER) or message._provided.message_id
        message_id = known or new_id()
        headers = {**application, ID_HEADER: message_id}
        if content_type is not None:
            headers.setdefault("content-type", content_type)
        expiration = None
        via = target
        if delivery is not DEFAULT:
            if delivery.priority != DEFAULT.priority:
                headers["priority"] = str(delivery.priority)
            if delivery.time_to_live:
                expiration = now + delivery.time_to_live
                left = delivery.time_to_live // _MILLISECOND
                headers |= dialect.expiry_headers(int(now.timestamp() * 1000), left)
            if held := delivery.delay // _MILLISECOND:
                if self.transacted:
                    raise UnsupportedOperationError(
                        f"{dialect.name} stores a delayed message after the commit, "
                        "not with it: a crash between the two loses it. Send it "
                        "outside the transaction, or let the outbox hold it."
                    )
                via, held_by = dialect.delayed(target, held)
                if delivery.time_to_live and "expiration" in held_by:
                    raise UnsupportedOperationError(
                        f"{dialect.name} delays a message by letting it expire: it "
                        "cannot have a time to live as well."
                    )
                headers |= held_by
        persistent = delivery.mode is DeliveryMode.PERSISTENT
        head = b"%s%s%s" % (
            self._address_lines(via),
            b"persistent:true\n" if persistent else dialect.volatile_line,
            frames.header_lines(headers.items()),
        )
        mode, priority = delivery.mode, delivery.priority
        provided = Provided(message_id, target, now, mode, priority, expiration)
        return Encoded(head, body, provided)

    def transaction(self) -> Transaction:
        """Return the open transaction. If no transaction is open, begin a new one."""
        with self.link.lock:
            if self._transaction is None:
                self._transaction = Transaction(self.link)
            return self._transaction

    def adopt(self, message: Message) -> None:
        """Add a received message to the current transaction."""
        self.transaction().received.append(message)


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
