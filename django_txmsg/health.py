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
from collections import Counter
from typing import Any

from django.db import DatabaseError, InterfaceError
from django.http import HttpRequest, JsonResponse

from .monitoring import status
from .monitoring.probe import probe
from .monitoring.status import Status
from .monitoring.waiting import DEPLOYED, OVERDUE
from .stages import all_stages

#: The states, each with the age of the oldest due message from which it applies.
THRESHOLDS = (
    ("stuck", dt.timedelta(minutes=30)),
    ("degraded", dt.timedelta(minutes=10)),
    ("late", OVERDUE),
)

#: The states from best to worst.
STATES = ("ok", "late", "degraded", "stuck")


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
        answer = look()
    except (DatabaseError, InterfaceError):
        return JsonResponse({"status": "no database"}, status=failing)
    bound = STATES.index(least if least in ("late", "degraded") else "stuck")
    fails = STATES.index(answer["status"]) >= bound
    return JsonResponse(answer, status=failing if fails else 200)


def look(*aliases: str) -> dict[str, Any]:
    """Query these databases, and return the answer. By default, query all databases in
    use, and the embedded broker's queues in other databases. Only the first row of each
    destination, stage and queue is read."""
    found = status.read(*aliases, brief=True)
    now, places = found.now, found.stages.values()
    ages = _ages(found)
    oldest = {kind: max(by_database.values()) for kind, by_database in ages.items()}
    newer = [one.newer.since for one in places if one.newer and one.newer.since]
    ordered = {
        "waiting": sum(one.line.count for one in places),
        "held_keys": sum(one.line.held for one in places),
        "full_stages": sum(one.full_since is not None for one in places),
    }
    further = {
        "read_only": found.read_only,
        "outages": len(found.attendance.late_outages),
        "stuck_undos": found.stuck_undos,
        "late_ticks": len(found.late_ticks),
    }
    words = ["ok", *(name for name, age in THRESHOLDS if max(oldest.values()) >= age)]
    if ordered["held_keys"] or found.attendance.late_outages or found.late_ticks:
        words.append("late")
    blocked = ordered["full_stages"] or found.stuck_undos or found.read_only
    if found.unattended or blocked or (newer and now - min(newer) > DEPLOYED):
        words.append("degraded")
    if found.unreadable:
        words.append("stuck")
    kinds = Counter(one.kind for one in found.attendance.own)
    answer: dict[str, Any] = {
        "status": max(words, key=STATES.index),
        "oldest": {kind: _seconds(age) for kind, age in oldest.items()},
        "workers": {kind: kinds[kind] for kind in ("relay", "consumer")},
        **{name: value for name, value in further.items() if value},
    }
    if len(ages["queue"]) > 1:
        answer["databases"] = {
            using: "no answer"
            if using in found.unreadable
            else _seconds(max(one[using] for one in ages.values()))
            for using in ages["queue"]
        }
    if any(ordered.values()) or any(one.ordered for one in all_stages()):
        answer["ordered"] = ordered
    if newer:
        answer["needs_newer_code"] = _seconds(now - min(newer))
    return answer


def _ages(found: Status) -> dict[str, dict[str, dt.timedelta]]:
    """Return, for each kind of message, the age of the oldest due one in each
    database."""
    kinds = {
        "outbox": [(one.database, one.waiting) for one in found.destinations.values()],
        "redelivery": [(one.database, one.waiting) for one in found.stages.values()],
        "queue": [(one.database, one) for one in found.queues.values()],
        "deadline": [(one.database, one) for one in found.deadlines.values()],
    }
    databases = [*found.databases, *found.with_only_queues]
    ages = {kind: dict.fromkeys(databases, dt.timedelta()) for kind in kinds}
    for kind, places in kinds.items():
        for using, waiting in places:
            if waiting.oldest_due is not None:
                age = found.now - waiting.oldest_due
                ages[kind][using] = max(age, ages[kind][using])
    return ages


def _seconds(age: dt.timedelta) -> float:
    return round(age.total_seconds(), 1)
