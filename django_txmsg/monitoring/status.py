"""The state of messaging: the counts of every state and the age of the oldest message,
in few queries.

The overview, `manage.py message_status`, the alarms and the metrics read this state for
every database in use. The health view uses the same functions, but counts less.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from django.db import Error as AnyDatabaseError
from django.db import router

from .. import conf, wire
from ..brokers import find_broker
from ..models import InboxMessage, OutboxMessage, SessionRecord, StageState, Worker
from ..models.fields import clock
from ..models.monitoring import PERIOD
from ..models.queue import queue_name
from ..stages import all_stages
from . import (
    attendance,
    databases,
    dead,
    periods,
    runs,
    schedule,
    subscriptions,
    turns,
)
from .attendance import Attendance
from .runs import Runs
from .schedule import Timing
from .subscriptions import Subscription
from .turns import HeldKey, Line
from .waiting import (
    CAP,
    NeedsNewerCode,
    Waiting,
    for_deadlines,
    for_newer_code,
    in_inbox,
    in_outbox,
    in_queues,
    total,
)

#: Destinations that received a message in the last period of this length.
RECENT = dt.timedelta(days=1)

#: Number of rows that are read to find the last activity of each place.
NEWEST = 2_000


def _letters(name: str) -> str:
    """Return a key that is the same for a name and for its likely misspellings. Case,
    separators and the order of the letters do not change the key. A missing or
    additional letter changes the key, because "placed" and "place" are different
    words."""
    return "".join(sorted(filter(str.isalnum, name.lower())))


@dataclass
class Place:
    """A destination or a stage, with its waiting messages, its dead messages and its
    last activity. Times are by the database's clock. Durations are in seconds."""

    name: str
    database: str = ""
    waiting: Waiting = field(default_factory=Waiting)
    dead: int = 0
    oldest_dead: dt.datetime | None = None
    muted: int = 0
    last: dt.datetime | None = None
    #: The broker of the last dispatch, of a destination.
    broker: str = ""
    processing: float | None = None
    critical: float | None = None
    paused_at: dt.datetime | None = None
    paused_by: str = ""
    paused_why: str = ""
    #: Messages that wait for newer code.
    newer: NeedsNewerCode | None = None
    #: Messages that wait for their predecessors, at an ordered stage.
    line: Line = field(default_factory=Line)
    #: Since when the stage has been receiving nothing, because too many messages wait.
    full_since: dt.datetime | None = None
    #: Whether the stage is declared here.
    known: bool = True
    #: The live processes that run the stage.
    workers: int = 0
    #: The stages declared here that consume the destination.
    consumers: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The name of the place. If the place is outside the outbox's database, the
        database's alias is added."""
        return labelled(self.name, self.database)


@dataclass
class Status:
    """The complete state at the instant `now` of the database's clock.

    Places and queues are identified by name. In databases other than the outbox's,
    `labelled()` adds the alias to the name, because two databases may use the same
    names.
    """

    now: dt.datetime
    databases: list[str]
    attendance: Attendance
    #: The further databases, in which only the embedded broker's tables are read.
    with_only_queues: list[str] = field(default_factory=list)
    #: The databases that do not answer, each with the error.
    unreadable: dict[str, str] = field(default_factory=dict)
    #: The databases that refuse writes.
    read_only: list[str] = field(default_factory=list)
    destinations: dict[str, Place] = field(default_factory=dict)
    #: The pending messages by the service that stored them; "" for an earlier release.
    services: dict[str, Waiting] = field(default_factory=dict)
    stages: dict[str, Place] = field(default_factory=dict)
    queues: dict[str, Waiting] = field(default_factory=dict)
    #: The runs of flows that wait for a deadline, by service.
    deadlines: dict[str, Waiting] = field(default_factory=dict)
    #: The open runs of each flow.
    runs: list[Runs] = field(default_factory=list)
    #: How many runs are stuck at an undo. A brief reading counts only these runs.
    stuck_undos: int = 0
    #: How many sessions were given up in the last 24 hours, if they are counted.
    sessions_given_up: int = 0
    #: The recurring messages that were not stored when they were due.
    late_ticks: list[Timing] = field(default_factory=list)
    #: The destinations without a known consumer, each with the name that was perhaps
    #: meant.
    unconsumed: dict[str, str] = field(default_factory=dict)
    subscriptions: list[Subscription] = field(default_factory=list)
    #: The open dead letters that are not muted, by place and error, each with its
    #: database.
    errors: list[tuple[str, dead.Dead]] = field(default_factory=list)
    #: The keys of ordered stages whose messages have waited for too long.
    held_keys: list[HeldKey] = field(default_factory=list)

    @property
    def outbox(self) -> Waiting:
        """All pending messages."""
        return total(place.waiting for place in self.destinations.values())

    @property
    def parked(self) -> Waiting:
        """All messages that wait for an attempt at their stage."""
        return total(place.waiting for place in self.stages.values())

    @property
    def queued(self) -> Waiting:
        """All messages in the embedded broker's queues."""
        return total(self.queues.values())

    @property
    def dead(self) -> int:
        """The number of open dead letters whose errors are not muted."""
        return sum(place.dead for place in self._places)

    @property
    def muted(self) -> int:
        """The number of open dead letters whose errors are muted."""
        return sum(place.muted for place in self._places)

    @property
    def oldest_dead(self) -> dt.datetime | None:
        """The time at which the oldest open dead letter was stored. Muted errors are
        ignored."""
        found = (place.oldest_dead for place in self._places if place.oldest_dead)
        return min(found, default=None)

    @property
    def overdue(self) -> int:
        """How many messages, deadlines of flows and recurring messages are overdue."""
        waiting = (self.outbox, self.parked, self.queued, *self.deadlines.values())
        return sum(one.overdue for one in waiting) + len(self.late_ticks)

    @property
    def unattended(self) -> list[str]:
        """The stages that are declared here but run in no live process."""
        declared = [place.name for place in self.stages.values() if place.known]
        return self.attendance.unattended(declared)

    @property
    def unrelayed(self) -> dict[str, Waiting]:
        """The services that have overdue messages in the outbox, but no running
        relay."""
        relayed = self.attendance.relayed_services
        return {
            name: waiting
            for name, waiting in self.services.items()
            if name and waiting.overdue and name not in relayed
        }

    @property
    def _places(self) -> list[Place]:
        return [*self.stages.values(), *self.destinations.values()]


def read(*aliases: str, brief: bool = False, sessions: bool = False) -> Status:
    """Return the complete state of these databases, by default of all databases in use,
    and of the embedded broker's queues in other databases. Reading takes about a dozen
    queries for each database in use. Workers and paused stages are read only from the
    database to which Django routes their models.

    If `brief` is True, return the live workers only, and of each place only the first
    waiting row and the blocked messages. If `sessions` is True, also count the sessions
    that were given up."""
    home = router.db_for_write(OutboxMessage)
    now = clock(home)
    read_workers = attendance.read_living if brief else attendance.read
    present = read_workers(router.db_for_write(Worker), now)
    status = Status(now, list(aliases) or databases.with_tables(), present)
    if not aliases:
        status.with_only_queues = databases.with_only_queues()
    states = StageState.objects.using(router.db_for_write(StageState))
    paused = list(states.exclude(paused_at=None))
    names = {state.stage for state in paused}
    for declared in all_stages():
        using = databases.of_stage(declared)
        _place(status.stages, declared.name, using or home)
    for using in [*status.databases, *status.with_only_queues]:
        try:
            if using in status.databases:
                _read_waiting(status, using, names, brief=brief)
                if brief:
                    status.stuck_undos += runs.stuck(using).total()
                else:
                    _read_more(status, using)
                if sessions:
                    records = SessionRecord.objects.db_manager(using)
                    status.sessions_given_up += records.given_up(dt.timedelta(days=1))
            _read_queues(status, using, names, brief=brief)
            if databases.is_read_only(using, aliases):
                status.read_only.append(using)
        except AnyDatabaseError as error:
            if using == home:
                raise
            status.unreadable[using] = str(error).strip()
    _find_consumers(status)
    for state in paused:
        places = [one for one in status.stages.values() if one.name == state.stage]
        for place in places or [_place(status.stages, state.stage, home)]:
            place.paused_at, place.paused_by = state.paused_at, state.paused_by
            place.paused_why = state.paused_why
    known = {declared.name for declared in all_stages()}
    serving = status.attendance.serving
    for place in status.stages.values():
        place.known = place.name in known
        place.workers = serving[place.name]
    return status


def _read_waiting(
    status: Status, using: str, paused: Collection[str], *, brief: bool
) -> None:
    """Add the messages that wait in one database to `status`, except its queues."""
    most = 0 if brief else None
    for waiting in in_outbox(using, most=most):
        place = _place(status.destinations, waiting.name, using)
        place.waiting = total([place.waiting, waiting])
        service = status.services.get(waiting.service, Waiting())
        status.services[waiting.service] = total([service, waiting])
    running = status.attendance.running_long
    for waiting in in_inbox(using, paused, running, most=most):
        _place(status.stages, waiting.name, using).waiting = waiting
    for name, newer in for_newer_code(using, most=0 if brief else CAP).items():
        place = _place(status.stages, name, using)
        place.newer = newer
        place.waiting = total(
            [place.waiting, Waiting(newer.count, retried=newer.count)]
        )
    for name, line in turns.lines(using, paused).items():
        _place(status.stages, name, using).line = line
        if line.held and not brief:
            status.held_keys += turns.held(using, [name])
    for state in StageState.objects.using(using).exclude(full_since=None):
        _place(status.stages, state.stage, using).full_since = state.full_since
    for waiting in for_deadlines(using, most=most):
        status.deadlines[labelled(waiting.name, using)] = waiting
    status.late_ticks += schedule.late(using, status.now)


def _read_more(status: Status, using: str) -> None:
    """Add the last activity, the dead letters and the runs in one database to
    `status`."""
    for name, (last, broker) in last_dispatched(using).items():
        place = _place(status.destinations, name, using)
        place.last, place.broker = last, broker
    for name, last, processing, critical in last_processed(using):
        place = _place(status.stages, name, using)
        place.last, place.processing, place.critical = last, processing, critical
    for (series, name), last in periods.last_active(using, status.now).items():
        places = {"dispatched": status.destinations, "processed": status.stages}
        if series in places and name:
            place = _place(places[series], name, using)
            if place.last is None or last - place.last > PERIOD:
                place.last = last  # its rows are not among the newest
    for one in dead.by_error(using):
        if one.stage:
            place = _place(status.stages, one.stage, using)
        else:
            place = _place(status.destinations, one.destination, using)
        if one.muted:
            place.muted += one.count
            continue
        status.errors.append((using, one))
        place.dead += one.count
        place.oldest_dead = min(filter(None, (place.oldest_dead, one.first)))
    status.runs += runs.read(using)


def last_dispatched(using: str) -> dict[str, tuple[dt.datetime | None, str]]:
    """Return the time and the broker of the last dispatch to each destination, from the
    newest rows."""
    rows = OutboxMessage.objects.using(using).order_by("-pk")
    newest = rows.values_list("destination", "dispatched_at", "broker")[:NEWEST]
    # The last one of a destination remains.
    ordered = sorted(newest, key=lambda row: (row[1] is not None, row[1]))
    return {name: (last, broker) for name, last, broker in ordered}


def last_processed(
    using: str,
) -> list[tuple[str, dt.datetime | None, float | None, float | None]]:
    """Return, for each stage in the newest rows, when it last processed a message. Also
    return the 95th percentiles of its processing time and of its critical time, in
    seconds."""
    rows = InboxMessage.objects.using(using).order_by("-pk")
    columns = ("stage", "processed_at", "started_at", "created_at")
    times: dict[str, list[Any]] = {}
    for stage, *instants in rows.values_list(*columns)[:NEWEST]:
        times.setdefault(stage, []).append(instants)
    return [
        (
            stage,
            max((processed for processed, _, _ in found if processed), default=None),
            _p95((p - s).total_seconds() for p, s, _ in found if p and s),
            _p95((p - c).total_seconds() for p, _, c in found if p and c),
        )
        for stage, found in sorted(times.items())
    ]


def _p95(values: Iterable[float]) -> float | None:
    """Return the smallest value that at least 95 % of the values do not exceed."""
    ordered = sorted(values)
    return ordered[math.ceil(0.95 * len(ordered)) - 1] if ordered else None


def _read_queues(
    status: Status, using: str, paused: Collection[str], *, brief: bool
) -> None:
    """Add the queues and subscriptions in one database to `status`."""
    own = own_queues() if using in status.with_only_queues else None
    most = 0 if brief else None
    for waiting in in_queues(using, held_queues(paused), own, most=most):
        status.queues[labelled(waiting.name, using)] = waiting
    if not brief:
        status.subscriptions += subscriptions.read(using, status.attendance.living)


def _find_consumers(status: Status) -> None:
    """Record which stages here consume each destination. Also record the destinations
    that have recently received messages and have no known consumer, each with a
    suggestion: the similar name of a destination that a stage here consumes, or "". The
    sender may have misspelt that name.

    TXMSG["KNOWN_DESTINATIONS"] names the destinations with consumers elsewhere. If this
    setting is empty, only names that look misspelt are recorded.
    """
    consumers: dict[str, list[str]] = {}
    for declared in all_stages():
        consumers.setdefault(declared.destination, []).append(declared.name)
    here = {_letters(name): name for name in consumers}
    known = conf.get().KNOWN_DESTINATIONS
    for place in sorted(status.destinations.values(), key=lambda one: one.name):
        place.consumers = consumers.get(place.name, [])
        broker = find_broker(place.broker) if place.broker else None
        if place.consumers or wire.is_control(place.name) or place.last is None:
            continue
        if status.now - place.last > RECENT or (broker and not broker.consumable):
            continue
        meant = here.get(_letters(place.name), "")
        if any(fnmatchcase(place.name, one) for one in known):
            continue
        if known or meant:
            status.unconsumed[place.name] = meant


def consumers_of_queues() -> dict[str, list[str]]:
    """Map each queue to the names of the stages declared here that consume it. The
    queues have the names that they would have on the embedded broker."""
    found: dict[str, list[str]] = {}
    for one in all_stages():
        queue = queue_name(one.destination, one.subscriber)
        found.setdefault(queue, []).append(one.name)
    return found


def own_queues() -> set[str]:
    """Return the queues that this service consumes. In a database with only queues, the
    service does not judge other queues: it does not know which of their stages are
    paused, and the services that consume them report what is overdue."""
    return {*consumers_of_queues(), wire.control_destination(conf.get().SERVICE)}


def held_queues(paused: Collection[str]) -> set[str]:
    """Return the queues whose stages are all paused."""
    return {
        queue
        for queue, stages in consumers_of_queues().items()
        if all(name in paused for name in stages)
    }


def labelled(name: str, database: str) -> str:
    """Return the name of a place. If the place is outside the outbox's database, add
    the database's alias."""
    home = router.db_for_write(OutboxMessage)
    return name if database == home else f"{name} in {database}"


def _place(places: dict[str, Place], name: str, database: str) -> Place:
    return places.setdefault(labelled(name, database), Place(name, database))
