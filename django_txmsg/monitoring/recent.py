"""The latest activity of destinations, stages and operators. Only the newest rows are
read."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterable
from typing import Any

from django.db import connections

from ..models.fields import query, read_instant

#: Number of rows that are read to find the last activity of each destination and stage.
RECENT = 2_000


def values(using: str, table: str, column: str) -> dict[str, int]:
    """Count how often each value of a column occurs in the newest RECENT rows of a
    table."""
    connection = connections[using]
    table, column = map(connection.ops.quote_name, (table, column))
    rows = query(
        using,
        f"SELECT {column}, COUNT(*) FROM (SELECT {column} FROM {table}"  # noqa: S608 - names of the models only
        f" ORDER BY id DESC LIMIT %s) AS newest GROUP BY {column}",
        [RECENT],
    )
    return dict(rows)


def last_dispatched(using: str) -> dict[str, tuple[dt.datetime | None, str]]:
    """Return the time and the broker of the last dispatch to each destination, from the
    newest rows."""
    rows = query(
        using,
        "SELECT destination, MAX(dispatched_at), broker FROM ("
        " SELECT destination, dispatched_at, broker FROM django_txmsg_outboxmessage"
        " ORDER BY id DESC LIMIT %s) AS newest GROUP BY destination, broker"
        " ORDER BY MAX(dispatched_at) NULLS FIRST",
        [RECENT],
    )
    # The last one of a destination remains.
    return {name: (read_instant(last), broker) for name, last, broker in rows}


def last_processed(
    using: str,
) -> list[tuple[str, dt.datetime | None, float | None, float | None]]:
    """Return, for each stage in the newest rows, when it last processed a message. Also
    return the 95th percentiles of its processing time and of its critical time, in
    seconds."""
    rows = query(
        using,
        "SELECT stage, processed_at, started_at, created_at"
        " FROM django_txmsg_inboxmessage ORDER BY id DESC LIMIT %s",
        [RECENT],
    )
    times: dict[str, list[tuple[Any, Any, Any]]] = {}
    for stage, *instants in rows:
        processed, started, created = map(read_instant, instants)
        times.setdefault(stage, []).append((processed, started, created))
    return [
        (
            stage,
            max((processed for processed, _, _ in found if processed), default=None),
            _p95((p - s).total_seconds() for p, s, _ in found if p and s),
            _p95((p - c).total_seconds() for p, _, c in found if p and c),
        )
        for stage, found in sorted(times.items())
    ]


def _p95(values: Iterable[float]) -> float | None:
    """Return the smallest value that at least 95 % of the values do not exceed."""
    ordered = sorted(values)
    return ordered[math.ceil(0.95 * len(ordered)) - 1] if ordered else None
