"""Hop 6 as a process: the consumer runs and supervises the threads of all its stages.

The consumer also receives this service's control messages, executes bulk operations,
obeys operators (who pause stages, change rates and stop messages), sends heartbeats,
and logs stuck handlers. If dead-letter queues of the broker are configured, the
consumer makes dead letters of their messages.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from django.db import router

from .. import conf, wire
from ..brokers import find_broker, get_broker
from ..dead_letters import bulk
from ..envelope.stage_options import Rate
from ..errors import BrokerUnavailable
from ..http_outbox.control_thread import ControlThread
from ..models import InboxMessage, RateLine, StageState, StopRequest, Worker
from ..monitoring import databases
from ..monitoring.presence import Presence
from ..relaying.listener import listening
from ..runtime import database_health, liveness, notifications
from ..runtime.breaker import Breaker
from ..runtime.connections import recycle
from ..runtime.liveness import RARELY, SELDOM, Activity
from ..runtime.thread_group import ThreadGroup
from ..stages import Stage
from . import deadline, ordering
from .bulk_thread import Bulk
from .intake import IntakeThread
from .limits import Allowance, Room, Throttle
from .stage_middleware import prepared
from .stage_thread import StageThread


def wake_for_parked(
    threads: Sequence[StageThread], between: Callable[[], object] = lambda: None
) -> None:
    """Wake the threads of each stage that has due parked messages. The threads use one
    database. If it is unavailable, it is queried again later. `between` is called
    between long statements."""
    named: dict[str, list[StageThread]] = {}
    for thread in threads:
        named.setdefault(thread.stage.name, []).append(thread)
    if not named:
        return
    using = threads[0].using
    reads = {name: members[0].stage.reads for name, members in named.items()}
    inbox = InboxMessage.objects.db_manager(using)
    looking = database_health.retry(using, "cannot see which parked messages are due")
    due = looking.run(partial(inbox.due_stages, reads))
    if due is None:
        return
    for name, members in named.items():
        if members[0].stage.ordered:
            # First: messages that must wait longer are then not due any more.
            what = f"cannot recheck the waiting messages of {name!r}"
            recheck = partial(_recheck, members, between, due=name in due)
            database_health.retry(using, what).run(recheck)
        if name in due:
            for thread in members:
                thread.parked_due.set()


def _recheck(
    threads: Sequence[StageThread], between: Callable[[], object], *, due: bool
) -> None:
    """Check whether too many messages wait at an ordered stage. If `due`, also check
    for each due waiting message whether its turn has come."""
    stage = threads[0].stage
    ordering.notice(stage, between)
    if due:
        received = all(one.has_received(ordering.grace()) for one in threads)
        ordering.ask(stage, received, between)
    for room in {thread.room for thread in threads}:
        room.look()


log = logging.getLogger("django_txmsg.consumer")

#: Seconds without work after which `--once` assumes that all is done.
IDLE = 1.5
#: Heartbeats between two checks for another service with a stage of the same name.
BEATS = 6


class Consumer:
    """Runs stages until stopped. `concurrency` overrides the stages' own option."""

    def __init__(
        self, stages: Sequence[Stage], *, concurrency: int | None = None
    ) -> None:
        self._settings = conf.get()
        given = self._settings.CONSUME
        self.allowance = Allowance(given.MAX_MESSAGES, given.MAX_MEMORY, self.stop)
        self._stop = threading.Event()
        self._activity = Activity()
        self._databases = databases.with_tables()
        #: The database in which operators' requests and workers are stored.
        self._home = router.db_for_write(StageState)
        self._presence = Presence(
            "consumer", router.db_for_write(Worker), [stage.name for stage in stages]
        )
        max_pause = self._settings.RELAY.BREAKER_MAX_PAUSE
        self._breakers = {
            alias: Breaker(
                alias,
                max_pause,
                follows="its stages wait, and their messages stay where they are",
            )
            for alias in self._settings.BROKERS
        }
        self.threads = [
            thread
            for stage in map(prepared, stages)
            for thread in self._threads_of(stage, concurrency or stage.concurrency)
        ]
        self._named: dict[str, list[StageThread]] = {}
        for one in self.threads:
            self._named.setdefault(one.stage.name, []).append(one)
        #: The names of stages whose order and rate are recorded.
        self._recorded: set[str] = set()
        self._declared = {one.stage.name: one.stage.rate for one in self.threads}
        #: The same rates, or those that operators have set.
        self._rates = dict(self._declared)
        #: When a rate that an operator has set ends, by `time.monotonic()`.
        self._rate_until = math.inf
        self._group = ThreadGroup(self.stop)
        #: What was reported of a thread, by the id of its object.
        self._reported: dict[int, str] = {}
        self._beats, self._look_at_beat, self._beat_at = 0, 0, 0.0

    @property
    def handled(self) -> int:
        """The number of messages that the consumer has handled so far, whatever their
        outcome."""
        return sum(thread.handled for thread in self.threads)

    @property
    def in_flight(self) -> int:
        """The number of messages that handlers are processing."""
        return sum(thread.busy_since is not None for thread in self.threads)

    def stop(self) -> None:
        """Finish the messages in progress and start no new ones. May be called from any
        thread or signal handler."""
        self._stop.set()

    def wait_for_subscriptions(self, seconds: float) -> None:
        """Wait until the stages of topics have subscribed, but at most for `seconds`.
        Do not wait for a stage that is paused, or that cannot use its broker."""
        liveness.turned(seconds)
        ends = time.monotonic() + seconds
        topics = [one for one in self.threads if one.stage.subscriber]
        while any(one.subscribing for one in topics) and time.monotonic() < ends:
            if self._stop.wait(0.05):
                return

    def run(self, *, once: bool = False) -> None:
        """Run until stopped. With `once`, run until no message has arrived for a while
        and no bulk operation is running.

        Raises the error that ended one of the consumer's threads, if any. With `once`,
        also raises an error if a stage cannot use its broker or its database.
        """
        group = self._group
        for thread in self.threads:
            group.add(thread.name, thread.run)
        for alias, breaker in self._breakers.items():
            broker = find_broker(alias)
            if broker is not None and not broker.consumable:
                continue
            control = ControlThread(alias, self._stop, breaker, self._activity)
            group.add(f"txmsg-control-{alias}", control.run)
        for destination in self._settings.DEAD_LETTER_DESTINATIONS:
            intake = IntakeThread("default", destination, self._stop, self._activity)
            group.add(f"txmsg-intake-{destination}", intake.run)
        Bulk(self._databases, self._stop, self._activity).add_to(group)
        for using in sorted({thread.using for thread in self.threads} - {self._home}):
            # That database may not answer.
            group.add(f"txmsg-consumer-{using}", partial(self._watch, using))
        self._obey()
        for thread in self.threads:
            # Before the thread takes its first slot.
            thread.limit(self._rates[thread.stage.name])
        self._presence.beat(0)
        try:
            self._presence.refuse_rivals()
            # Afterwards: a process that has ended before has parked its last messages.
            self._begin(self._home)
        except Exception:
            self._presence.leave()
            raise
        with ExitStack() as stack:
            if not once:
                stack.enter_context(listening(self._notifying_databases()))
            group.start()
            liveness.begin("txmsg-consumer")
            try:
                self._watch(self._home, once)
            finally:
                self._stop.set()
                try:
                    group.join(self._drain)
                finally:
                    self._end()
                    liveness.ended()
                    self._presence.leave()

    def _notifying_databases(self) -> set[str]:
        """Return the databases from which this process receives notifications."""
        brokers = [get_broker(alias) for alias in self._settings.BROKERS]
        embedded = {broker.stored_in for broker in brokers}
        return {one for one in {*self._databases, *embedded} if one is not None}

    def _begin(self, using: str) -> None:
        """Record which stages of a database are ordered, and their rates. Apply a rate
        that an operator has set or reset. If a stage is no longer ordered or no longer
        has a rate, also release the messages that wait for that reason. If the database
        is unavailable, the consumer tries again later."""
        for name, rate in self._rates.items():
            threads = self._named[name]
            stage = threads[0].stage
            new_rate = rate != stage.rate
            if threads[0].using != using or (name in self._recorded and not new_rate):
                continue
            looking = database_health.retry(
                using, "cannot record which stages are ordered, and their rates"
            )
            between = partial(self._turned, using)
            recording = partial(_record_options, replace(stage, rate=rate), between)
            if not looking.run(recording):
                continue
            self._recorded.add(name)
            if new_rate:
                for thread in threads:
                    thread.limit(rate)
                log.info("stage %r: its rate is now %s", name, rate)

    def _end(self) -> None:
        for threads in self._named.values():
            ending = database_health.retry(
                threads[0].using, "cannot record that a stage is not ordered"
            )
            ending.run(partial(ordering.end, threads[0].stage))

    def _watch(self, using: str, once: bool = False) -> None:
        """Watch one database until stopped. When a parked message is due, wake the
        threads of its stage. Stop the messages that operators have asked to stop.

        Operators also pause stages and set rates. One database contains these requests.
        If `using` is that database, also carry out these requests, check the limits of
        the process, and write heartbeats. With `once`, return when nothing is left to
        do.
        """
        home = using == self._home
        threads = [thread for thread in self.threads if thread.using == using]
        look_at, obey_at = 0.0, 0.0
        pause = min(0.5, self._settings.CONSUME.POLL_INTERVAL)
        wakeup = notifications.Wakeup(using, notifications.WORK)
        self._begin(using)
        while not self._stop.wait(pause):
            self._turned(using)
            self._begin(using)
            calm = wakeup.has_listener and self._activity.calm
            now = time.monotonic()
            if wakeup.due() or not calm or now >= min(obey_at, self._rate_until):
                if home:
                    self._obey()
                # The handler of a message that must stop may begin at any moment.
                asked = self._stop_messages(using)
                obey_at = time.monotonic() + (0.0 if asked else RARELY)
            if not calm or time.monotonic() >= look_at:
                wake_for_parked(threads, partial(self._turned, using))
                look_at = time.monotonic() + SELDOM
            if home:
                self._look_after_process()
            recycle()
            if once and self._all_done():
                return

    def _look_after_process(self) -> None:
        self._name_stuck()
        self.allowance.look()
        if self._beats >= self._look_at_beat:
            # The other process may have parked messages under other options.
            self._recorded -= self._presence.refuse_rivals()
            self._look_at_beat = self._beats + BEATS

    def _drain(self) -> None:
        """Look after the messages in progress once, while the consumer waits for their
        end. Their handlers may take long, so operators must still see and stop them."""
        self._turned(self._home)
        for using in {thread.using for thread in self.threads}:
            self._stop_messages(using)
        self._name_stuck()
        recycle()

    def _turned(self, using: str) -> bool:
        """Report that the thread that watches a database goes on. Write a heartbeat if
        one is due. Returns whether the consumer must stop."""
        liveness.turned()
        if using == self._home and time.monotonic() >= self._beat_at:
            self._presence.beat(self.in_flight)
            self._beats += 1
            self._beat_at = time.monotonic() + self._settings.CONSUME.HEARTBEAT
        return self._stop.is_set()

    def _all_done(self) -> bool:
        """Return whether nothing is left to do: no stage expects a delivery, no thread
        has worked for a while, and no bulk operation is running.

        Raises an error if a stage cannot use its broker or its database.
        """
        for thread in self.threads:
            alias = thread.stage.broker
            error = self._breakers[alias].error or thread.refusal
            if error is not None:
                raise BrokerUnavailable(f"broker {alias!r} cannot be used: {error}")
        for using in self._databases:
            away = database_health.error(using)
            if away is not None:
                raise away
        all_queried = all(
            thread.receives_nothing and not thread.on_parked for thread in self.threads
        )
        return (
            all_queried
            and not self.in_flight
            and self._activity.idle > IDLE
            # Else none would ever end where consumers run only with `--once`.
            and not any(bulk.running(using) for using in self._databases)
        )

    def _obey(self) -> None:
        """Pause or resume each stage as operators have requested, and read the rates
        that operators have set."""
        states = StageState.objects.db_manager(self._home)
        looking = database_health.retry(
            self._home, "cannot read which stages are paused"
        )
        if any(self._declared.values()):
            self._read_rates(looking.run(states.rates))
        paused = looking.run(states.paused)
        if paused is None:
            return
        for thread in self.threads:
            if thread.stage.name in paused:
                thread.paused.set()
            else:
                thread.paused.clear()

    def _read_rates(self, found: Mapping[str, tuple[str, float]] | None) -> None:
        """Determine each stage's rate: the rate that an operator has set, or the
        declared rate. `found` is None if the database is unavailable."""
        if found is None:
            return
        left = [seconds for name, (_, seconds) in found.items() if name in self._rates]
        self._rate_until = time.monotonic() + min(left, default=math.inf)
        self._rates = {
            name: Rate.parse(found[name][0]) if declared and name in found else declared
            for name, declared in self._declared.items()
        }

    def _stop_messages(self, using: str) -> bool:
        """Stop the messages in progress that an operator wants to stop. Returns whether
        there were requests."""
        threads = [one for one in self.threads if one.using == using]
        if all(one.stage.timeout is None for one in threads):
            return False
        rows = StopRequest.objects.db_manager(using)
        looking = database_health.retry(using, "cannot read what to stop")
        requests = looking.run(rows.open) or []
        for one in requests:
            if deadline.stop(one.stage, one.message_id, one.why):
                log.warning(
                    "stage %r: message %s is stopped: %s",
                    *(one.stage, one.message_id, one.why),
                )
                looking.run(one.delete)
        return bool(requests)

    def _name_stuck(self) -> None:
        after = self._settings.CONSUME.STUCK_AFTER
        began = {one.thread: one.since for one in liveness.now_running()}
        for thread in self.threads:
            stack, since = thread.stuck(after), began.get(thread.name)
            if since is None:
                # It may wait for the lock on a row of the inbox, for example.
                what = "no handler is running now, and a message has been in progress"
            else:
                what = "its handler has been running"
            if stack is None:
                self._reported.pop(id(thread), None)
            elif since is not None and time.monotonic() - since < after:
                continue  # the message waited before its handler began
            elif self._reported.get(id(thread)) != what:
                self._reported[id(thread)] = what
                log.error(
                    "stage %r: %s for more than %.0f s:\n%s",
                    *(thread.stage.name, what, after, stack),
                )

    def _threads_of(self, stage: Stage, wanted: int) -> Iterator[StageThread]:
        """Yield the threads for the stage: as many as `wanted`, or one if the stage
        subscribes to a topic and the broker allows only one connection for each
        subscription."""
        topic = wire.is_topic(stage.destination)
        if wanted > 1 and topic and not get_broker(stage.broker).shares_topics():
            what = "stage %r consumes a topic: one thread, not %d"
            log.warning(what, stage.name, wanted)
            wanted = 1
        throttle = Throttle(self._settings.CONSUME.THROTTLE_AFTER)
        room = Room(stage)
        for number in range(wanted):
            yield StageThread(
                stage,
                worker=self._presence.name,
                stop=self._stop,
                breaker=self._breakers[stage.broker],
                throttle=throttle,
                activity=self._activity,
                allowance=self.allowance,
                room=room,
                number=number,
            )


def _record_options(stage: Stage, between: Callable[[], object]) -> bool:
    """Record a stage's rate, and whether the stage is ordered. Always returns True, so
    that the result of `Retry.run(_record_options)` shows whether the stage was
    recorded. `Retry.run()` returns None if the database refuses a statement."""
    ordering.begin([stage], between)
    lines = RateLine.objects.db_manager(stage.definition.using)
    if stage.rate is None:
        lines.no_more(stage.name, between)
    else:
        lines.changed(stage.name, stage.rate.period, between)
    return True
