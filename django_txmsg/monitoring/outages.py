"""The outages of live processes: brokers, destinations, subscriptions and databases
that a process cannot use.

With each heartbeat, a process writes its outages into its row. The overview,
`message_status` and the health view read the outages through this module.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..models import Worker
from ..runtime.breaker import SUBSCRIPTION, Outage

#: A longer outage needs an operator's attention.
LATE = dt.timedelta(minutes=2)
#: Most outages that a process writes into its row.
MOST = 50


@dataclass(frozen=True, slots=True)
class Known:
    """An outage that at least one live process has reported."""

    kind: str
    name: str
    since: dt.datetime
    error: str
    processes: int = 1

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def as_json(outages: Sequence[Outage]) -> list[dict[str, Any]]:
    """Return outages as JSON for the worker's row. Each has its duration so far, in
    seconds.

    The time of the heartbeat comes from the database's clock. To get an outage's start
    time, the reader subtracts the duration from the time of the heartbeat.
    """
    return [
        {
            "kind": one.kind,
            "name": one.name,
            "seconds": round(one.seconds, 1),
            # PostgreSQL cannot store NUL.
            "error": one.error.replace("\0", ""),
        }
        for one in outages[:MOST]
    ]


def read(workers: Iterable[Worker]) -> list[Known]:
    """Return the outages of these processes, longest first. An outage that several
    processes report is returned once. Entries that cannot be read, because another
    version of the code has written them, are omitted."""
    found: dict[tuple[str, str], Known] = {}
    for worker in workers:
        for given in worker.outages or ():
            try:
                kind, name, error = (str(given[x]) for x in ("kind", "name", "error"))
                since = worker.heartbeat_at - dt.timedelta(seconds=given["seconds"])
            except (KeyError, TypeError, ValueError, OverflowError):
                continue
            known = found.get((kind, name))
            count = 1 + (known.processes if known else 0)
            if known and known.since <= since:
                since, error = known.since, known.error
            found[kind, name] = Known(kind, name, since, error, count)
    return sorted(found.values(), key=lambda one: (one.since, one.kind, one.name))


def refused(worker: Worker, now: dt.datetime) -> set[str]:
    """Return the stages whose subscription the broker has refused to this process for
    at least two minutes."""
    return {one.name for one in late(read([worker]), now) if one.kind == SUBSCRIPTION}


def late(outages: Iterable[Known], now: dt.datetime) -> list[Known]:
    """Return the outages that have lasted for at least two minutes."""
    return [one for one in outages if now - one.since >= LATE]
