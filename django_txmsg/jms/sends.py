"""The sends that wait in the ledger: one whose caller waits, one whose listener does.

Hop 4 of a message. Both hold a slot of the session's window until their outcome; an
asynchronous one also has its place in the session's order of callbacks.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from . import completion
from .ledger import Entry, State

if TYPE_CHECKING:
    from .completion import CompletionListener
    from .message import Message
    from .producer import MessageProducer
    from .session import Session
    from .transaction import Transaction

logger = logging.getLogger("django_txmsg.jms.sends")


class Request(Entry):
    """A frame whose answer a thread waits for; the reader wakes it."""

    __slots__ = ("_answered",)

    def __init__(self, what: str, deadline: float, owner: object = None) -> None:
        """Describe the frame for error texts."""
        super().__init__(what, deadline, owner)
        self._answered = threading.Event()

    def settled(self) -> None:
        """Wake the waiting thread."""
        self._answered.set()

    def wait(self) -> None:
        """Wait for the outcome and raise its error; the deadline bounds the wait."""
        while not self._answered.wait(1.0):
            pass
        if self.error is not None:
            raise self.error


class SyncSend(Request):
    """A send whose caller waits."""

    __slots__ = ("_session", "_size")

    is_send = True

    def __init__(self, what: str, deadline: float, session: Session, size: int) -> None:
        """Hold a slot of the session's window."""
        super().__init__(what, deadline)
        self._session = session
        self._size = size

    def settled(self) -> None:
        """Free the slot and wake the caller."""
        self._session.window.release(self._size)
        super().settled()


class AsyncSend(Entry):
    """A send whose listener is told, in its turn."""

    __slots__ = ("_listener", "_message", "_size", "_transaction", "producer")

    is_send = True

    def __init__(
        self,
        what: str,
        deadline: float,
        producer: MessageProducer,
        message: Message,
        listener: CompletionListener,
        size: int,
    ) -> None:
        """Hold a slot of the session's window and the listener of this call."""
        super().__init__(what, deadline)
        self.producer = producer
        self._message = message
        self._listener = listener
        self._size = size
        self._transaction: Transaction | None = None

    def join(self, transaction: Transaction) -> None:
        """Belong to a transaction, which cannot be committed when this fails."""
        self.owner = self._transaction = transaction

    def settled(self) -> None:
        """Free the slot; a failure spoils the transaction; have the callback run."""
        session = self.producer.session
        session.window.release(self._size)
        if self._transaction is not None and self.error is not None:
            self._transaction.fail(self.error)
        session.callbacks.completed()

    def withdraw(self) -> bool:
        """Cancel it, if its frame has not been taken for writing."""
        link = self.producer.session.link
        with link.lock:
            if self.state is not State.QUEUED or self._transaction is not None:
                return False
            return link.ledger.settle(self, State.CANCELLED, None)

    def tell(self) -> None:
        """Run the callback, on a pool thread; its errors are logged and end there."""
        message = self._message
        message._in_flight = False
        marker = completion.running_for.set(self.producer)
        try:
            if self.state is State.CANCELLED:
                self._listener.on_withdrawn()  # type: ignore[attr-defined]
            elif self.error is None:
                self._listener.on_completion(message)
            else:
                self._listener.on_exception(message, self.error)
        except BaseException:
            logger.exception("The completion listener of %s failed.", self.what)
        finally:
            completion.running_for.reset(marker)
