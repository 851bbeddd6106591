"""Sending to one destination, or to any, and hearing what came of it.

Hop 4 of a message. Everything that can be wrong with a call is found before anything
is reserved or written, and raised in the caller; what is learnt later reaches the
completion listener. The frame is encoded at the call: what the caller changes
afterwards is not sent.
"""

from __future__ import annotations

from . import completion, restrictions
from . import destination as destinations
from .closing import Closing
from .completion import CompletionFuture, CompletionListener
from .delivery import DEFAULT, Delivery, Encoded
from .destination import Destination
from .errors import (
    IllegalStateError,
    MessageFormatError,
    MessageNotAccessibleError,
    UnsupportedOperationError,
    WindowFullError,
)
from .ledger import Pending, State
from .link import Request
from .message import Message
from .sending import SendingSession
from .sends import Callback


class MessageProducer(Closing):
    """Made by ``session.create_producer``."""

    def __init__(
        self, session: SendingSession, destination: Destination | None
    ) -> None:
        """Send to the destination, or to the one each call names."""
        self.session = session
        self.destination = destination
        # The number of the last asynchronous send, among those of the session.
        self._last = 0
        self.delivery = DEFAULT
        #: Headers of every message that has none of that name.
        self.properties: dict[str, str] = {}
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

        ``timeout``: seconds to wait for room in the window and then for the receipt;
        with 0 it waits for no room, and for the receipt as long as usual.
        """
        encoded = self._prepare(message, destination, delivery)
        session, link = self.session, self.session.link
        what = f"message {encoded.provided.message_id}"
        for_room, for_receipt = self._timeouts(timeout)
        if session.transacted:
            self._send_in_transaction(message, encoded, what, for_room)
            return
        request = Request(link, what, for_receipt, is_send=True)
        request.receipt = link.ledger.new_receipt()
        frame = encoded.frame(request.receipt)

        def settled(pending: Pending) -> None:
            session.sends.release(encoded.size)
            request.answer(pending)

        request.on_settled = settled
        with link.lock:
            self._wait_for_room(message, encoded, for_room, told=False)
            with link.whole:
                session.sends.take(encoded.size)
                link.put(frame, request, at_once=True)
                message._provided = encoded.provided
        request.wait()

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
        self._check_place()
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
        future = CompletionFuture(self.session)
        self._check_place()
        pending = self._send_told(message, future, destination, delivery, timeout)
        future._withdraw = lambda: self._withdraw(pending, message)
        return future

    # -- how ----------------------------------------------------------------------

    def _send_told(
        self,
        message: Message,
        listener: CompletionListener,
        destination: str | Destination | None,
        delivery: Delivery | None,
        timeout: float | None,
    ) -> Pending:
        encoded = self._prepare(message, destination, delivery)
        session, link = self.session, self.session.link
        what = f"message {encoded.provided.message_id}"
        for_room, for_receipt = self._timeouts(timeout)

        def settled(pending: Pending) -> None:
            session.sends.release(encoded.size)
            if pending.error is not None and pending.owner is not None:
                pending.owner.fail(pending.error)
            session.sends.completed()

        pending = Pending(what, for_receipt, settled, is_send=True)
        pending.receipt = link.ledger.new_receipt()
        scope = (link, session, self)
        callback = Callback(pending, message, listener, encoded.size, scope)
        with link.lock:
            self._wait_for_room(message, encoded, for_room, told=True)
            with link.whole:
                session.sends.take(encoded.size)
                if not session.transacted:
                    link.put(encoded.frame(pending.receipt), pending)
                else:
                    self._put_in_transaction(encoded, what, pending)
                message._in_flight = True
                message._provided = encoded.provided
                # In the ledger it is by now, so it will be settled and told.
                self._last = session.sends.enqueue(callback)
        return pending

    def _withdraw(self, pending: Pending, message: Message) -> bool:
        """Cancel a send, if its frame has not been taken for writing."""
        link = self.session.link
        with link.lock:
            if pending.state is not State.QUEUED or pending.owner is not None:
                return False
            message._in_flight = False
            return link.ledger.settle(pending, State.CANCELLED, None)

    def _send_in_transaction(
        self, message: Message, encoded: Encoded, what: str, for_room: float
    ) -> None:
        link = self.session.link
        with link.lock:
            self._check_accepts(message)
            limit = link.options.max_in_flight_bytes
            if not link.writer.wait_for_room(limit, for_room):
                raise WindowFullError(
                    f"{what} was not written: the broker does not read what is queued."
                )
            self._check_accepts(message)
            with link.whole:
                self._put_in_transaction(encoded, what, None)
                message._provided = encoded.provided

    def _put_in_transaction(
        self, encoded: Encoded, what: str, told: Pending | None
    ) -> None:
        """Queue a SEND of the session's transaction, with the lock held.

        Without a receipt, ActiveMQ makes COMMIT fail when the SEND failed; with one it
        would commit without the message. So only a listener's send asks for one. On
        RabbitMQ the receipt comes after COMMIT, and a listener hears of a barrier.
        """
        link = self.session.link
        transaction = self.session.transaction()
        transaction.begin()
        name = transaction.name
        if told is not None:
            told.owner = transaction
        if not link.dialect.commit_proves_sends:
            confirm = transaction.new_confirm(what)
            link.put(encoded.frame(confirm.receipt, name), confirm)
            if told is not None:
                link.put_barrier(told)
        elif told is None:
            transaction.loose(encoded.frame(transaction=name))
        else:
            link.put(encoded.frame(told.receipt, name), told)

    def _wait_for_room(
        self, message: Message, encoded: Encoded, seconds: float, *, told: bool
    ) -> None:
        def check() -> None:
            self._check_accepts(message)

        check()
        self.session.sends.wait_for_room(encoded.size, seconds, check, told=told)

    def _timeouts(self, timeout: float | None) -> tuple[float, float]:
        """Return the seconds to wait for room, and for the receipt from then on."""
        seconds = self.session.link.seconds(timeout or None)
        return 0.0 if timeout == 0 else seconds, seconds

    def _check_place(self) -> None:
        options = self.session.link.options
        restrictions.check(options.in_atomic, options.on_event_loop)

    def _prepare(
        self,
        message: Message,
        destination: str | Destination | None,
        delivery: Delivery | None,
    ) -> Encoded:
        """Find every fault of the call, and encode the frame; nothing is reserved."""
        self.session.link.refuse_inside()
        self._check_open()
        if not isinstance(message, Message):
            raise MessageFormatError(f"Send a jms.Message, not {message!r}.")
        target = self._target(destination)
        return self.session.encode(
            target, message, delivery or self.delivery, self.properties
        )

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
        self._check_open()
        if message._in_flight:
            raise MessageNotAccessibleError(
                "This message is in flight already. Send another Message object, or "
                "send it again from its completion listener."
            )

    def close(self) -> None:
        """Wait for this producer's sends and their callbacks, then send no more.

        Raises ``IllegalStateError`` inside a callback of its own, and inside one of
        its session's while it has sends to be told of: they come after that callback.
        """
        session = self.session
        session.link.refuse_inside()
        completion.refuse_own(self, "close its own producer")
        if session.sends.finished < self._last:
            completion.refuse_own(session, "close a producer whose sends are not told")
        if session.link.inherited:
            self._closed = True
            return
        with session.link.lock:
            self._closed = True
        session.sends.wait(self._last)
