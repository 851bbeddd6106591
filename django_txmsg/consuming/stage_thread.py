"""Hop 6: receives deliveries, processes them with their stage, and settles each by its
outcome.

Each unit of a stage's concurrency is a thread with its own broker session and database
connection. A delivery is acknowledged only after its outcome is committed. While the
database is unavailable, the thread keeps its deliveries, because some brokers limit the
number of redeliveries.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from django.db import Error as AnyDatabaseError

from .. import conf
from ..brokers.base import Delivery, Session
from ..envelope.stage_options import Rate
from ..errors import BrokerUnavailable, DestinationUnavailable
from ..models import InboxMessage
from ..models.inbox_arrival import Parked
from ..runtime import database_health, liveness
from ..runtime.breaker import Breaker
from ..runtime.connections import leave_blocks, open_caches, recycle
from ..runtime.liveness import Activity
from ..stages import Stage
from . import coroutines, decoding, modes, rates
from .arrival import (
    Arrival,
    Interrupted,
    Outcome,
    Postponed,
    is_answered,
    to_acknowledge,
)
from .limits import Allowance, Room, Throttle
from .stage_middleware import prepared
from .subscription import Subscription

# Hop 6's other source: a stage's parked messages, and their share of a thread's time.
#
# They run when the broker has no deliveries. While it has some, they get a share of
# the time, so that neither poison messages nor new deliveries block the others.
# Messages that their predecessor has just released come first.

#: Seconds that a claimed parked message belongs to one worker.
LEASE = 60.0
#: Deliveries that a busy stage processes between two parked messages.
SHARE = 16
#: Most messages in a row that run because the one before them has ended.
FOLLOWERS = 16
#: Shortest pause between two queries for parked messages that were not to be had.
_PAUSE = 0.02


class Parking:
    """Decides when one thread takes a parked message of its stage instead of a
    delivery. The thread claims parked messages under `token`."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        #: Set by the consumer when parked messages of the stage are due. It queries for
        #: all stages of the process at once, so a stage that uses no database opens no
        #: connection.
        self.due = threading.Event()
        #: Set when a message ends and releases others that waited for it.
        self.woken = threading.Event()
        self.token = uuid.uuid4()
        # Most parked messages of a stage with a rate have waited only for their slot.
        self._share = SHARE if stage.rate is None else 1
        self._since, self._followers = self._share, 0
        #: When the next one is due, of a stage with a rate, by this process's clock.
        self._next = math.inf

    def comes_first(self) -> bool:
        """Return whether the thread must process a parked message before it receives
        from the broker again."""
        return self._since >= self._share or self.follows()

    def follows(self) -> bool:
        """Return whether the thread should process a follower next, because a message
        has just released its followers. After a number of followers in a row, return
        False one time, so that other messages are processed too."""
        if not self.woken.is_set():
            self._followers = 0
            return False
        self.woken.clear()
        self.due.set()
        self._followers += 1
        return self._followers % FOLLOWERS > 0

    def had_its_share(self) -> None:
        """Record that the thread has processed a parked message."""
        self._since = 0

    def had_its_turn(self) -> None:
        """Record that no parked message was due, so the thread receives a delivery
        next."""
        self._since = min(self._since, self._share - 1)

    def waited_for(self, deliveries: int) -> None:
        """Add `deliveries` to the number of deliveries that the thread has taken since
        it last processed a parked message."""
        self._since += deliveries

    @property
    def may_be_due(self) -> bool:
        """Whether a parked message may be due."""
        return self.due.is_set() or not self.pause

    def claim(self) -> Parked | None:
        """Claim one due parked message under a lease. Returns None if there is none."""
        stage = self._stage
        rows = InboxMessage.objects.db_manager(stage.definition.using)
        parked = rows.claim_parked(stage.name, self.token, LEASE, stage.reads)
        if parked is None:
            self.due.clear()
            if stage.rate is not None:
                # Not by the consumer's poll: a slot that is used late is lost.
                after = rows.next_due(stage.name)
                pause = math.inf if after is None else max(_PAUSE, after)
                self._next = time.monotonic() + pause
        return parked

    @property
    def pause(self) -> float:
        """The number of seconds after which the next parked message is due. The number
        is infinite if this thread knows of no such message. Only a thread of a stage
        with a rate can know of one."""
        return max(0.0, self._next - time.monotonic())

    def give_back(self, parked: Parked) -> None:
        """Release a claimed message, which is then due immediately."""
        rows = InboxMessage.objects.db_manager(self._stage.definition.using)
        rows.unpark(parked.record.id, self.token)


class _NoSession:
    """Stands in for a broker session while the broker is unavailable. Every use raises
    BrokerUnavailable."""

    def __getattr__(self, name: str) -> object:
        raise BrokerUnavailable(f"no broker to {name} with")


NO_SESSION = cast(Session, _NoSession())


log = logging.getLogger("django_txmsg.stage_thread")


class StageThread:
    """One unit of a stage's concurrency. The thread's work is `run()`."""

    def __init__(
        self,
        stage: Stage,
        *,
        worker: str,
        stop: threading.Event,
        breaker: Breaker,
        throttle: Throttle,
        activity: Activity,
        allowance: Allowance,
        room: Room | None = None,
        number: int = 0,
    ) -> None:
        self.name = f"txmsg-{stage.name}-{number}"
        self._ident: int | None = None
        self._mode, self.worker = modes.of(prepared(stage)), worker
        self.using = self._mode.using
        self.paused = threading.Event()
        self._parking = Parking(self.stage)
        self.parked_due = self._parking.due
        self.busy_since: float | None = None
        #: Whether it has queried the broker, and got nothing.
        self.dry = False
        #: Whether it is claiming or processing a parked message.
        self.on_parked = False
        self.handled = 0
        self._stopping = stop
        self._subscription = Subscription(self.stage, breaker)
        self._throttle, self._activity = throttle, activity
        self._allowance = allowance
        #: Whether it may receive messages that would wait: always, if not ordered.
        self.room = room or Room(self.stage)
        self._settings = conf.get()
        summary = (
            f"stage {self.stage.name!r}, database {self.using!r}: nothing could be "
            "decided about a message, "
        )
        self._undecided = database_health.Retry(self.using, f"{summary}which is kept")
        self._looking = database_health.Retry(
            self.using, f"stage {self.stage.name!r}: cannot look for messages"
        )

    @property
    def stage(self) -> Stage:
        """The stage, with its current rate."""
        return self._mode.stage

    def limit(self, rate: Rate | None) -> None:
        """Change the rate for the messages that arrive from now on. May be called from
        any thread."""
        self._mode = modes.of(replace(self.stage, rate=rate))

    def run(self) -> None:
        """Run until stopped. While the database or the broker is unavailable, wait."""
        self._ident = threading.get_ident()
        open_caches()
        try:
            while not self._stopping.is_set():
                liveness.turned()
                self._turn()
        finally:
            self._close()

    def _turn(self) -> None:
        try:
            if self.paused.is_set():
                self._close()
                self._subscription.rest()
                recycle(idle=True)
                self._stopping.wait(0.2)
            elif not self._mode.transacted and not database_health.usable(self.using):
                database_health.wait(self.using, self._stopping)
            elif self._subscription.waits:
                self._work_parked_without_broker()
                self._stopping.wait(min(self._subscription.pause, 0.5))
            else:
                self._step()
                self._looking.worked()
        except BrokerUnavailable as error:
            self.dry = False
            self._subscription.failed(error)
        except DestinationUnavailable as error:
            self.dry = False
            self._subscription.cannot_send(error)
        except AnyDatabaseError as error:
            self._looking.after(error, self._stopping)
        except Exception:
            if not self._stopping.is_set():
                log.exception("stage %r: unexpected error; continuing", self.stage.name)
                self._close()
                self._stopping.wait(1.0)
        finally:
            self.busy_since = None

    @property
    def refusal(self) -> BaseException | None:
        """The broker's error that concerns only this stage, if any."""
        subscription = self._subscription
        return subscription.refused.error or subscription.turned_away.error

    @property
    def subscribing(self) -> bool:
        """Whether the stage is about to subscribe: it has not subscribed, and neither a
        pause nor an error of the broker prevents it."""
        subscription = self._subscription
        prevented = self.paused.is_set() or subscription.error is not None
        return subscription.session is None and not prevented

    @property
    def receives_nothing(self) -> bool:
        """Whether no delivery is expected now: the last query of the broker got none,
        the stage is paused, or too many of its messages wait."""
        subscribed = self._subscription.session is not None
        full = self.room.full and subscribed
        return self.dry or self.paused.is_set() or full

    def has_received(self, seconds: float) -> bool:
        """Return whether the stage can be assumed to have received everything that was
        in its queue: the queue is empty, or the stage has been subscribed for
        `seconds`. False while the stage is paused."""
        reading = self.dry or self._subscription.age >= seconds
        return reading and not self.paused.is_set()

    def stuck(self, after: float) -> str | None:
        """Return the stack of this thread if it has been busy with a message for
        `after` seconds since its last pause between two attempts, else None. For a
        coroutine, the event loop's stack follows, because another coroutine may block
        the loop."""
        began = self.busy_since
        if began is None:
            return None
        began = max(began, liveness.pause_end(self._ident))
        if time.monotonic() - began < after:
            return None
        idents = [self._ident]
        if self.stage.transaction == "none":
            idents += [
                one.ident
                for one in threading.enumerate()
                if one.name == coroutines.THREAD
            ]
        frames = sys._current_frames()
        found = [frames[one] for one in idents if one in frames]
        return "\n".join("".join(traceback.format_stack(one)) for one in found) or None

    def _step(self) -> None:
        session = self._open()
        if session is None:
            return
        if self._subscription.held:
            # The broker may have taken the delivery back: that counts no attempt.
            session.ping()
            self._work(session, self._subscription.held)
            return
        # A full stage seldom admits a delivery, so only a turn that receives one asks.
        admitted = not self._parking.comes_first() and self.room.admits()
        first = session.receive(0) if admitted else None
        if first is None and self._work_parked(session):
            self._parking.had_its_share()
            return
        if not (admitted or self.room.admits()):
            # Prefetched deliveries are kept: a redelivery would count against the
            # delivery limit of some brokers.
            self._stopping.wait(min(0.5, self._settings.CONSUME.POLL_INTERVAL))
            return
        self._parking.had_its_turn()
        pause = min(0.5, self._settings.CONSUME.POLL_INTERVAL, self._parking.pause)
        first = first or session.receive(pause)
        if first is None:
            self._subscription.worked(received=False)
            self.dry = True
            recycle(idle=True, but=self._subscription.stored_in)
            return
        self.dry = False
        deliveries = [first]
        single = self._throttle.on or self.room.full
        while len(deliveries) < self.stage.batch and not single:
            more = session.receive(0)
            if more is None:
                break
            deliveries.append(more)
        with self._throttle.turn(self._ends) as may_work:
            if not may_work:
                # Received after the stop: they go back with the session, unprocessed.
                self._close()
                return
            self._subscription.worked(received=True)
            self._parking.waited_for(len(deliveries))
            self._work(session, deliveries)
            if self._throttle.on:
                self._stopping.wait(self._settings.CONSUME.THROTTLE_PAUSE)

    def _work(self, session: Session, deliveries: Sequence[Delivery]) -> None:
        arrivals_ = [self._arrival(session, delivery) for delivery in deliveries]
        try:
            outcomes = self._decided(arrivals_)
        except DestinationUnavailable:
            self._subscription.held = deliveries
            raise
        self._subscription.held = []
        if outcomes is None:
            self._close()  # stopping: the deliveries go back unprocessed
            return
        settled = to_acknowledge(deliveries, outcomes)
        if any(is_answered(one) for one in outcomes):
            self._subscription.sent()
        if settled:
            session.ack(settled)
        for delivery, outcome in zip(deliveries, outcomes, strict=True):
            self._note(outcome)
            self.room.note(delivery, outcome)
        if any(isinstance(one, Interrupted) for one in outcomes):
            self._close()  # also if the pause has ended meanwhile

    def _decided(self, arrivals: Sequence[Arrival]) -> list[Outcome] | None:
        """Process arrivals, and return their outcomes. While the database is
        unavailable or refuses the package's statements, keep the arrivals and try
        again, without counting another attempt. Returns None if the consumer stops
        first."""
        while True:
            liveness.turned((self.stage.timeout or 0.0) * len(arrivals))
            recycle()
            self.busy_since = time.monotonic()
            try:
                outcomes = rates.process(arrivals)
            except (BrokerUnavailable, DestinationUnavailable):
                raise
            except Exception as error:
                refused = error
            else:
                self._undecided.worked()
                self._subscription.turned_away.worked()
                return outcomes
            finally:
                self.busy_since = None
                for alias in leave_blocks():
                    log.warning(
                        "stage %r: its handler has left a transaction open on database "
                        "%r, which is rolled back",
                        self.stage.name,
                        alias,
                    )
                recycle()
            if not database_health.may_pass(refused):
                # An error of the package, or a value of the message that cannot be
                # stored: the message must end.
                for arrival in arrivals:
                    arrival.count_again(refused)
            if not self._undecided.after(refused, self._stopping):
                return None

    def _work_parked(self, session: Session) -> bool:
        """Process one due parked message. Returns False if there is none."""
        self.on_parked = True
        try:
            if not self._parking.may_be_due:
                return False
            # Claimed only in its turn: a lease would end while the thread waits.
            with self._throttle.turn(self._ends) as may_work:
                parked = self._parking.claim() if may_work else None
                if parked is None:
                    return False
                if self._ends():
                    self._parking.give_back(parked)
                    return False
                arrival = self._arrival(session, decoding.from_parked(parked), parked)
                outcomes = self._decided([arrival])
            # If the message has caused the error, the attempt of its claim is used up.
            if outcomes is None and (arrival.counted or arrival.record is None):
                with contextlib.suppress(AnyDatabaseError):  # its lease ends by itself
                    self._parking.give_back(parked)
            for outcome in outcomes or ():
                self._note(outcome)
            return True
        finally:
            self.on_parked = False

    def _ends(self) -> bool:
        """Return whether the thread must not process any further message now."""
        return self._stopping.is_set() or self.paused.is_set()

    def _work_parked_without_broker(self) -> None:
        """Process parked messages while the broker is unavailable. Does nothing if the
        stage's transaction uses the broker."""
        if not self._mode.transacted:
            while not self._stopping.is_set() and self._work_parked(NO_SESSION):
                self._parking.follows()

    def _arrival(
        self, session: Session, delivery: Delivery, parked: Parked | None = None
    ) -> Arrival:
        return Arrival(
            self._mode,
            delivery,
            session=session,
            worker=self.worker,
            stop=self._stopping,
            parked=parked,
            token=None if parked is None else self._parking.token,
            woken=self._parking.woken,
            paused=self.paused,
        )

    def _note(self, outcome: Outcome) -> None:
        self._throttle.note(outcome)
        if isinstance(outcome, Postponed) and outcome.readable:
            self.parked_due.set()  # it may be the next one
        self._activity.note()
        self.handled += 1
        self._allowance.spend()

    def _open(self) -> Session | None:
        before = self._subscription.session
        session = self._subscription.open()
        if session is not before:
            self._activity.note()  # the first message takes a moment to arrive
        return session

    def _close(self) -> None:
        self.dry = False
        self._subscription.close()
