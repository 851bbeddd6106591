"""The database's side of the archive: it selects the rows to archive, and deletes them
after verification.

Plain SQL for PostgreSQL and SQLite. The log of the lake is the ledger: batch n is entry
n of the log. For each table and lake, a mark in the database records the last settled
batch. Batches up to `purged_through` are settled: their rows are only in the lake. The
transaction that deletes a batch's rows advances the mark.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import pyarrow as pa

from .connection import Connection, Held, connect_plain, held
from .databases import open_database, read_rows
from .errors import EnvironmentFault
from .rowhash import postgres_sql, row_hashes
from .schemas import Column, Table
from .spec import SourceSpec

#: Most bytes of bodies in a batch, exceeded by at most one row.
BATCH_BYTES = 1 << 30
_MARKS = "django_txmsg_archivemark"


#: What identifies a row: its id, and its message (and stage). The id alone does not: a
#: restored database assigns ids again, and two databases assign the same.
Row = tuple[int, str]


def whose(rows: pa.RecordBatch) -> list[str]:
    """Return the message id of each row. If the table has the column `stage`, append
    the stage to the id."""
    messages: list[str] = rows.column("message_id").to_pylist()
    if (place := rows.schema.get_field_index("stage")) < 0:
        return messages
    stages = rows.column(place).to_pylist()
    return [f"{one}/{stage}" for one, stage in zip(messages, stages, strict=True)]


@dataclass(frozen=True)
class Batch:
    """A range of settled rows in one table. The range is stored as one log entry, whose
    number is `number`."""

    number: int
    first_id: int
    last_id: int
    cutoff: dt.datetime
    #: The SQL condition for its rows.
    where: str
    #: The unique part of its files' names. No other attempt has it.
    token: str


@dataclass(frozen=True)
class Horizon:
    """The rows that may be archived: those that were settled before `cutoff`.

    On PostgreSQL, no open transaction may have begun before they changed. All
    transactions of the cluster below `oldest` have ended. `next` is not assigned yet. A
    row with an id of `next` or more was restored from a dump of another cluster, so no
    transaction of this cluster has changed it."""

    cutoff: dt.datetime
    oldest: int = 0
    next: int = 0


@dataclass(frozen=True)
class Mark:
    """The last settled batch of one table in one lake."""

    lake_id: str
    lake: str
    purged_through: int
    begun_through: int
    rows: int


def marks_in(connection: Connection) -> dict[str, list[Mark]]:
    """Return the marks of a database, by the name of the archived table."""
    found: dict[str, list[Mark]] = {}
    for source, lake_id, *values in connection.rows(
        "SELECT source, lake_id, lake, purged_through, begun_through, rows"
        f" FROM {_MARKS} ORDER BY id"
    ):
        mark = Mark(str(uuid.UUID(str(lake_id))), *values)
        found.setdefault(source, []).append(mark)
    return found


class Ledger:
    """One table in the database of one service, with a separate connection."""

    def __init__(self, spec: SourceSpec, table: Table) -> None:
        self.spec, self.table = spec, table
        self.connection = connect_plain(spec)
        self.database = open_database(spec)

    def close(self) -> None:
        """Close the connection, which also releases the lock."""
        self.connection.close()

    def marks(self) -> list[Mark]:
        """Return the marks of all lakes into which this table has been archived."""
        return marks_in(self.connection).get(self.table.name, [])

    def place(self, lake_id: str, lake: str, purged_through: int) -> Mark:
        """Store this mark of a lake in the database, whatever the mark was before, and
        return the mark."""
        self.connection.execute(
            f"INSERT INTO {_MARKS} (source, lake_id, lake, purged_through,"
            " begun_through, rows, changed_at) VALUES (%s, %s, %s, %s, %s, 0, %s)"
            " ON CONFLICT (source, lake_id) DO UPDATE SET lake = excluded.lake,"
            " purged_through = excluded.purged_through,"
            " begun_through = excluded.begun_through, changed_at = excluded.changed_at",
            self.table.name, uuid.UUID(lake_id), lake, purged_through, purged_through,
            self.connection.clock(),
        )  # fmt: skip
        return next(one for one in self.marks() if one.lake_id == lake_id)

    def begin(self, lake_id: str, number: int) -> None:
        """Record that batches up to `number` are being written into a lake. Until these
        batches are settled, their rows must not be written into another lake."""
        self.connection.execute(
            f"UPDATE {_MARKS} SET begun_through = %s WHERE source = %s"
            " AND lake_id = %s AND begun_through < %s",
            number, self.table.name, uuid.UUID(lake_id), number,
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
            after, after, after, rows, connection.clock(), self.table.name,
            uuid.UUID(lake_id), before,
        )  # fmt: skip
        if changed != 1:
            raise EnvironmentFault(
                f"Another archiver of {self.table.name} has gone past batch {before}: "
                "this one has lost its lock, and has deleted nothing more. Run again."
            )

    def horizon(self, older_than: dt.timedelta) -> Horizon:
        """Return the present horizon for rows that must be older than `older_than`."""
        if self.spec.vendor == "sqlite":
            return Horizon(self.connection.clock() - older_than)
        now, oldest, following = self.connection.rows(
            "SELECT now(), pg_snapshot_xmin(s)::text::bigint,"
            " pg_snapshot_xmax(s)::text::bigint FROM pg_current_snapshot() AS s"
        )[0]
        return Horizon(now - older_than, oldest, following)

    def waiting(self, horizon: Horizon) -> int:
        """Return the number of rows that can be archived now."""
        where = self._settled(horizon)
        sql = f"SELECT count(*) FROM {self.table.relation} t WHERE {where}"
        return int(self.connection.value(sql))

    def held(self, horizon: Horizon) -> Held:
        """Return the open transaction that keeps settled rows from being archived, and
        how many rows wait for its end. Returns `Held(0)` if no row waits."""
        if not (horizon.next and self.table.tracked):
            return Held(0)
        rows = self.connection.value(
            f"SELECT count(*) FROM {self.table.relation} t WHERE"
            f" {self._settled(Horizon(horizon.cutoff))} AND t.changed_xid >="
            f" '{horizon.oldest}'::xid8 AND t.changed_xid < '{horizon.next}'::xid8"
        )
        return held(self.connection, rows)

    def plan(
        self, number: int, after: int, rows: int, horizon: Horizon
    ) -> Batch | None:
        """Select the next batch: up to `rows` rows with ids above `after`, and at most
        about BATCH_BYTES bytes. Returns None if there are no rows."""
        where = self._settled(horizon)
        heavy = [one.sql for one in self.table.columns if one.kind == "bytes"]
        size = " + ".join(f"length({name})" for name in heavy) or "0"
        first, last = self.connection.rows(
            "SELECT min(id), max(id) FROM (SELECT id, size, sum(size) OVER (ORDER BY"
            f" id) AS total FROM (SELECT t.id, {size} AS size FROM"
            f" {self.table.relation} t WHERE t.id > %s AND {where} ORDER BY t.id"
            " LIMIT %s) AS chosen) AS measured WHERE total - size < %s",
            after, rows, BATCH_BYTES,
        )[0]  # fmt: skip
        if first is None:
            return None
        members = f"t.id BETWEEN {first} AND {last} AND {where}"
        return Batch(number, first, last, horizon.cutoff, members, str(uuid.uuid4()))

    def purge(
        self,
        batch: Batch,
        sums: tuple[int, int],
        columns: Sequence[Column],
        advance: Callable[[Connection], None],
    ) -> bool:
        """Delete a batch's rows, and call `advance` for the mark, in one transaction.
        Returns True if the number and the checksum of the deleted rows equal `sums`.
        Otherwise the transaction is rolled back, and False is returned. On PostgreSQL,
        several purges may run at the same time, each with its own connection."""
        with (
            suppress(Different),
            connect_plain(self.spec) as connection,
            connection.transaction(),
        ):
            rows, checksum = connection.rows(
                f"WITH gone AS (DELETE FROM {self.table.relation} AS t WHERE"
                f" {batch.where} RETURNING {postgres_sql(columns)} AS hash)"
                " SELECT count(*), coalesce(sum(hash), 0) FROM gone"
            )[0]
            if (int(rows), int(checksum)) != sums:
                raise Different
            advance(connection)
            return True
        return False

    def settle(
        self, archived: pa.RecordBatch, columns: Sequence[Column]
    ) -> tuple[int, list[Row]]:
        """Delete each row that equals its copy in the lake. Checksums are compared row
        by row. Returns the number of deleted rows, and the rows that differ from their
        copies. A row is skipped if the database no longer has it, or if the row with
        this id now belongs to another message or stage."""
        ids = archived.column("id").to_pylist()
        rows = zip(ids, whose(archived), strict=True)
        copies = dict(zip(rows, row_hashes(archived, columns), strict=True))
        with self.connection.transaction():
            found = self._found(f"t.id IN ({', '.join(map(str, ids))})", columns)
            there = copies.keys() & found.keys()
            equal = {one for one in there if found[one] == (copies[one], True)}
            if equal:
                gone = ", ".join(str(row) for row, _ in equal)
                self.connection.execute(
                    f"DELETE FROM {self.table.relation} WHERE id IN ({gone})"
                )
        return len(equal), sorted(there - equal)

    def _found(
        self, where: str, columns: Sequence[Column]
    ) -> dict[Row, tuple[int, bool]]:
        """Return the checksums of rows, and whether they are settled. No other session
        can change the settled rows before the transaction ends."""
        settled = self._settled(Horizon(self.connection.clock()))
        rows = f"FROM {self.table.relation} AS t WHERE {where}"
        postgresql = self.spec.vendor == "postgresql"
        # Another row may be locked for as long as its handler runs.
        lock = " FOR UPDATE OF t" if postgresql else ""
        ended = self.connection.rows(f"SELECT t.id {rows} AND {settled}{lock}")
        may_go = {row for (row,) in ended}
        if postgresql:
            message = f"{self.table.column('message_id').sql}::text"
            if any(one.name == "stage" for one in columns):
                message += " || '/' || t.stage"
            known = self.connection.rows(
                f"SELECT t.id, {message}, {postgres_sql(columns)} {rows}"
            )
            return {(row, whom): (value, row in may_go) for row, whom, value in known}
        found: dict[Row, tuple[int, bool]] = {}
        for part in read_rows(self.connection.raw, self.table, columns, where):
            values = row_hashes(part, columns)
            part_ids = part.column("id").to_pylist()
            for row, whom, value in zip(part_ids, whose(part), values, strict=True):
                found[row, whom] = value, row in may_go
        return found

    def vacuum(self) -> None:
        """Reclaim the space of deleted rows on PostgreSQL, if this role owns the
        table."""
        if self.spec.vendor == "postgresql":
            self.connection.forget(f"VACUUM (ANALYZE) {self.table.relation}")

    def _settled(self, horizon: Horizon) -> str:
        literal = self.database.instant(horizon.cutoff, upper=False)
        where = f"({self.table.settled.sql('t', cutoff=literal)})"
        if horizon.next and self.table.tracked:
            where += (
                " AND (t.changed_xid IS NULL OR t.changed_xid <"
                f" '{horizon.oldest}'::xid8 OR t.changed_xid >="
                f" '{horizon.next}'::xid8)"
            )
        return where


class Different(Exception):
    """The rows to delete differ from their copies in the lake. Raised to roll the
    transaction back."""
