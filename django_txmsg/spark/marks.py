"""Marks in the database: the last settled batch, for each table and lake.

The log of the lake is the ledger: batch n is entry n of the log. Batches up to
`purged_through` are settled: their rows are only in the lake. The transaction that
deletes a batch's rows advances the mark. Plain SQL on the table of `models.py`, for
PostgreSQL and SQLite.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from .connection import Connection
from .errors import EnvironmentFault

_MARKS = "django_txmsg_archivemark"


@dataclass(frozen=True)
class Mark:
    """The last settled batch of one table in one lake."""

    lake_id: str
    lake: str
    purged_through: int
    begun_through: int
    rows: int


class Marks:
    """The marks of one table. They are read and written through the connection of the
    table's archiver."""

    def __init__(self, connection: Connection, source: str) -> None:
        self.connection, self.source = connection, source

    def read(self) -> list[Mark]:
        """Return the marks of all lakes into which this table has been archived."""
        rows = self.connection.rows(
            "SELECT lake_id, lake, purged_through, begun_through, rows"
            f" FROM {_MARKS} WHERE source = %s ORDER BY id",
            self.source,
        )
        return [Mark(str(uuid.UUID(str(row[0]))), *row[1:]) for row in rows]

    def place(self, lake_id: str, lake: str, purged_through: int) -> Mark:
        """Store this mark of a lake in the database, whatever the mark was before, and
        return the mark."""
        self.connection.execute(
            f"INSERT INTO {_MARKS} (source, lake_id, lake, purged_through,"
            " begun_through, rows, changed_at) VALUES (%s, %s, %s, %s, %s, 0, %s)"
            " ON CONFLICT (source, lake_id) DO UPDATE SET lake = excluded.lake,"
            " purged_through = excluded.purged_through,"
            " begun_through = excluded.begun_through, changed_at = excluded.changed_at",
            self.source, uuid.UUID(lake_id), lake, purged_through, purged_through,
            self.connection.clock(),
        )  # fmt: skip
        return next(one for one in self.read() if one.lake_id == lake_id)

    def begin(self, lake_id: str, number: int) -> None:
        """Record that batches up to `number` are being written into a lake. Until these
        batches are settled, their rows must not be written into another lake."""
        self.connection.execute(
            f"UPDATE {_MARKS} SET begun_through = %s WHERE source = %s"
            " AND lake_id = %s AND begun_through < %s",
            number, self.source, uuid.UUID(lake_id), number,
        )  # fmt: skip

    def advance(
        self,
        lake_id: str,
        before: int,
        after: int,
        rows: int = 0,
        connection: Connection | None = None,
    ) -> None:
        """Advance the mark from batch `before` to batch `after`. Raises
        EnvironmentFault if the mark is not at `before`, because another archiver has
        advanced it."""
        connection = connection or self.connection
        changed = connection.execute(
            f"UPDATE {_MARKS} SET purged_through = %s, begun_through = CASE WHEN"
            " begun_through > %s THEN begun_through ELSE %s END, rows = rows + %s,"
            " changed_at = %s WHERE source = %s AND lake_id = %s"
            " AND purged_through = %s",
            after, after, after, rows, connection.clock(), self.source,
            uuid.UUID(lake_id), before,
        )  # fmt: skip
        if changed != 1:
            raise EnvironmentFault(
                f"Another archiver of {self.source} has gone past batch {before}: "
                "this one has lost its lock, and has deleted nothing more. Run again."
            )
