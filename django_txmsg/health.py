"""The health view, for load balancers and uptime checks. It returns ages and numbers,
never contents.

- `late`: a message has been due for 2 minutes, a recurring message was not stored for 2
  minutes, a key of an ordered stage is blocked, or a process could not use a broker, a
  destination, a subscription or a database for 2 minutes.
- `degraded`: a message has been due for 10 minutes, a database is read-only, a run of a
  flow is stuck at an undo, a stage has no consumer or receives nothing, or a message
  has waited for newer code for longer than a deployment takes.
- `stuck`: a message has been due for 30 minutes, or a database in use, or the
  embedded broker's, does not answer.

By default only `stuck` gives a 503. The cause of `late` and `degraded` may be a
deployment or an operator, so the process must stay in service.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from django.db import DatabaseError, InterfaceError, router
from django.http import HttpRequest, JsonResponse

from .models import OutboxMessage, StageState, Worker
from .models.fields import clock
from .monitoring import (
    attendance,
    databases,
    outages,
    presence,
    runs,
    schedule,
    turns,
    waiting,
)
from .monitoring.probe import probe
from .monitoring.status import held_queues, own_queues
from .monitoring.waiting import DEPLOYED, OVERDUE
from .stages import all_stages

#: The states, each with the age of the oldest due message from which it applies.
THRESHOLDS = (
    ("stuck", dt.timedelta(minutes=30)),
    ("degraded", dt.timedelta(minutes=10)),
    ("late", OVERDUE),
)

#: Where messages, and runs of flows, wait until they are due.
PLACES = ("outbox", "redelivery", "queue", "deadline")

#: The states from best to worst.
STATES = ("ok", "late", "degraded", "stuck")


@dataclass
class Health:
    """The state of the messages and processes: how long messages of each kind have been
    due, how many relays and consumers are alive, and further numbers."""

    workers: dict[str, int]
    unattended: bool
    outages: int
    """How many resources live processes could not use for two minutes or more."""
    oldest: dict[str, dt.timedelta]
    ordered: dict[str, int]
    """For ordered stages: messages that wait for their predecessors, blocked keys, and
    stages that receive nothing."""
    needs_newer_code: dt.timedelta | None = None
    """How long the first message has waited for code that can read it."""
    stuck_undos: int = 0
    """How many runs of flows are stuck at an undo."""
    late_ticks: int = 0
    """How many recurring messages were not stored when they were due."""
    databases: dict[str, dt.timedelta | None] = field(default_factory=dict)
    """The age of the oldest due message in each database; None: it does not answer."""
    read_only: list[str] = field(default_factory=list)
    """The databases that refuse writes."""

    @property
    def state(self) -> str:
        """The overall state: ok, late, degraded or stuck."""
        oldest = max(self.oldest.values())
        words = ["ok", *(name for name, least in THRESHOLDS if oldest >= least)]
        if self.ordered["held_keys"] or self.outages or self.late_ticks:
            words.append("late")
        behind = self.needs_newer_code is not None and self.needs_newer_code > DEPLOYED
        full = self.ordered["full_stages"]
        blocked = full or self.stuck_undos or self.read_only
        if behind or self.unattended or blocked:
            words.append("degraded")
        if None in self.databases.values():
            words.append("stuck")
        return max(words, key=STATES.index)


@probe
def health(request: HttpRequest) -> JsonResponse:
    """Answer with the overall state, the age of the oldest due message of each kind
    (outbox, redelivery, queue, deadline), and the number of live processes.

    By default, the response has the status 503 only in the state `stuck`. With
    `?fail=degraded`, it has the status 503 in the states `degraded` and `stuck`; with
    `?fail=late`, in every state except `ok`. With `?fail=never`, the status is always
    200. This is useful for monitoring that reads the state from the response.
    """
    least = request.GET.get("fail", "stuck")
    failing = 503 if least != "never" else 200
    try:
        found = look()
    except (DatabaseError, InterfaceError):
        return JsonResponse({"status": "no database"}, status=failing)
    answer: dict[str, Any] = {
        "status": found.state,
        "oldest": {name: _seconds(age) for name, age in found.oldest.items()},
        "workers": found.workers,
    }
    if len(found.databases) > 1:
        answer["databases"] = {
            name: "no answer" if age is None else _seconds(age)
            for name, age in found.databases.items()
        }
    for name in ("read_only", "outages", "stuck_undos", "late_ticks"):
        if value := getattr(found, name):
            answer[name] = value
    if any(found.ordered.values()) or any(one.ordered for one in all_stages()):
        answer["ordered"] = found.ordered
    if found.needs_newer_code is not None:
        answer["needs_newer_code"] = _seconds(found.needs_newer_code)
    bound = STATES.index(least if least in ("late", "degraded") else "stuck")
    fails = STATES.index(found.state) >= bound
    return JsonResponse(answer, status=failing if fails else 200)


def look(*aliases: str) -> Health:
    """Query these databases, and return their health. By default, query all databases
    in use, and the embedded broker's queues in other databases."""
    home = router.db_for_write(OutboxMessage)
    now = clock(home)
    paused = StageState.objects.db_manager(router.db_for_write(StageState)).paused()
    present = attendance.read_living(router.db_for_write(Worker), now)
    kinds, held = Counter(one.kind for one in present.living), held_queues(paused)
    found = Health(
        workers={kind: kinds[kind] for kind in ("relay", "consumer")},
        unattended=bool(present.unattended([one.name for one in all_stages()])),
        outages=len(outages.late(outages.read(present.living), now)),
        oldest=dict.fromkeys(PLACES, dt.timedelta()),
        ordered=dict.fromkeys(("waiting", "held_keys", "full_stages"), 0),
    )
    in_use = aliases or databases.with_tables()
    more = () if aliases else databases.with_only_queues()
    for using in [*in_use, *more]:
        try:
            own = None if using in in_use else own_queues()
            oldest = {"queue": _age(now, waiting.in_queues(using, held, own, most=0))}
            if using in in_use:
                oldest |= _oldest(using, now, paused, presence.running_long(present))
                _count(found, using, now, paused)
            if databases.is_read_only(using, aliases):
                found.read_only.append(using)
        except (DatabaseError, InterfaceError):
            if using == home:
                raise
            found.databases[using] = None
            continue
        found.databases[using] = max(oldest.values())
        for name, age in oldest.items():
            found.oldest[name] = max(age, found.oldest[name])
    return found


def _count(
    found: Health, using: str, now: dt.datetime, paused: Collection[str]
) -> None:
    """Add the further numbers of a database in use to `found`."""
    lines = turns.lines(using, paused).values()
    found.ordered["waiting"] += sum(line.count for line in lines)
    found.ordered["held_keys"] += sum(line.held for line in lines)
    full = StageState.objects.using(using).exclude(full_since=None).count()
    found.ordered["full_stages"] += full
    for one in waiting.for_newer_code(using, most=0).values():
        if one.since:
            longest = found.needs_newer_code or dt.timedelta()
            found.needs_newer_code = max(now - one.since, longest)
    found.late_ticks += len(schedule.late(using, now))
    found.stuck_undos += sum(runs.stuck(using).values())


def _oldest(
    using: str,
    now: dt.datetime,
    paused: Collection[str],
    running: Collection[tuple[str, uuid.UUID]],
) -> dict[str, dt.timedelta]:
    """Return the age of the oldest due message in the outbox, the inbox and the
    deadlines. Reads only the first row of each destination or stage."""
    rows = {
        "outbox": waiting.in_outbox(using, most=0),
        "redelivery": waiting.in_inbox(using, paused, running, most=0),
        "deadline": waiting.for_deadlines(using, most=0),
    }
    return {name: _age(now, places) for name, places in rows.items()}


def _age(now: dt.datetime, places: Collection[waiting.Waiting]) -> dt.timedelta:
    """Return the age of the oldest due message of these places."""
    ages = (now - one.oldest_due for one in places if one.oldest_due)
    return max(ages, default=dt.timedelta())


def _seconds(age: dt.timedelta) -> float:
    return round(age.total_seconds(), 1)
