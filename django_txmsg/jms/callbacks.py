"""The callbacks of one session, in the order of its sends, one at a time.

Hop 4 of a message. A send takes its place as it is queued; its callback runs once its
outcome and those of all before it are known. The session owns no thread: while there
is something to tell, one task of the shared pool tells it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING

from . import pool
from .ledger import State

if TYPE_CHECKING:
    from .producer import MessageProducer
    from .sends import AsyncSend
    from .session import Session

logger = logging.getLogger("django_txmsg.jms.callbacks")

#: Callbacks told in one task, before other sessions get their turn.
_IN_A_ROW = 256


class Callbacks:
    """Sends whose callback has not returned, in order."""

    def __init__(self, session: Session) -> None:
        """Belong to the session."""
        self._session = session
        self._link = session.link
        self._order: deque[AsyncSend] = deque()
        self._telling = False
        #: Sends accepted whose callback has not returned.
        self.outstanding = 0

    def enqueue(self, send: AsyncSend) -> None:
        """Give the send its place; with the lock held."""
        self._order.append(send)
        self.outstanding += 1
        send.producer.outstanding += 1

    def completed(self) -> None:
        """Note that one more outcome is known; with the lock held."""
        self._session.window.parked += 1
        if not self._telling and self._order[0].state >= State.ACKED:
            self._telling = True
            pool.submit(self._tell)

    def _tell(self) -> None:
        """Run the callbacks at the head of the order, on a pool thread."""
        told: AsyncSend | None = None
        for _ in range(_IN_A_ROW):
            with self._link.lock:
                self._count_down(told)
                told = None
                if not self._order or self._order[0].state < State.ACKED:
                    self._telling = False
                    return
                send = self._order.popleft()
            try:
                send.tell()
            finally:
                told = send  # whatever its callback has raised
        with self._link.lock:
            self._count_down(told)
        pool.submit(self._tell)

    def _count_down(self, told: AsyncSend | None) -> None:
        """Note that a callback has returned; with the lock held."""
        if told is None:
            return
        self._session.window.unpark()
        self.outstanding -= 1
        told.producer.outstanding -= 1
        if not told.producer.outstanding:
            self._link.changed.notify_all()

    def wait(self, producer: MessageProducer | None = None) -> None:
        """Wait until every callback, or every one of a producer, has returned.

        Sends end by their deadlines; a callback that never returns is waited for, and
        a warning says so.
        """
        counter = self if producer is None else producer
        warn_at = time.monotonic() + self._link.options.close_timeout
        while True:
            with self._link.lock:
                if counter.outstanding <= 0:
                    return
                self._link.changed.wait(0.5)
                waiting = counter.outstanding
            pool.help_out()
            if time.monotonic() >= warn_at:
                warn_at = float("inf")
                logger.warning(
                    "Still waiting for %d asynchronous sends or their callbacks.",
                    waiting,
                )

    def wait_until(self, give_up: float) -> int:
        """Wait until then for all callbacks; return how many sends are left."""
        while True:
            with self._link.lock:
                left = give_up - time.monotonic()
                if not self.outstanding or left <= 0:
                    return self.outstanding
                self._link.changed.wait(min(left, 0.1))
            pool.help_out()
