"""The worker processes, by their heartbeats, and the stages that no process runs."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from .. import conf
from ..models import Worker
from ..models.worker import living
from . import outages

#: Most processes that are read: those with the latest heartbeats.
MOST = 1_000

#: Most seconds by which a replacement may start before the process it replaces ends.
REPLACED = dt.timedelta(minutes=10)


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
    def relayed(self) -> bool:
        """Whether a relay of this service is running."""
        own = {"", conf.get().SERVICE}  # "": of an earlier release
        return any(one.kind == "relay" and one.service in own for one in self.living)

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
            for name in set(one.stages) - outages.refused(one, self.now)
        )

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
