"""Finds rows that wait for an open transaction, and the session that holds this
transaction open."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from .connection import Connection


@dataclass(frozen=True)
class Held:
    """The number of rows that wait, the transaction that they wait for, and when that
    transaction began."""

    rows: int
    since: dt.datetime | None = None
    holder: str = ""

    @property
    def whom(self) -> str:
        """A text that names the session that holds the transaction open."""
        since = f", open since {self.since:%Y-%m-%d %H:%M:%S} UTC" if self.since else ""
        return f"{self.holder}{since}"

    @property
    def seconds(self) -> float:
        """How long the transaction has been open, in seconds. Infinite if this role may
        not see when the transaction began."""
        if not self.rows:
            return 0.0
        if self.since is None:
            return float("inf")
        return (dt.datetime.now(dt.timezone.utc) - self.since).total_seconds()


def held(connection: Connection, rows: int) -> Held:
    """Return the transaction for which `rows` rows wait. It is the oldest open
    transaction in the PostgreSQL cluster that has written anything. Every role can see
    that such a transaction exists. Returns Held(0) if the transaction has ended since
    the rows were counted."""
    if not rows:
        return Held(0)
    found = connection.rows(
        "SELECT xact_start, format('process %%s (%%s)', pid, concat_ws(', ', state,"
        " 'database ' || datname, 'user ' || usename)), age(backend_xid)"
        " FROM pg_stat_activity"
        " WHERE backend_xid IS NOT NULL UNION ALL"
        " SELECT prepared, format('prepared transaction %%s (database %%s)', gid,"
        " database), age(transaction) FROM pg_prepared_xacts"
        " ORDER BY 3 DESC LIMIT 1"
    )
    if not found:
        return Held(0)
    since, holder, _ = found[0]
    return Held(rows, since, holder)
