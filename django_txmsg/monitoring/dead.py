"""Counts open dead letters by place and error.

The admin, `message_status`, the metrics and the alarms get their counts only from this
module.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from dataclasses import dataclass

from django.db import connections

from ..models.fields import query, read_instant, sql_of
from ..rules import dead_letters


@dataclass(frozen=True)
class Dead:
    """The open dead letters of one place that have the same error and reason."""

    stage: str
    destination: str
    fingerprint: str
    reason: str
    count: int
    first: dt.datetime
    last: dt.datetime
    #: The primary key of the newest one.
    example: int
    #: The highest number of deaths of one of them.
    deaths: int
    #: Whether the error is muted, and not more of it are open than its mute allows.
    muted: bool

    @property
    def place(self) -> str:
        """Where these messages died."""
        return place(self.stage, self.destination, self.reason)


def place(stage: str, destination: str, reason: str) -> str:
    """Return the stage that gave up a message. Without a stage, return the relay that
    could not send it, or the broker that has dead-lettered it."""
    received = reason in ("broker", dead_letters.BODY_TOO_LONG)
    without = "broker of" if received else "relay to"
    return stage or f"{without} {destination}"


def by_error(using: str) -> list[Dead]:
    """Return all open dead letters, grouped by place, error and reason. The query reads
    only an index, so a million dead letters take about a second on PostgreSQL."""
    found = query(
        using,
        "SELECT found.*, note.id IS NOT NULL, note.muted_above FROM ("  # noqa: S608 - constants only
        "SELECT stage, destination, fingerprint, reason, COUNT(*) AS number,"
        " MIN(created_at), MAX(created_at), MAX(id), MAX(deaths)"
        " FROM django_txmsg_deadletter"
        f" WHERE {dead_letters.OPEN.sql()}"
        " GROUP BY stage, destination, fingerprint, reason) AS found"
        " LEFT JOIN django_txmsg_failurenote note"
        " ON note.fingerprint = found.fingerprint"
        f" AND {dead_letters.MUTED.sql('note', now=sql_of(connections[using]).now)}"
        " ORDER BY number DESC, stage, destination, found.fingerprint, reason",
    )
    totals: Counter[str] = Counter()
    for row in found:
        totals[row[2]] += row[4]
    return [
        Dead(
            stage, destination, fingerprint, reason, count, read_instant(first),
            read_instant(last), example, deaths,
            bool(muted) and (above is None or totals[fingerprint] <= above),
        )
        for (
            stage, destination, fingerprint, reason, count, first, last, example,
            deaths, muted, above,
        ) in found
    ]  # fmt: skip
