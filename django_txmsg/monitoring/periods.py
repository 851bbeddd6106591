"""How many messages were stored, dispatched, processed and buried in the last 24 hours.

`relay` and `consume` aggregate finished periods once and store them (`PeriodCount`).
Only later rows are counted live, so that a day of millions of messages costs little.
Readers write nothing.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from django.db.models import Count, F, Max, Q, Sum
from django.db.models.functions import TruncMinute

from ..models import DeadLetter, InboxMessage, OutboxMessage, PeriodCount
from ..models.monitoring import PERIOD

SERIES = ("stored", "dispatched", "processed", "dead")

#: A period is final when a transaction that began in it has had this long to commit.
GRACE = dt.timedelta(minutes=5)

HOURS = 24


@dataclass
class Hour:
    """One hour, counted by series."""

    start: dt.datetime
    counts: Counter[str] = field(default_factory=Counter)


def last_day(using: str, now: dt.datetime) -> list[Hour]:
    """Return the last 24 hours, oldest first; the last one has not ended yet."""
    first = _first_hour(now)
    hours = [Hour(first + dt.timedelta(hours=n)) for n in range(HOURS)]
    counted, open_since = _remembered(using, first)
    live = _count(using, open_since)
    found = [*counted.items()]
    found += [((start, series), count) for (start, series, _), count in live.items()]
    for (start, series), count in found:
        index = int((start - first).total_seconds() // 3600)
        if 0 <= index < HOURS:
            hours[index].counts[series] += count
    return hours


def remember(using: str, now: dt.datetime) -> None:
    """Aggregate finished periods of the last 24 hours that have no `PeriodCount` row
    yet."""
    _, start = _remembered(using, _first_hour(now))
    if start + PERIOD + GRACE > now:
        return
    live = _count(using, start)
    closed = []
    while start + PERIOD + GRACE <= now:
        closed.append(PeriodCount(start=start, series=SERIES[0], count=0))
        start += PERIOD
    closed += [
        PeriodCount(start=begin, series=series, place=place, count=count)
        for (begin, series, place), count in live.items()
        if begin < start
    ]
    counts = PeriodCount.objects.using(using)
    counts.bulk_create(closed, ignore_conflicts=True)
    counts.filter(start__lt=now - dt.timedelta(days=8)).delete()


def _first_hour(now: dt.datetime) -> dt.datetime:
    this_hour = now.astimezone(dt.timezone.utc).replace(
        minute=0, second=0, microsecond=0
    )
    return this_hour - dt.timedelta(hours=HOURS - 1)


def _remembered(
    using: str, first: dt.datetime
) -> tuple[dict[tuple[dt.datetime, str], int], dt.datetime]:
    """Return the stored periods without a gap, and from when on rows must be
    counted."""
    counts: dict[tuple[dt.datetime, str], int] = {}
    starts = set()
    for start, series, count in (
        PeriodCount.objects.using(using)
        .filter(start__gte=first)
        .values("start", "series")
        .annotate(total=Sum("count"))
        .values_list("start", "series", "total")
    ):
        counts[start, series] = count
        starts.add(start)
    open_since = first
    while open_since in starts:
        open_since += PERIOD
    return {key: n for key, n in counts.items() if key[0] < open_since}, open_since


def last_active(using: str, now: dt.datetime) -> dict[tuple[str, str], dt.datetime]:
    """Return when each place was last active in the last 24 hours, by series and place:
    the end of its latest stored period with a message."""
    active: Any = (
        PeriodCount.objects.using(using)
        .filter(start__gte=now - dt.timedelta(hours=HOURS), count__gt=0)
        .values("series", "place")
        .annotate(last=Max("start"))
        .values_list("series", "place", "last")
    )
    return {(series, place): last + PERIOD for series, place, last in active}


def _count(using: str, since: dt.datetime) -> Counter[tuple[dt.datetime, str, str]]:
    found: Counter[tuple[dt.datetime, str, str]] = Counter()
    # By the last receipt, which has an index. An hour is longer than redelivery waits.
    received = Q(last_received_at__gte=since - dt.timedelta(hours=1))
    for series, model, column, place, narrow in (
        ("stored", OutboxMessage, "created_at", "destination", Q()),
        ("dispatched", OutboxMessage, "dispatched_at", "destination", Q()),
        ("processed", InboxMessage, "processed_at", "stage", received),
        ("dead", DeadLetter, "created_at", "stage", Q()),
    ):
        rows: Any = (
            model._default_manager.using(using)
            .filter(narrow, **{f"{column}__gte": since})
            .values(minute=TruncMinute(column, tzinfo=dt.timezone.utc), place=F(place))
            .annotate(count=Count("pk"))
            .order_by()
            .values_list("minute", "place", "count")
        )
        for minute, where, count in rows:
            found[_period(minute), series, where] += count
    return found


def _period(instant: dt.datetime) -> dt.datetime:
    return instant - dt.timedelta(
        minutes=instant.minute % (PERIOD.seconds // 60),
        seconds=instant.second,
        microseconds=instant.microsecond,
    )
