"""Hop 6, the process: the threads of all its stages, and what keeps them honest.

Besides the stages it serves this service's control messages, takes in the broker's own
dead-letter queues when told to, works off bulk operations, obeys paused stages, tells
that it lives, and names handlers that are stuck.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from django.db import DatabaseError, InterfaceError, connections, router

from . import bulk, conf, periods, status, wire
from .activity import Activity
from .breaker import Breaker
from .brokers import get_broker
from .control_thread import ControlThread
from .errors import BrokerUnavailable
from .intake import IntakeThread
from .models import StageState, Worker
from .models.periods import PERIOD
from .stage_thread import StageThread, wake_for_parked
from .stages import Stage
from .throttle import Throttle
from .worker import Presence

log = logging.getLogger("django_txmsg.consumer")

#: Seconds without work after which `--once` takes it that all is done.
IDLE = 1.5


class Consumer:
    """Runs stages until stopped. `concurrency` overrides what the stages say."""

    def __init__(
        self, stages: Sequence[Stage], *, concurrency: int | None = None
    ) -> None:
        self._settings = conf.get()
        self._stop = threading.Event()
        self._activity = Activity()
        self._using = router.db_for_write(Worker)
        self._presence = Presence(
            "consumer", self._using, [stage.name for stage in stages]
        )
        max_pause = self._settings.RELAY.BREAKER_MAX_PAUSE
        self._breakers = {
            alias: Breaker(alias, max_pause) for alias in self._settings.BROKERS
        }
        self.threads = [
            self._stage_thread(stage, throttle, number)
            for stage in stages
            for throttle in [self._throttle()]
            for number in range(_threads(stage, concurrency or stage.concurrency))
        ]
        self._others: list[threading.Thread] = []
        self._reported: set[int] = set()

    @property
    def handled(self) -> int:
        """Deliveries settled so far."""
        return sum(thread.handled for thread in self.threads)

    @property
    def in_flight(self) -> int:
        """Messages in a handler's hands."""
        return sum(thread.busy_since is not None for thread in self.threads)

    def stop(self) -> None:
        """Finish what is in hand and take nothing new. From any thread or signal."""
        self._stop.set()

    def run(self, *, once: bool = False) -> None:
        """Work until stopped; `once`: until nothing has come for a while, and no bulk
        operation is running.

        Raises BrokerUnavailable with `once` when a stage's broker is down.
        """
        self._others = [
            ControlThread(alias, self._stop, breaker, self._activity)
            for alias, breaker in self._breakers.items()
        ]
        self._others += [
            IntakeThread("default", destination, self._stop, self._activity)
            for destination in self._settings.DEAD_LETTER_DESTINATIONS
        ]
        self._others.append(
            threading.Thread(target=self._bulk, name="txmsg-bulk", daemon=True)
        )
        self._obey()
        self._presence.beat(0)
        for thread in [*self.threads, *self._others]:
            thread.start()
        try:
            self._watch(once)
        finally:
            self._stop.set()
            for thread in [*self.threads, *self._others]:
                while thread.is_alive():
                    thread.join(0.2)
            self._presence.leave()

    def _watch(self, once: bool) -> None:
        beat_at = 0.0
        pause = min(0.5, self._settings.CONSUME.POLL_INTERVAL)
        while not self._stop.wait(pause):
            self._obey()
            wake_for_parked(self.threads)
            self._name_stuck()
            if time.monotonic() >= beat_at:
                self._presence.beat(self.in_flight)
                beat_at = time.monotonic() + self._settings.CONSUME.HEARTBEAT
            if once and self._all_done():
                return

    def _all_done(self) -> bool:
        """Return whether every stage has asked its broker, nobody has had work for a
        while, and no bulk operation is left.

        Raises BrokerUnavailable when a broker cannot be asked.
        """
        for alias in {thread.stage.broker for thread in self.threads}:
            error = self._breakers[alias].error
            if error is not None:
                raise BrokerUnavailable(f"broker {alias!r} cannot be used: {error}")
        asked = all(thread.dry or thread.paused.is_set() for thread in self.threads)
        return (
            asked
            and not self.in_flight
            and self._activity.idle > IDLE
            # Who starts nothing but `--once` would never see one end.
            and not bulk.running(self._using)
        )

    def _obey(self) -> None:
        """Hold the stages that an operator has paused."""
        try:
            paused = StageState.objects.db_manager(self._using).paused()
        except (DatabaseError, InterfaceError) as error:
            log.warning("cannot read which stages are paused: %s", error)
            connections[self._using].close()
            return
        for thread in self.threads:
            if thread.stage.name in paused:
                thread.paused.set()
            else:
                thread.paused.clear()

    def _name_stuck(self) -> None:
        for thread in self.threads:
            stack = thread.stuck(self._settings.CONSUME.STUCK_AFTER)
            if stack is None:
                self._reported.discard(id(thread))
            elif id(thread) not in self._reported:
                self._reported.add(id(thread))
                log.error(
                    "stage %r: its handler has been running for more than %.0f s:\n%s",
                    thread.stage.name,
                    self._settings.CONSUME.STUCK_AFTER,
                    stack,
                )

    def _bulk(self) -> None:
        kept_at = time.monotonic()
        while not self._stop.is_set():
            try:
                if bulk.work_off(self._using, self._stop):
                    self._activity.note()
                if time.monotonic() - kept_at > PERIOD.total_seconds():
                    kept_at = time.monotonic()
                    # Counted now, nobody has to wait for the chart later.
                    periods.last_day(self._using, status.clock(self._using))
            except Exception:
                log.exception("a bulk operation failed; it is taken up again")
                connections[self._using].close()
            self._stop.wait(1.0)
        connections.close_all()

    def _throttle(self) -> Throttle:
        consume = self._settings.CONSUME
        return Throttle(consume.THROTTLE_AFTER, consume.THROTTLE_PAUSE)

    def _stage_thread(
        self, stage: Stage, throttle: Throttle, number: int
    ) -> StageThread:
        return StageThread(
            stage,
            worker=self._presence.name,
            stop=self._stop,
            breaker=self._breakers[stage.broker],
            throttle=throttle,
            activity=self._activity,
            number=number,
        )


def _threads(stage: Stage, wanted: int) -> int:
    """Return in how many threads the stage can be consumed, at most `wanted`: a broker
    that keeps a topic's subscription for one connection refuses all the others."""
    topic = stage.destination.startswith(wire.TOPIC_PREFIX)
    if wanted > 1 and topic and not get_broker(stage.broker).shares_topics():
        log.warning("stage %r consumes a topic: one thread, not %d", stage.name, wanted)
        return 1
    return wanted
