"""Receives this service's control messages, and settles each one.

While a session has not committed yet, the thread keeps the session's control message
unacknowledged, checks other sessions, and checks this session again later. After a
crash the broker delivers the control message again. A message that was kept for some
time is sent to the end of the queue, so that it does not prevent other messages from
being received.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
import uuid
from dataclasses import dataclass, field

from django.db import Error as AnyDatabaseError

from .. import conf, wire
from ..brokers import get_broker
from ..brokers.base import Delivery, Session
from ..errors import BrokerUnavailable
from ..models import OutboxMessage
from ..models.outbox import PENDING
from ..relaying.lane import AFTER_COMMIT_LEASE, Lane
from ..runtime import database_health, liveness
from ..runtime.breaker import AFTER_REFUSAL, Breaker
from ..runtime.connections import recycle
from ..runtime.liveness import Activity
from . import control_receive, database_identity
from .control_message import ControlMessage

log = logging.getLogger("django_txmsg.control_thread")

#: Most control messages held at a time.
PREFETCH = 1000
#: Longest time, in seconds, that one is held.
HOLD = 30.0


@dataclass(order=True)
class _Held:
    """A delivery that the thread keeps, the time of its next check, and the time since
    which it has been kept."""

    due: float = field(init=False, default=0.0)
    number: int = field(init=False, default_factory=itertools.count().__next__)
    since: float = field(init=False, default_factory=time.monotonic)
    delivery: Delivery = field(compare=False)


class ControlThread:
    """Receives the control messages of this service from one broker. The thread's work
    is `run()`."""

    def __init__(
        self, broker: str, stop: threading.Event, breaker: Breaker, activity: Activity
    ) -> None:
        self._broker, self._stopping = broker, stop
        self._breaker, self._activity = breaker, activity
        #: The broker's error about this destination alone; stages go on.
        self._refused = Breaker(
            wire.control_destination(conf.get().SERVICE),
            conf.get().RELAY.BREAKER_MAX_PAUSE,
            kind="the subscription of",
            follows="if a request's process dies, its messages wait for the relay",
            first_pause=AFTER_REFUSAL,
        )
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._later: list[_Held] = []

    def run(self) -> None:
        """Receive control messages until stopped."""
        try:
            while not self._stopping.is_set():
                liveness.turned()
                pause = max(self._breaker.remaining, self._refused.remaining)
                if pause:
                    self._stopping.wait(min(pause, 0.5))
                    continue
                try:
                    broker = get_broker(self._broker)
                    with self._breaker.connecting:
                        session = broker.open()
                    with session:
                        if self._subscribed(session):
                            self._serve(session, broker.stored_in)
                except BrokerUnavailable as error:
                    self._breaker.failed(error)
                except Exception:
                    log.exception("a control message failed; it comes again")
                    self._stopping.wait(1.0)
                finally:
                    self._later.clear()
        finally:
            for lane in self._lanes.values():
                lane.close()

    def _subscribed(self, session: Session) -> bool:
        destination = wire.control_destination(conf.get().SERVICE)
        try:
            session.subscribe(destination, prefetch=PREFETCH)
        except BrokerUnavailable as error:
            self._refused.failed(error)
            self._breaker.worked()  # it has accepted the session
            return False
        self._refused.worked()
        return True

    def _serve(self, session: Session, stored_in: str | None) -> None:
        self._note_the_database()
        opened = time.monotonic()
        while not self._stopping.is_set():
            liveness.turned()
            left = self._later[0].due - time.monotonic() if self._later else 0.5
            delivery = session.receive(max(0.0, min(left, 0.5)))
            # A delivery proves nothing about messages that are left without an answer.
            self._breaker.worked(
                opened=opened if delivery is None else time.monotonic()
            )
            if delivery is not None and not self._stopping.is_set():
                self._look(session, _Held(delivery))
            recycle(idle=delivery is None, but=stored_in)
            # Each one once: a message that must be checked again at once lets the
            # others go first.
            now = time.monotonic()
            while self._later and self._later[0].due <= now:
                if self._stopping.is_set():
                    return
                self._look(session, heapq.heappop(self._later))

    def _note_the_database(self) -> None:
        using = conf.get().HTTP.USING
        try:
            if database_health.usable(using):
                database_identity.note(using)
        except AnyDatabaseError as error:
            if not database_health.note(using, error):
                log.info(
                    "the identity of database %r is not recorded yet: %s", using, error
                )

    def _look(self, session: Session, held: _Held) -> None:
        try:
            control_receive.handle(held.delivery, self._dispatch, self._stopping)
        except control_receive.LookAgain as again:
            held.due = time.monotonic() + again.after
            held_for = time.monotonic() - held.since
            hold = HOLD if again.hold is None else again.hold
            if held_for < hold or self._stopping.is_set():
                heapq.heappush(self._later, held)
                return
            if not self._send_again(session, ControlMessage.read(held.delivery)):
                held.since = time.monotonic()
                heapq.heappush(self._later, held)
                return
        session.ack([held.delivery])
        self._activity.note()

    def _send_again(self, session: Session, message: ControlMessage) -> bool:
        """Send a copy of the message to the end of the queue, with the remaining time
        to live. Returns False if the broker does not accept the copy. If the session
        need not be checked any more, nothing is sent."""
        if not message.signed or message.left <= 0:
            log.warning("session %s is not checked any more", message.session_id)
            return True
        (error,) = session.send([message.outgoing()])
        if error is not None:
            log.warning("a control message is held longer: %s", error)
        return error is None

    def _dispatch(self, using: str, session_id: uuid.UUID) -> None:
        """Dispatch the session's messages to all brokers. If one broker is unavailable,
        dispatch to the others first, and then raise BrokerUnavailable."""
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
                    if self._stopping.is_set():
                        return
            except BrokerUnavailable as error:
                lane.close()
                down = error
        if down is not None:
            raise down
