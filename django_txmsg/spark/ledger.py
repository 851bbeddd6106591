"""The database's side of the archive: it selects the rows to archive, and deletes them
after verification.

Plain SQL for PostgreSQL and SQLite. A mark (`marks`) records the last settled batch of
a lake. The transaction that deletes rows also advances the mark.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass

import pyarrow as pa

from .connection import Connection, Held, connect_plain, held
from .databases import open_database, read_rows
from .lock import archiving
from .marks import Marks
from .rowhash import postgres_sql, row_hashes
from .schemas import Column, Table
from .spec import SourceSpec

#: Most bytes of bodies in a batch, exceeded by at most one row.
BATCH_BYTES = 1 << 30


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
    where: str
    """The SQL condition for its rows."""
    token: str
    """The unique part of its files' names. No other attempt has it."""


@dataclass(frozen=True)
class Horizon:
    """Two transaction ids of a PostgreSQL cluster. All transactions below `oldest` have
    ended. `next` is not assigned yet. A row with an id of `next` or more was restored
    from a dump of another cluster, so no transaction of this cluster has changed it."""

    oldest: int
    next: int


class Ledger:
    """One table in the database of one service, with a separate connection."""

    def __init__(self, spec: SourceSpec, table: Table) -> None:
        self.spec, self.table = spec, table
        self.connection = connect_plain(spec)
        self.database = open_database(spec)
        self.marks = Marks(self.connection, table.name)

    def close(self) -> None:
        """Close the connection, which also releases the lock."""
        self.connection.close()

    def lock(self) -> AbstractContextManager[None]:
        """Hold the archive lock of this table while the block runs. Raises
        EnvironmentFault, without waiting, if another archiver holds the lock."""
        return archiving(self.connection, self.spec, self.table.name)

    def clock(self) -> tuple[dt.datetime, Horizon | None]:
        """Return the current time of the database and, on PostgreSQL, the horizon."""
        if self.spec.vendor == "sqlite":
            return self.connection.clock(), None
        now, oldest, following = self.connection.rows(
            "SELECT now(), pg_snapshot_xmin(s)::text::bigint,"
            " pg_snapshot_xmax(s)::text::bigint FROM pg_current_snapshot() AS s"
        )[0]
        return now, Horizon(oldest, following)

    def waiting(self, cutoff: dt.datetime, horizon: Horizon | None) -> int:
        """Return the number of rows that can be archived now."""
        where = self._settled(cutoff, horizon)
        sql = f"SELECT count(*) FROM {self.table.relation} t WHERE {where}"
        return int(self.connection.value(sql))

    def held(self, cutoff: dt.datetime, horizon: Horizon | None) -> Held:
        """Return the open transaction that keeps settled rows from being archived, and
        how many rows wait for its end. Returns `Held(0)` if no row waits."""
        if horizon is None or not self.table.tracked:
            return Held(0)
        rows = self.connection.value(
            f"SELECT count(*) FROM {self.table.relation} t WHERE"
            f" {self._settled(cutoff, None)} AND t.changed_xid >="
            f" '{horizon.oldest}'::xid8 AND t.changed_xid < '{horizon.next}'::xid8"
        )
        return held(self.connection, rows)

    def plan(
        self,
        number: int,
        after: int,
        rows: int,
        cutoff: dt.datetime,
        horizon: Horizon | None,
    ) -> Batch | None:
        """Select the next batch: up to `rows` rows with ids above `after`, and at most
        about BATCH_BYTES bytes. Returns None if there are no rows."""
        where = self._settled(cutoff, horizon)
        heavy = [one.sql for one in self.table.columns if one.kind == "bytes"]
        length = "octet_length" if self.spec.vendor == "postgresql" else "length"
        size = " + ".join(f"{length}({name})" for name in heavy) or "0"
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
        return Batch(number, first, last, cutoff, members, str(uuid.uuid4()))

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
            closing(connect_plain(self.spec)) as connection,
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
        self, archived: pa.RecordBatch, hashes: Sequence[int], columns: Sequence[Column]
    ) -> tuple[int, list[Row]]:
        """Delete each row that equals its copy in the lake. Checksums are compared row
        by row. Returns the number of deleted rows, and the rows that differ from their
        copies. A row is skipped if the database no longer has it, or if the row with
        this id now belongs to another message or stage."""
        ids = archived.column("id").to_pylist()
        messages = whose(archived)
        if self.spec.vendor == "sqlite":
            return self._settle_sqlite(ids, messages, hashes, columns)
        settled = self._settled(self.clock()[0], None)
        message = f"{self.table.column('message_id').sql}::text"
        if any(one.name == "stage" for one in columns):
            message += " || '/' || t.stage"
        table = f"{self.table.relation} AS t"
        lake = (
            "unnest(%s::bigint[], %s::text[], %s::bigint[])"
            " AS l (lake_row, lake_message, lake_hash)"
        )
        same = f"t.id = lake_row AND {message} = lake_message"
        given = ids, messages, list(hashes)
        deleted = self.connection.execute(
            f"DELETE FROM {table} USING {lake} WHERE {same}"
            f" AND {postgres_sql(columns)} = lake_hash AND {settled}",
            *given,
        )
        # In one statement with the DELETE, this would return the rows that another
        # archiver deletes while the DELETE waits for it.
        living = self.connection.rows(
            f"SELECT t.id, {message} FROM {table} JOIN {lake} ON {same}", *given
        )
        return deleted, living

    def _settle_sqlite(
        self,
        ids: Sequence[int],
        messages: Sequence[str],
        hashes: Sequence[int],
        columns: Sequence[Column],
    ) -> tuple[int, list[Row]]:
        wanted = dict(zip(zip(ids, messages, strict=True), hashes, strict=True))
        within = f"t.id IN ({', '.join(map(str, ids))})"
        with self.connection.transaction():
            settled = self.connection.rows(
                f"SELECT t.id FROM {self.table.relation} AS t WHERE {within} AND "
                + self._settled(self.clock()[0], None)
            )
            may_go = {row for (row,) in settled}
            found: dict[Row, int] = {}
            for part in read_rows(self.connection.raw, self.table, columns, within):
                rows = zip(part.column("id").to_pylist(), whose(part), strict=True)
                found.update(zip(rows, row_hashes(part, columns), strict=True))
            there = wanted.keys() & found.keys()
            equal = {one for one in there if wanted[one] == found[one]}
            equal = {one for one in equal if one[0] in may_go}
            self.connection.execute(
                f"DELETE FROM {self.table.relation} WHERE id IN"
                f" ({', '.join(str(row) for row, _ in equal)})"
            )
        return len(equal), sorted(there - equal)

    def vacuum(self) -> None:
        """Reclaim the space of deleted rows on PostgreSQL, if this role owns the
        table."""
        if self.spec.vendor == "postgresql":
            self.connection.forget(f"VACUUM (ANALYZE) {self.table.relation}")

    def _settled(self, cutoff: dt.datetime, horizon: Horizon | None) -> str:
        literal = self.database.instant(cutoff, upper=False)
        where = f"({self.table.settled.sql('t', cutoff=literal)})"
        if horizon is not None and self.table.tracked:
            where += (
                " AND (t.changed_xid IS NULL OR t.changed_xid <"
                f" '{horizon.oldest}'::xid8 OR t.changed_xid >="
                f" '{horizon.next}'::xid8)"
            )
        return where


class Different(Exception):
    """The rows to delete differ from their copies in the lake. Raised to roll the
    transaction back."""
