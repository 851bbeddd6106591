"""Hop 6: receives deliveries, runs them through their stage, settles them by outcome.

A thread for each unit of a stage's concurrency, with a broker session and a database
connection of its own. A delivery is acknowledged after its outcome is committed, and
never before.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Iterable, Sequence
from typing import cast

from django.db import (
    DatabaseError,
    InterfaceError,
    OperationalError,
    connections,
)

from . import arrival as arrivals
from . import batch as batches
from . import conf, inbox
from .activity import Activity
from .arrival import Arrival, Interrupted, Outcome, Processed
from .breaker import Breaker
from .brokers import get_broker
from .brokers.base import Delivery, Session
from .errors import BrokerUnavailable
from .models import InboxMessage
from .models.parked import Parked
from .stages import Stage
from .throttle import Throttle

log = logging.getLogger("django_txmsg.stage_thread")

#: Seconds that a parked message, once claimed, belongs to one worker.
PARKED_LEASE = 60.0
#: Deliveries that a busy stage takes between two parked messages.
PARKED_SHARE = 16


class StageThread(threading.Thread):
    """One unit of a stage's concurrency."""

    def __init__(
        self,
        stage: Stage,
        *,
        worker: str,
        stop: threading.Event,
        breaker: Breaker,
        throttle: Throttle,
        activity: Activity,
        number: int = 0,
    ) -> None:
        super().__init__(name=f"txmsg-{stage.name}-{number}", daemon=True)
        self.stage, self.worker = stage, worker
        self.paused = threading.Event()
        #: Set by the consumer when parked messages of the stage are due: one query a
        #: process finds out, and a stage that uses no database stays without one.
        self.parked_due = threading.Event()
        self.busy_since: float | None = None
        #: Whether it has asked the broker, and got nothing.
        self.dry = False
        self.handled = 0
        self._stopping, self._breaker = stop, breaker
        self._throttle, self._activity = throttle, activity
        self._settings = conf.get()
        self._session: Session | None = None
        self._since_parked = PARKED_SHARE
        self._token = uuid.uuid4()

    def run(self) -> None:
        """Work until told to stop; what breaks outside is waited for."""
        database = Breaker(f"database {self.stage.definition.using}", 10.0)
        while not self._stopping.is_set():
            outage = database
            try:
                if self.paused.is_set():
                    self._close()
                    self._stopping.wait(0.2)
                    continue
                if self._breaker.remaining:
                    self._work_parked_without_broker()
                    self._stopping.wait(min(self._breaker.remaining, 0.5))
                    continue
                self._step()
                database.worked()
            except BrokerUnavailable as error:
                self._close()
                self._breaker.failed(error)
            except (OperationalError, InterfaceError) as error:
                # What is in hand goes back to the broker and comes again.
                self._close()
                connections[self.stage.definition.using].close()
                outage.failed(error)
                self._stopping.wait(outage.remaining)
            except Exception:
                log.exception("stage %r: an error of ours; going on", self.stage.name)
                self._close()
                self._stopping.wait(1.0)
            finally:
                self.busy_since = None
        self._close()
        connections.close_all()

    def stuck(self, after: float) -> str | None:
        """Return the handler's stack when it has been running for `after` seconds."""
        began = self.busy_since
        if began is None or time.monotonic() - began < after or self.ident is None:
            return None
        frame = sys._current_frames().get(self.ident)
        return "".join(traceback.format_stack(frame)) if frame else None

    def _step(self) -> None:
        session = self._open()
        if session is None:
            return
        # Parked messages get what is left of the time, and a share of it when nothing
        # is left: poison must not hold up the others, nor they it for ever.
        first = None if self._since_parked >= PARKED_SHARE else session.receive(0)
        if first is None and self._work_parked(session):
            self._since_parked = 0
            return
        self._since_parked = min(self._since_parked, PARKED_SHARE - 1)
        first = first or session.receive(min(0.5, self._settings.CONSUME.POLL_INTERVAL))
        if first is None:
            self._breaker.worked()
            self.dry = True
            return
        self.dry = False
        deliveries = [first]
        while len(deliveries) < self.stage.batch and not self._throttle.on:
            more = session.receive(0)
            if more is None:
                break
            deliveries.append(more)
        if self._stopping.is_set() or self.paused.is_set():
            # Received after the stop: untouched, they go back with the session.
            self._close()
            return
        self._breaker.worked()
        self._since_parked += len(deliveries)
        with self._throttle.turn():
            self._work(session, deliveries)
            if self._throttle.on:
                self._stopping.wait(self._settings.CONSUME.THROTTLE_PAUSE)

    def _work(self, session: Session, deliveries: Sequence[Delivery]) -> None:
        arrivals_ = [self._arrival(session, delivery) for delivery in deliveries]
        self.busy_since = time.monotonic()
        if len(arrivals_) > 1:
            outcomes = batches.process(arrivals_)
        else:
            outcomes = [inbox.process(arrivals_[0])]
        self.busy_since = None
        settled = [
            delivery
            for delivery, outcome in zip(deliveries, outcomes, strict=True)
            if not isinstance(outcome, Interrupted)
            and not (isinstance(outcome, Processed) and outcome.acknowledged)
        ]
        if settled:
            session.ack(settled)
        for outcome in outcomes:
            self._note(outcome)

    def _work_parked(self, session: Session) -> bool:
        """Run one parked message that has become due, if there is one."""
        if not self.parked_due.is_set():
            return False
        using = self.stage.definition.using
        rows = InboxMessage.objects.db_manager(using)
        parked = rows.claim_parked(self.stage.name, self._token, PARKED_LEASE)
        if parked is None:
            self.parked_due.clear()
            return False
        if self._stopping.is_set():
            rows.unpark(parked.seen.id, self._token)
            return False
        delivery = arrivals.from_parked(
            parked.destination, parked.headers, parked.body, parked.seen.message_id
        )
        self.busy_since = time.monotonic()
        with self._throttle.turn():
            outcome = inbox.process(self._arrival(session, delivery, parked))
        self._note(outcome)
        return True

    def _work_parked_without_broker(self) -> None:
        """Parked messages of stages with an inbox need no broker: an outage of it
        does not hold them up."""
        if self.stage.transaction == "outbox":
            while not self._stopping.is_set() and self._work_parked(_NO_SESSION):
                pass

    def _arrival(
        self, session: Session, delivery: Delivery, parked: Parked | None = None
    ) -> Arrival:
        return Arrival(
            stage=self.stage,
            delivery=delivery,
            session=session,
            worker=self.worker,
            stop=self._stopping,
            parked=parked,
            token=None if parked is None else self._token,
        )

    def _note(self, outcome: Outcome) -> None:
        self._throttle.note(outcome)
        self._activity.note()
        self.handled += 1

    def _open(self) -> Session | None:
        """Return the session, a new one if need be, or None while the broker is down:
        of all that wait for it only one knocks."""
        if self._session is None:
            stage = self.stage
            topic = stage.destination.startswith("topic:")
            subscriber = f"{self._settings.SERVICE}.{stage.name}" if topic else None
            prefetch = max(self._settings.CONSUME.PREFETCH, 2 * stage.batch)
            with self._breaker.connecting:
                if self._breaker.remaining:
                    return None
                try:
                    session = get_broker(stage.broker).open(
                        transacted=stage.transaction != "outbox", subscriber=subscriber
                    )
                except BrokerUnavailable as error:
                    self._breaker.failed(error)
                    return None
            try:
                session.subscribe(
                    stage.destination,
                    prefetch=1 if stage.transaction != "outbox" else prefetch,
                    subscriber=subscriber,
                )
            except BaseException:
                session.close()
                raise
            self._session = session
            self._activity.note()  # it takes a moment until the first message is here
        return self._session

    def _close(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            self.dry = False
            session.close()


def wake_for_parked(threads: Iterable[StageThread]) -> None:
    """Tell the threads whose stage has parked messages that are due.

    One query for each database; a database that is away is looked at again later.
    """
    by_alias: dict[str, dict[str, list[StageThread]]] = {}
    for thread in threads:
        named = by_alias.setdefault(thread.stage.definition.using, {})
        named.setdefault(thread.stage.name, []).append(thread)
    for using, named in by_alias.items():
        try:
            due = InboxMessage.objects.db_manager(using).due_stages(list(named))
        except (DatabaseError, InterfaceError) as error:
            log.warning("cannot see which parked messages are due: %s", error)
            connections[using].close()
            continue
        for name in due:
            for thread in named[name]:
                thread.parked_due.set()


class _NoSession:
    """Stands in for a broker session where none is used."""

    def __getattr__(self, name: str) -> object:
        raise BrokerUnavailable(f"no broker to {name} with")


_NO_SESSION = cast(Session, _NoSession())
