"""The health view, for load balancers and uptime checks.

It returns ages and numbers, never contents. `late`: a message has been due for 2
minutes, a key of an ordered stage is blocked, or a process could not use a broker, a
destination, a subscription or a database for 2 minutes. `degraded`: due for 10 minutes,
or a stage has no consumer, receives nothing, or has waited for newer code for longer
than a deployment takes. `stuck`: due for 30 minutes. Only `stuck`, and a database that
does not answer, give a 503: messages held back by a deployment or an operator take no
process out of service.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from django.db import DatabaseError, InterfaceError, connections, router
from django.http import HttpRequest, JsonResponse

from .models import OutboxMessage, StageState
from .models.fields import now_sql, read_instant
from .monitoring import attendance, outages, turns
from .monitoring.probe import probe
from .monitoring.status import held_queues
from .monitoring.waiting import CAP, DEPLOYED, OVERDUE
from .rules import inbox, outbox
from .stages import all_stages

#: The states, each with the age of the oldest due message from which it applies.
THRESHOLDS = (
    ("stuck", dt.timedelta(minutes=30)),
    ("degraded", dt.timedelta(minutes=10)),
    ("late", OVERDUE),
)

#: The states from best to worst.
STATES = ("ok", "late", "degraded", "stuck")


@dataclass(frozen=True)
class Health:
    """Ages of due messages by place, and live processes by kind."""

    oldest: dict[str, dt.timedelta]
    workers: dict[str, int]
    unattended: bool
    ordered: dict[str, int]
    """For ordered stages: messages that wait for their predecessors, blocked keys, and
    stages that receive nothing."""
    needs_newer_code: dt.timedelta | None
    """How long the first message has waited for code that can read it."""
    outages: int = 0
    """How many resources live processes could not use for two minutes or more."""

    @property
    def state(self) -> str:
        """The overall state: ok, late, degraded or stuck."""
        words = [state_of(max(self.oldest.values()))]
        if self.ordered["held_keys"] or self.outages:
            words.append("late")
        behind = self.needs_newer_code is not None and self.needs_newer_code > DEPLOYED
        if behind or self.unattended or self.ordered["full_stages"]:
            words.append("degraded")
        return max(words, key=STATES.index)


@probe
def health(request: HttpRequest) -> JsonResponse:
    """Return how long the oldest due message has waited, and which processes run.

    With `?fail=late` or `?fail=degraded`, that state already gives a 503. With
    `?fail=never` the answer is always a 200.
    """
    least = request.GET.get("fail")
    never = least == "never"
    try:
        found = look(router.db_for_read(OutboxMessage))
    except (DatabaseError, InterfaceError):
        return JsonResponse({"status": "no database"}, status=200 if never else 503)
    failing = STATES.index(least if least in ("late", "degraded") else "stuck")
    answer: dict[str, Any] = {
        "status": found.state,
        "oldest": {
            name: round(age.total_seconds(), 1) for name, age in found.oldest.items()
        },
        "workers": found.workers,
    }
    if found.outages:
        answer["outages"] = found.outages
    if any(found.ordered.values()) or any(one.ordered for one in all_stages()):
        answer["ordered"] = found.ordered
    if found.needs_newer_code is not None:
        answer["needs_newer_code"] = round(found.needs_newer_code.total_seconds(), 1)
    return JsonResponse(
        answer,
        status=200 if never or STATES.index(found.state) < failing else 503,
    )


def look(using: str) -> Health:
    """Read the state from the database, in four statements."""
    states = StageState.objects.db_manager(using)
    held = states.exclude(paused_at=None, full_since=None)
    known = list(held.values_list("stage", "paused_at", "full_since"))
    paused = {stage for stage, since, _ in known if since is not None}
    now, oldest, newer = _oldest(using, paused)
    present = attendance.read_living(using, now)
    kinds = Counter(one.kind for one in present.living)
    lines = turns.lines(using).values()
    return Health(
        oldest,
        {kind: kinds[kind] for kind in ("relay", "consumer")},
        bool(present.unattended([one.name for one in all_stages()])),
        {
            "waiting": min(sum(line.count for line in lines), CAP),
            "held_keys": sum(line.held for line in lines),
            "full_stages": sum(since is not None for _, _, since in known),
        },
        newer,
        len(outages.late(outages.read(present.living), now)),
    )


def _oldest(
    using: str, paused: Collection[str]
) -> tuple[dt.datetime, dict[str, dt.timedelta], dt.timedelta | None]:
    """Return the database's clock, how long the oldest due messages have been due, and
    how long the first has waited for newer code."""
    connection = connections[using]
    held = sorted(held_queues(paused))
    sql = f"""
        SELECT {now_sql(connection)},
          (SELECT due_at FROM django_txmsg_outboxmessage
           WHERE {outbox.PENDING.sql()} ORDER BY due_at, id LIMIT 1),
          (SELECT MIN(due_at) FROM django_txmsg_inboxmessage
           WHERE {(inbox.PARKED & ~inbox.HELD_BACK).sql()}),
          (SELECT MIN(available_at) FROM (
             SELECT available_at FROM django_txmsg_queuemessage
             WHERE 1 = 1{_but("queue", held)} ORDER BY id LIMIT {CAP}) AS first),
          (SELECT MIN(first_received_at) FROM (
             SELECT first_received_at FROM django_txmsg_inboxmessage
             WHERE {inbox.NEEDS_NEWER_CODE.sql()} LIMIT {CAP}) AS newer)
    """  # noqa: S608 - constants only
    with connection.cursor() as cursor:
        cursor.execute(sql, held)
        now, *oldest, newer = (read_instant(value) for value in cursor.fetchone())
    assert now is not None
    ages = {
        name: max(now - due, dt.timedelta()) if due else dt.timedelta()
        for name, due in zip(("outbox", "redelivery", "queue"), oldest, strict=True)
    }
    return now, ages, newer and now - newer


def _but(column: str, names: Collection[str]) -> str:
    return f" AND {column} NOT IN ({', '.join(['%s'] * len(names))})" if names else ""


def state_of(age: dt.timedelta) -> str:
    """Return the state for an age: ok, late, degraded or stuck."""
    for name, threshold in THRESHOLDS:
        if age >= threshold:
            return name
    return "ok"
