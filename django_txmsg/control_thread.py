"""Receives this service's control messages and has each one settled.

A control message whose session has not committed yet stays in hand, unacknowledged,
and is looked at again; others are handled meanwhile, and a crash brings it back.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
import uuid

from django.db import DatabaseError, InterfaceError, connections

from . import conf, control, wire
from .activity import Activity
from .breaker import Breaker
from .brokers import get_broker
from .brokers.base import Delivery, Session
from .errors import BrokerUnavailable
from .lane import AFTER_COMMIT_LEASE, Lane
from .models import OutboxMessage
from .models.outbox import PENDING

log = logging.getLogger("django_txmsg.control_thread")

#: Control messages in hand at a time.
PREFETCH = 200


class ControlThread(threading.Thread):
    """Serves the control destination of this service on one broker."""

    def __init__(
        self, broker: str, stop: threading.Event, breaker: Breaker, activity: Activity
    ) -> None:
        super().__init__(name=f"txmsg-control-{broker}", daemon=True)
        self._broker, self._stopping = broker, stop
        self._breaker, self._activity = breaker, activity
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._later: list[tuple[float, int, Delivery]] = []
        self._numbers = itertools.count()

    def run(self) -> None:
        """Serve until told to stop."""
        while not self._stopping.is_set():
            if self._breaker.remaining:
                self._stopping.wait(min(self._breaker.remaining, 0.5))
                continue
            try:
                with self._breaker.connecting:
                    session = get_broker(self._broker).open()
                with session:
                    destination = wire.control_destination(conf.get().SERVICE)
                    session.subscribe(destination, prefetch=PREFETCH)
                    self._serve(session)
            except BrokerUnavailable as error:
                self._breaker.failed(error)
            except (DatabaseError, InterfaceError) as error:
                log.warning("control messages wait for the database: %s", error)
                connections.close_all()
                self._stopping.wait(1.0)
            except Exception:
                log.exception("a control message failed; it comes again")
                self._stopping.wait(1.0)
            finally:
                self._later.clear()
        for lane in self._lanes.values():
            lane.close()
        connections.close_all()

    def _serve(self, session: Session) -> None:
        while not self._stopping.is_set():
            left = self._later[0][0] - time.monotonic() if self._later else 0.5
            delivery = session.receive(max(0.0, min(left, 0.5)))
            self._breaker.worked()
            if self._stopping.is_set():
                return
            if delivery is not None:
                self._handle(session, delivery)
            while self._later and self._later[0][0] <= time.monotonic():
                self._handle(session, heapq.heappop(self._later)[2])

    def _handle(self, session: Session, delivery: Delivery) -> None:
        try:
            control.handle(delivery, self._dispatch, self._stopping)
        except control.LookAgain as again:
            due = time.monotonic() + again.after
            heapq.heappush(self._later, (due, next(self._numbers), delivery))
            return
        session.ack([delivery])
        self._activity.note()

    def _dispatch(self, using: str, session_id: uuid.UUID) -> None:
        """Dispatch what the session stored, for whichever brokers. Raises
        BrokerUnavailable when one of them is, after the others were served."""
        pending = OutboxMessage.objects.using(using).filter(
            PENDING, session_id=session_id
        )
        down: BrokerUnavailable | None = None
        for broker in set(pending.values_list("broker", flat=True)):
            if (using, broker) not in self._lanes:
                self._lanes[using, broker] = Lane(
                    using, broker, longest_lease=AFTER_COMMIT_LEASE
                )
            lane = self._lanes[using, broker]
            try:
                while lane.dispatch(session_id=session_id):
                    pass
            except BrokerUnavailable as error:
                lane.close()
                down = error
        if down is not None:
            raise down
