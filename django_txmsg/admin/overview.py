"""The first page: is messaging well, what waits, what died, who works."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.db import router

from .. import periods, status
from ..models import OutboxMessage
from ..periods import Hour

BAR, GAP, HEIGHT = 8, 2, 44

_TITLES = {
    "stored": "Stored",
    "dispatched": "Dispatched",
    "processed": "Processed",
    "dead": "Died",
}


@dataclass
class Bar:
    """One hour's bar of a chart."""

    x: int
    y: float
    height: float
    title: str


@dataclass
class Chart:
    """One series of the last 24 hours, as bars of an inline SVG."""

    series: str
    title: str
    total: int
    peak: int
    bars: list[Bar]
    width: int = 24 * (BAR + GAP)
    height: int = HEIGHT
    bar: int = BAR


def overview() -> dict[str, Any]:
    """Return what the overview shows."""
    using = router.db_for_write(OutboxMessage)
    picture = status.read(using)
    hours = periods.last_day(using, picture.now)
    charts = [chart(series, hours) for series in periods.SERIES]
    return {
        "status": picture,
        "now": picture.now,
        "charts": charts,
        "totals": {one.series: one.total for one in charts},
        "destinations": sorted(
            picture.destinations.values(),
            key=lambda one: (-one.waiting.overdue, -one.dead, one.name),
        ),
        "stages": sorted(
            picture.stages.values(),
            key=lambda one: (-one.waiting.overdue, -one.dead, one.name),
        ),
        "queues": sorted(picture.queues.items()),
        "silent": {worker.pk for worker in picture.silent_workers},
    }


def chart(series: str, hours: list[Hour]) -> Chart:
    """Return the bars of one series."""
    counts = [hour.counts[series] for hour in hours]
    peak = max(counts, default=0)
    bars = []
    for index, (hour, count) in enumerate(zip(hours, counts, strict=True)):
        # Anything at all is to be seen, however small beside the peak.
        height = max(2.0, HEIGHT * count / peak) if count else 0.0
        title = f"{hour.start:%H:%M} UTC: {count:,} {_TITLES[series].lower()}"
        bars.append(
            Bar(index * (BAR + GAP), round(HEIGHT - height, 1), round(height, 1), title)
        )
    return Chart(series, _TITLES[series], sum(counts), peak, bars)
