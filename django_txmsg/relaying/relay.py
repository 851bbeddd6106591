"""Hop 3 as a process: `manage.py relay` runs several lanes in parallel until stopped.

If a broker or database is down, the relay probes that server with growing pauses, and
uses the server again when it answers.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import Counter
from contextlib import ExitStack
from functools import partial

from django.db import Error as AnyDatabaseError

from .. import conf
from ..errors import BrokerUnavailable, DestinationUnavailable
from ..runtime import database_health, liveness, notifications
from ..runtime.breaker import Breaker
from ..runtime.connections import recycle
from ..runtime.thread_group import ThreadGroup
from .lane import Lane
from .limits import Budget, Turn, pauses
from .listener import listening

log = logging.getLogger("django_txmsg.relay")

#: Seconds after which a waiting lane checks whether it must stop.
REST = 0.3
#: One in this many lanes uses the database at a time: a batch spends about a quarter of
#: its time there.
LANES_A_PLACE = 4


class Relay:
    """Runs lanes for every pair of database and broker, until stopped.

    `using` and `brokers` are aliases; `batch_size` overrides the setting.
    """

    def __init__(
        self,
        using: list[str],
        brokers: list[str],
        *,
        batch_size: int | None = None,
        lanes: int | None = None,
    ) -> None:
        self._stop = threading.Event()
        #: Why a broker, by its alias, or a destination of it could not be used.
        self.unavailable: dict[str, str] = {}
        count = lanes or conf.get().RELAY.LANES
        max_pause = conf.get().RELAY.BREAKER_MAX_PAUSE
        self._breakers = {name: Breaker(name, max_pause) for name in brokers}
        places = max(1, count * len(brokers) // LANES_A_PLACE)
        turns = {alias: Turn(places) for alias in using}
        pairs = list(itertools.product(using, brokers))
        budgets = {pair: Budget(count, len(pairs)) for pair in pairs}
        self.lanes = [
            Lane(
                alias,
                broker,
                batch_size=batch_size,
                stop=self._stop,
                turn=turns[alias],
                budget=budgets[alias, broker],
            )
            for broker in brokers
            for alias in using
            for _ in range(count)
        ]

    @property
    def counts(self) -> Counter[str]:
        """The number of messages so far, by outcome, for example "dispatched" or
        "dead"."""
        total: Counter[str] = Counter()
        for lane in self.lanes:
            total += lane.counts
        return total

    @property
    def in_flight(self) -> int:
        """The number of messages that are claimed and not settled."""
        return sum(lane.in_flight for lane in self.lanes)

    def stop(self) -> None:
        """Finish the claimed messages and claim no more. May be called from any thread
        or signal handler."""
        self._stop.set()

    def run(self, *, once: bool = False) -> None:
        """Relay until stopped. With `once`, relay until no lane finds a due row.

        If an error ends a lane, all lanes end, and the error is raised. With `once`, an
        unavailable broker or database ends only its own lanes; when the other lanes
        have ended too, the error is raised. With `once`, also raises
        DestinationUnavailable if a destination did not take its messages.
        """

        away: list[Exception] = []

        def work(lane: Lane) -> None:
            try:
                self._work(lane, once)
            except Exception as error:
                if not once or not _is_away(error):
                    raise
                away.append(error)
            finally:
                lane.close()

        group = ThreadGroup(self.stop)
        for number, lane in enumerate(self.lanes):
            group.add(f"txmsg-lane-{number}", partial(work, lane))
        with ExitStack() as stack:
            if not once:
                stack.enter_context(listening({lane.using for lane in self.lanes}))
            group.start()
            group.join()
        if away:
            # A database's error takes precedence over a broker's: others may depend on
            # that database.
            raise min(away, key=lambda error: isinstance(error, BrokerUnavailable))
        if once:
            self._tell_of_pauses()

    def _tell_of_pauses(self) -> None:
        for using, broker in sorted(
            {(one.using, one.broker_alias) for one in self.lanes}
        ):
            for name, error in pauses(using, broker).errors.items():
                self.unavailable[name] = str(error)
        if self.unavailable:
            name, words = next(iter(self.unavailable.items()))
            raise DestinationUnavailable(f"destination {name!r}: {words}")

    def _work(self, lane: Lane, once: bool) -> None:
        breaker = self._breakers[lane.broker_alias]
        interval = conf.get().RELAY.POLL_INTERVAL
        # Claimed messages keep their lease.
        retry = database_health.Retry(lane.using, "the outbox cannot be dispatched")
        wakeup = notifications.Wakeup(
            lane.using, notifications.outbox(lane.broker_alias)
        )
        while not self._stop.is_set():
            liveness.turned()
            if not once and not database_health.wait(lane.using, self._stop):
                return
            if breaker.remaining:
                self._stop.wait(min(breaker.remaining, 1.0))
                continue
            try:
                claimed = lane.dispatch()
            except BrokerUnavailable as error:
                lane.close()
                breaker.failed(error)
                self.unavailable[lane.broker_alias] = str(error)
                if once:
                    raise
                continue
            except AnyDatabaseError as error:
                if once or not database_health.may_pass(error):
                    raise
                retry.after(error, self._stop)
                continue
            finally:
                recycle()
            breaker.worked(opened=math.inf if lane.answered else lane.opened)
            retry.worked()
            if claimed:
                continue
            if once and not lane.locked:
                return
            self._rest(lane, wakeup, interval)

    def _rest(self, lane: Lane, wakeup: notifications.Wakeup, interval: float) -> None:
        """Wait until there may be new rows: for `interval` seconds or, with a listener,
        until a notification. Return earlier if a paused destination can be tried."""
        until = time.monotonic() + interval
        while not self._stop.is_set():
            liveness.turned()
            left = REST if wakeup.has_listener else until - time.monotonic()
            trial = lane.next_trial
            if trial is not None:
                left = min(left, trial)
            if left <= 0 or wakeup.wait(min(REST, left)):
                wakeup.due()  # resets the wake-up
                return
            recycle()


def _is_away(error: Exception) -> bool:
    return isinstance(error, BrokerUnavailable) or database_health.may_pass(error)
