"""The overview page (alarms, waiting and dead messages, charts, live processes) and
the navigation bar of every page."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from django.http import HttpRequest
from django.urls import NoReverseMatch

from .. import conf
from ..flows.declaration import declarations
from ..monitoring import alarms, periods, status
from ..monitoring.alarms import Alarm
from ..monitoring.status import Place
from ..scheduling.timetable import recurring
from . import changes
from .base import address, may

_LISTS = (
    ("outboxmessage", "Outbox"),
    ("inboxmessage", "Inbox"),
    ("deadletter", "Dead letters"),
    ("bulkoperation", "Bulk operations"),
    ("stagestate", "Stages"),
    ("schedule", "Recurring"),
    ("run", "Flows"),
    ("worker", "Workers"),
    ("alert", "Alerts"),
    ("auditentry", "Audit"),
)

#: The charts by series: the title, and the table that the user must be allowed to see.
_CHARTS = {
    "stored": ("Stored", "outboxmessage"),
    "dispatched": ("Dispatched", "outboxmessage"),
    "processed": ("Processed", "inboxmessage"),
    "dead": ("Died", "deadletter"),
}


def pages(request: HttpRequest) -> list[tuple[str, str, bool]]:
    """Return the entries of the navigation bar for this user: the title, the address,
    and whether the page is shown now. A page has an entry if it exists on this admin
    site, is used in this project, and may be seen by the user."""
    first = address(request, "admin:app_list", "django_txmsg")
    used = {
        "schedule": recurring() or may(request, "make_schedule"),
        "run": declarations(),
        "alert": conf.get().ALERTS.KINDS,
    }
    shown = [
        (title, f"{name}_changelist")
        for name, title in _LISTS
        if may(request, f"view_{name}") and used.get(name, True)
    ]
    shown += [("What changed", "changes")] * bool(changes.seen(request))
    found = {"Overview": first}
    for title, name in (*shown, ("May I?", "may")):
        with suppress(NoReverseMatch):  # a site of the project's own may lack it
            found[title] = address(request, f"admin:django_txmsg_{name}")
    # Pages lie below others, and all lie below the overview.
    below = [to for to in found.values() if to != first and request.path.startswith(to)]
    here = max(below, key=len, default=request.path)
    return [(title, to, to == here) for title, to in found.items()]


def overview(request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the overview. It contains only what the user may
    see."""
    picture = status.read()
    answering = [one for one in picture.databases if one not in picture.unreadable]
    hours = periods.last_day(picture.now, *answering)
    charts = [
        {
            "series": series,
            "title": title,
            "total": sum(hour.counts[series] for hour in hours),
            "peak": max(hour.counts[series] for hour in hours),
            "bars": [(hour.start, hour.counts[series]) for hour in hours],
        }
        for series, (title, table) in _CHARTS.items()
        if may(request, f"view_{table}")
    ]
    found = alarms.of(picture)
    raised = [one for one in found if may(request, f"view_{one.table}")]
    consumed = status.consumers_of_queues()
    return {
        "status": picture,
        "now": picture.now,
        "charts": charts,
        "totals": {one["series"]: one["total"] for one in charts},
        "alarms": [(one, _address(request, one)) for one in raised],
        "well": not found,
        "bad": any(one.tone == "bad" for one in raised),
        "destinations": _in_order(picture.destinations),
        "stages": _in_order(picture.stages),
        "queues": [
            (label, waiting, consumed.get(waiting.name, []))
            for label, waiting in sorted(
                picture.queues.items(), key=lambda one: (-one[1].overdue, one[0])
            )
        ],
        "living": {worker.pk for worker in picture.attendance.living},
    }


def _address(request: HttpRequest, alarm: Alarm) -> str:
    if alarm.query.startswith("#"):
        return alarm.query
    page = f"admin:django_txmsg_{alarm.table}_changelist"
    return f"{address(request, page)}{alarm.query}"


def _in_order(places: dict[str, Place]) -> list[Place]:
    """Return the places, worst first."""
    return sorted(
        places.values(), key=lambda one: (-one.waiting.overdue, -one.dead, one.name)
    )
