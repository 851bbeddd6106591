"""The overview page: alarms, waiting and dead messages, charts, and live processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.db import router
from django.http import HttpRequest

from ..models import OutboxMessage
from ..monitoring import alarms, periods, status
from ..monitoring.alarms import Alarm
from ..monitoring.periods import Hour
from ..monitoring.status import Place
from .addresses import address

BAR, GAP, HEIGHT = 8, 2, 44

#: Up to this number, idle places are listed; more are folded.
FEW = 8

#: The charts by series: the title, and the table that the user must be allowed to see.
_CHARTS = {
    "stored": ("Stored", "outboxmessage"),
    "dispatched": ("Dispatched", "outboxmessage"),
    "processed": ("Processed", "inboxmessage"),
    "dead": ("Died", "deadletter"),
}


@dataclass
class Bar:
    """One bar of a chart, for one hour."""

    x: int
    y: float
    height: float
    title: str


@dataclass
class Chart:
    """A bar chart of one series over the last 24 hours, drawn as inline SVG."""

    series: str
    title: str
    total: int
    peak: int
    bars: list[Bar]
    width: int = 24 * (BAR + GAP)
    height: int = HEIGHT
    bar: int = BAR


def overview(request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the overview. It contains only what the user may
    see."""
    using = router.db_for_write(OutboxMessage)
    picture = status.read()
    hours = periods.last_day(using, picture.now)
    charts = [
        chart(series, title, hours)
        for series, (title, table) in _CHARTS.items()
        if _may_see(request, table)
    ]
    found = alarms.of(picture)
    raised = [one for one in found if _may_see(request, one.table)]
    consumed = status.consumers_of_queues()
    return {
        "status": picture,
        "now": picture.now,
        "charts": charts,
        "totals": {one.series: one.total for one in charts},
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


def _may_see(request: HttpRequest, table: str) -> bool:
    return request.user.has_perm(f"django_txmsg.view_{table}")


def _address(request: HttpRequest, alarm: Alarm) -> str:
    if alarm.query.startswith("#"):
        return alarm.query
    page = f"admin:django_txmsg_{alarm.table}_changelist"
    return f"{address(request, page)}{alarm.query}"


def _in_order(places: dict[str, Place]) -> tuple[list[Place], list[Place]]:
    """Return two lists of places: busy places, worst first, and idle places. If only a
    few places are idle, put all places into the first list."""
    ordered = sorted(
        places.values(), key=lambda one: (-one.waiting.overdue, -one.dead, one.name)
    )
    busy = [one for one in ordered if _matters(one)]
    quiet = [one for one in ordered if not _matters(one)]
    return (busy, quiet) if len(quiet) > FEW else (ordered, [])


def _matters(place: Place) -> bool:
    waits = place.waiting.count or place.line.count
    return bool(waits or place.dead or place.muted or place.paused_at)


def chart(series: str, title: str, hours: list[Hour]) -> Chart:
    """Return the chart of one series."""
    counts = [hour.counts[series] for hour in hours]
    peak = max(counts, default=0)
    bars = []
    for index, (hour, count) in enumerate(zip(hours, counts, strict=True)):
        # Any nonzero value is visible, however small beside the peak.
        height = max(2.0, HEIGHT * count / peak) if count else 0.0
        x, y = index * (BAR + GAP), round(HEIGHT - height, 1)
        said = f"{hour.start:%H:%M} UTC: {count:,} {title.lower()}"
        bars.append(Bar(x, y, round(height, 1), said))
    return Chart(series, title, sum(counts), peak, bars)
