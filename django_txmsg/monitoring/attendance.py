"""The worker processes: which of them live, which stages they run, and what they have
reported with their last heartbeats, outages and running handlers.

`presence.py` writes the rows of the processes. Readers leave out entries that they
cannot read, because another version of the code has written them.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .. import conf
from ..models import Worker
from ..models.worker import living
from ..runtime.breaker import SUBSCRIPTION
from .waiting import OVERDUE

#: Most processes that are read: those with the latest heartbeats.
MOST = 1_000

#: Most seconds by which a replacement may start before the process it replaces ends.
REPLACED = dt.timedelta(minutes=10)

#: A longer outage needs an operator's attention.
LATE = dt.timedelta(minutes=2)

#: What an entry that another version of the code has written may raise.
_UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, OverflowError)


@dataclass(frozen=True, slots=True)
class ReportedOutage:
    """A broker, destination, subscription or database that at least one live process
    cannot use."""

    kind: str
    name: str
    since: dt.datetime
    error: str
    processes: int = 1


@dataclass(frozen=True)
class RunningHandler:
    """A message that a handler was processing at the last heartbeat of its worker."""

    worker: Worker
    thread: str
    stage: str
    message_id: uuid.UUID
    attempt: int
    since: dt.datetime


@dataclass(frozen=True)
class Attendance:
    """The workers that the database knows, at the instant `now` of its clock."""

    now: dt.datetime
    workers: list[Worker]

    @property
    def living(self) -> list[Worker]:
        """The workers with a recent heartbeat."""
        return [one for one in self.workers if one.lives(self.now)]

    @property
    def lost(self) -> list[Worker]:
        """The silent workers that no other process has replaced.

        A replacement has the same kind and runs at least the same stages. It started
        after the silent worker, and not earlier than ten minutes (REPLACED) before the
        silent worker's last heartbeat. (In a rolling update, the two overlap.) Each
        process replaces only one worker.
        """
        missing = []
        younger = sorted(self.living, key=lambda one: one.started_at)
        for one in sorted(self.workers, key=lambda worker: worker.heartbeat_at):
            if one.lives(self.now):
                continue
            since = max(one.started_at, one.heartbeat_at - REPLACED)
            for other in younger:
                alike = other.kind == one.kind and set(other.stages) >= set(one.stages)
                if alike and other.started_at > since:
                    younger.remove(other)
                    break
            else:
                missing.append(one)
        return missing

    @property
    def own(self) -> list[Worker]:
        """The live workers of this service."""
        own = {"", conf.get().SERVICE}  # "": of an earlier release
        return [one for one in self.living if one.service in own]

    @property
    def relayed(self) -> bool:
        """Whether a relay of this service is running."""
        return any(one.kind == "relay" for one in self.own)

    @property
    def relayed_services(self) -> set[str]:
        """The services whose messages a running relay sends. Former names are included
        only for this service, because other services' settings are unknown here."""
        found = {one.service for one in self.living if one.kind == "relay"}
        return found | set(conf.get().FORMER_SERVICES if self.relayed else ())

    @property
    def consumed(self) -> bool:
        """Whether any consumer is running."""
        return any(one.kind == "consumer" for one in self.living)

    def consumes(self, service: str) -> bool:
        """Whether a consumer of this service is running. If `service` is "", any
        consumer counts. For our former name, our present consumers count."""
        found = {one.service for one in self.living if one.kind == "consumer"}
        ours = conf.get()
        renamed = {ours.SERVICE} if service in ours.FORMER_SERVICES else set()
        return bool(found & {"", service, *renamed} if service else found)

    @property
    def serving(self) -> Counter[str]:
        """The number of live processes that run each stage. A process does not count
        for a stage if the broker has refused its subscription for too long."""
        return Counter(
            name
            for one in self.living
            for name in set(one.stages) - _refused(one, self.now)
        )

    @property
    def outages(self) -> list[ReportedOutage]:
        """The outages of live processes, longest first."""
        return _outages(self.living)

    @property
    def late_outages(self) -> list[ReportedOutage]:
        """The outages that have lasted for at least two minutes."""
        return [one for one in self.outages if self.now - one.since >= LATE]

    @property
    def running(self) -> list[RunningHandler]:
        """The messages that handlers of live and of lost processes were processing,
        longest first."""
        found = [*_running(self.living), *_running(self.lost)]
        return sorted(found, key=lambda one: one.since)

    @property
    def running_long(self) -> set[tuple[str, uuid.UUID]]:
        """The messages that handlers of live processes have been processing for longer
        than OVERDUE, each with its stage: several stages may process one message of a
        topic."""
        return {
            (one.stage, one.message_id)
            for one in _running(self.living)
            if self.now - one.since > OVERDUE
        }

    def unattended(self, stages: Collection[str]) -> list[str]:
        """Return the given stages that no live process runs."""
        served = self.serving
        return sorted(name for name in stages if name not in served)


def read(using: str, now: dt.datetime) -> Attendance:
    """Return the workers with the latest heartbeats, at most MOST of them, in one
    query. This includes silent workers."""
    rows: Any = Worker.objects.using(using).order_by("-heartbeat_at")[:MOST]
    return Attendance(now, sorted(rows, key=lambda one: (one.kind, one.name)))


def read_living(using: str, now: dt.datetime) -> Attendance:
    """Return the live workers only."""
    rows = Worker.objects.using(using).filter(living())
    return Attendance(now, list(rows[:MOST]))


def _outages(workers: Iterable[Worker]) -> list[ReportedOutage]:
    """Return the outages of these processes, longest first. An outage that several
    processes report is returned once."""
    found: dict[tuple[str, str], ReportedOutage] = {}
    for worker in workers:
        for given in worker.outages or ():
            try:
                kind, name, error = (str(given[x]) for x in ("kind", "name", "error"))
                since = worker.heartbeat_at - dt.timedelta(seconds=given["seconds"])
            except _UNREADABLE:
                continue
            known = found.get((kind, name))
            count = 1 + (known.processes if known else 0)
            if known and known.since <= since:
                since, error = known.since, known.error
            found[kind, name] = ReportedOutage(kind, name, since, error, count)
    return sorted(found.values(), key=lambda one: (one.since, one.kind, one.name))


def _refused(worker: Worker, now: dt.datetime) -> set[str]:
    """Return the stages whose subscription the broker has refused to this process for
    at least two minutes."""
    late = Attendance(now, [worker]).late_outages
    return {one.name for one in late if one.kind == SUBSCRIPTION}


def _running(workers: Iterable[Worker]) -> Iterator[RunningHandler]:
    for worker in workers:
        for given in worker.running if isinstance(worker.running, list) else ():
            try:
                yield RunningHandler(
                    worker,
                    str(given["thread"]),
                    str(given["stage"]),
                    uuid.UUID(given["message"]),
                    int(given["attempt"]),
                    worker.heartbeat_at - dt.timedelta(seconds=given["seconds"]),
                )
            except _UNREADABLE:
                continue
