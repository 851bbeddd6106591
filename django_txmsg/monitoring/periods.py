"""Counts messages that were stored, dispatched, processed or buried in the last 24
hours.

`relay` and `consume` count each finished period only once, and store the count
(`PeriodCount`). Readers count only the rows after the last stored period, and write
nothing. So reading stays cheap after a day with millions of messages.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from django.db.models import Count, F, Max, Model, Q, Sum
from django.db.models.functions import TruncMinute

from ..models import DeadLetter, InboxMessage, OutboxMessage, PeriodCount
from ..models.fields import clock
from ..models.monitoring import PERIOD
from ..scheduling.time_loop import TimeLoop

#: The rows of each series, the column with their instant, and that of their place.
_SERIES: dict[str, tuple[type[Model], str, str]] = {
    "stored": (OutboxMessage, "created_at", "destination"),
    "dispatched": (OutboxMessage, "dispatched_at", "destination"),
    "processed": (InboxMessage, "processed_at", "stage"),
    "dead": (DeadLetter, "created_at", "stage"),
}
SERIES = tuple(_SERIES)

#: A period is final when a transaction that began in it has had this long to commit.
GRACE = dt.timedelta(minutes=5)

HOURS = 24
_HOUR, _EPOCH = dt.timedelta(hours=1), dt.datetime.fromtimestamp(0, dt.timezone.utc)

#: What this process has counted of finished periods that no worker has stored, by
#: database: from when, until when, and the counts. Without workers, each look would
#: count the whole day again.
_unstored: dict[
    str, tuple[dt.datetime, dt.datetime, Counter[tuple[dt.datetime, str]]]
] = {}


@dataclass
class Hour:
    """The counts of one hour, by series."""

    start: dt.datetime
    counts: Counter[str] = field(default_factory=Counter)


def last_day(now: dt.datetime, *aliases: str) -> list[Hour]:
    """Return the last 24 hours in all of these databases, oldest first. The last one is
    the current hour."""
    first = _first_hour(now)
    hours = [Hour(first + n * _HOUR) for n in range(HOURS)]
    found: Counter[tuple[dt.datetime, str]] = Counter()
    for using in aliases:
        counted, open_since = _remembered(using, first)
        found.update(counted)
        found.update(_not_remembered(using, open_since, now))
    for (start, series), count in found.items():
        index = (start - first) // _HOUR
        if 0 <= index < HOURS:
            hours[index].counts[series] += count
    return hours


def _not_remembered(
    using: str, since: dt.datetime, now: dt.datetime
) -> Counter[tuple[dt.datetime, str]]:
    """Count the messages of all periods that begin at or after `since`, and return the
    counts by period and series. (The counts of earlier periods are stored in the
    database.) The counts of finished periods are cached in this process."""
    known: Counter[tuple[dt.datetime, str]] = Counter()
    begin, end, counts = _unstored.get(using, (now, now, known))
    if begin <= since < end <= now:  # `end` is later if the clock was ahead
        known.update({key: n for key, n in counts.items() if key[0] >= since})
    else:
        end = since
    found = known.copy()
    final = max(end, _period(now - GRACE))
    for (start, series, _), count in _count(using, end).items():
        found[start, series] += count
        if start < final:
            known[start, series] += count
    _unstored[using] = (since, final, known)
    return found


def remember(using: str, now: dt.datetime) -> None:
    """Find the finished periods of the last 24 hours that have no `PeriodCount` rows
    yet. Count the messages of each such period, and store the counts."""
    counts = PeriodCount.objects.using(using)
    # A clock that was ahead has counted periods that have not ended.
    ahead = Q(start__gt=now - PERIOD - GRACE)
    counts.filter(ahead | Q(start__lt=now - dt.timedelta(days=8))).delete()
    start = _open_since(using, _first_hour(now))
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
    counts.bulk_create(closed, ignore_conflicts=True)


def _first_hour(now: dt.datetime) -> dt.datetime:
    now = now.astimezone(dt.timezone.utc)
    return now - (now - _EPOCH) % _HOUR - (HOURS - 1) * _HOUR


def _remembered(
    using: str, first: dt.datetime
) -> tuple[dict[tuple[dt.datetime, str], int], dt.datetime]:
    """Return the stored counts of all periods before the first period without a stored
    count. Also return the start of that period. The caller must count the rows from
    then on."""
    open_since = _open_since(using, first)
    totals = (
        PeriodCount.objects.using(using)
        .filter(start__gte=first, start__lt=open_since)
        .values("start", "series")
        .annotate(total=Sum("count"))
        .values_list("start", "series", "total")
    )
    return {(start, series): count for start, series, count in totals}, open_since


def _open_since(using: str, first: dt.datetime) -> dt.datetime:
    """Return the start of the first period at or after `first` that is not stored. Only
    the rows that mark a period as counted are read."""
    marks = PeriodCount.objects.using(using).filter(
        start__gte=first, series=SERIES[0], place=""
    )
    starts = set(marks.values_list("start", flat=True))
    while first in starts:
        first += PERIOD
    return first


def last_active(using: str, now: dt.datetime) -> dict[tuple[str, str], dt.datetime]:
    """Return the end of the last stored period with a message in the past 24 hours, for
    each series and place. The newest period may not be stored yet."""
    active: Any = (
        PeriodCount.objects.using(using)
        .filter(start__gte=now - HOURS * _HOUR, count__gt=0)
        .values("series", "place")
        .annotate(last=Max("start"))
        .values_list("series", "place", "last")
    )
    return {(series, place): last + PERIOD for series, place, last in active}


def _count(using: str, since: dt.datetime) -> Counter[tuple[dt.datetime, str, str]]:
    found: Counter[tuple[dt.datetime, str, str]] = Counter()
    for series, (model, column, place) in _SERIES.items():
        rows = model._default_manager.using(using).filter(**{f"{column}__gte": since})
        if series == "processed":
            # By columns with an index: one of `processed_at` would cost each message
            # its HOT update. A message that was processed within an hour has no
            # `late_at`.
            hour = since - _HOUR
            rows = rows.filter(Q(last_received_at__gte=hour) | Q(late_at__gte=hour))
        counted: Any = (
            rows.order_by()
            .values(place=F(place))
            .annotate(minute=TruncMinute(column, tzinfo=dt.timezone.utc))
            .values("minute", "place")
            .annotate(count=Count("pk"))
            .values_list("minute", "place", "count")
        )
        for minute, where, count in counted:
            found[_period(minute), series, where] += count
    return found


def _period(instant: dt.datetime) -> dt.datetime:
    return instant - (instant - _EPOCH) % PERIOD


class Charts(TimeLoop):
    """Counts each finished period, so that the chart need not wait for it later."""

    refused = "the charts are not updated"

    def first(self) -> float:
        """Return the seconds until the first period may be finished."""
        return PERIOD.total_seconds()

    def _keep(self, using: str) -> float:
        remember(using, clock(using))
        return PERIOD.total_seconds()
