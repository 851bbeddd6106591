"""The latest activity of destinations, stages and operators. Only the newest rows are
read."""

from __future__ import annotations

import datetime as dt
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from django.db.models import Model

from ..models import InboxMessage, OutboxMessage

#: Number of rows that are read to find the last activity of each destination and stage.
RECENT = 2_000


def values(using: str, model: type[Model], column: str) -> Counter[str]:
    """Count how often each value of a column occurs in the newest RECENT rows of a
    table."""
    return Counter(value for (value,) in _newest(using, model, column))


def last_dispatched(using: str) -> dict[str, tuple[dt.datetime | None, str]]:
    """Return the time and the broker of the last dispatch to each destination, from the
    newest rows."""
    rows = _newest(using, OutboxMessage, "destination", "dispatched_at", "broker")
    # The last one of a destination remains.
    ordered = sorted(rows, key=lambda row: (row[1] is not None, row[1]))
    return {name: (last, broker) for name, last, broker in ordered}


def last_processed(
    using: str,
) -> list[tuple[str, dt.datetime | None, float | None, float | None]]:
    """Return, for each stage in the newest rows, when it last processed a message. Also
    return the 95th percentiles of its processing time and of its critical time, in
    seconds."""
    columns = ("stage", "processed_at", "started_at", "created_at")
    times: dict[str, list[Any]] = {}
    for stage, *instants in _newest(using, InboxMessage, *columns):
        times.setdefault(stage, []).append(instants)
    return [
        (
            stage,
            max((processed for processed, _, _ in found if processed), default=None),
            _p95((p - s).total_seconds() for p, s, _ in found if p and s),
            _p95((p - c).total_seconds() for p, _, c in found if p and c),
        )
        for stage, found in sorted(times.items())
    ]


def _newest(using: str, model: type[Model], *columns: str) -> Any:
    rows = model._default_manager.using(using).order_by("-pk")
    return rows.values_list(*columns)[:RECENT]


def _p95(values: Iterable[float]) -> float | None:
    """Return the smallest value that at least 95 % of the values do not exceed."""
    ordered = sorted(values)
    return ordered[math.ceil(0.95 * len(ordered)) - 1] if ordered else None
