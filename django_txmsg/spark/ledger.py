"""The archive's ledger: batches and their states, the lock, and the purge with proof.

Plain SQL on the tables of `models/archive.py`, for PostgreSQL and SQLite. Every change
of a batch's state is fenced by its attempt, so that an archiver that has lost its lock
without knowing changes nothing any more.
"""

from __future__ import annotations

import datetime as dt
import sqlite3
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from .connection import Connection, connect_plain
from .errors import EnvironmentFault, VerificationRefused
from .lock import archiving
from .rowhash import postgres_sql, row_hashes
from .schemas import Column, Table
from .source.database import open_database
from .source.sqlite import instant_text, read_rows
from .spec import SourceSpec

_BATCHES = "django_txmsg_archivebatch"
_FIELDS = (
    "id, first_id, last_id, cutoff, horizon, state, token, attempt, lake_version, rows,"
    " checksum"
)


@dataclass(frozen=True)
class Batch:
    """A frozen range of one table's settled rows."""

    id: int
    first_id: int
    last_id: int
    cutoff: dt.datetime
    horizon: int | None
    state: str
    token: str
    attempt: str
    lake_version: int | None
    rows: int
    checksum: str


class Ledger:
    """The batches of one table of one service, on a connection of its own."""

    def __init__(self, spec: SourceSpec, table: Table, lake: str, run_by: str) -> None:
        self.spec, self.table, self.lake, self.run_by = spec, table, lake, run_by
        self.connection = connect_plain(spec)
        self.database = open_database(spec)

    def close(self) -> None:
        """Close the connection, which also ends its lock."""
        self.connection.close()

    def lock(self) -> AbstractContextManager[None]:
        """Hold the archive of this table alone. Raises EnvironmentFault at once when
        another archiver holds it."""
        return archiving(self.connection, self.spec, self.table.name)

    def last_id(self) -> int:
        """Return the newest batch's id of this table, or 0."""
        found = self.connection.value(
            f"SELECT max(id) FROM {_BATCHES} WHERE source = %s", self.table.name
        )
        return int(found or 0)

    def unfinished(self) -> list[Batch]:
        """Return the batches that a run before has left, oldest first."""
        rows = self.connection.rows(
            f"SELECT {_FIELDS}, lake FROM {_BATCHES} WHERE source = %s"
            " AND state IN ('planned', 'committed', 'abandoning') ORDER BY id",
            self.table.name,
        )
        for row in rows:
            if row[-1] != self.lake:
                raise EnvironmentFault(
                    f"Batch {row[0]} of {self.table.name} is on its way into the lake "
                    f"{row[-1]}: finish it there before you archive into {self.lake}."
                )
        return [_batch(row[:-1]) for row in rows]

    def clock(self) -> tuple[dt.datetime, int | None]:
        """Return the database's present instant, and on PostgreSQL the transaction id
        below which every transaction has ended."""
        if self.spec.vendor == "sqlite":
            return self.clock_of(self.connection), None
        row = self.connection.rows(
            "SELECT now(), pg_snapshot_xmin(pg_current_snapshot())::text::bigint"
        )[0]
        return row[0], row[1]

    def members(self, batch: Batch) -> str:
        """Return the condition that makes a row a member of a batch."""
        return (
            f"t.id BETWEEN {batch.first_id} AND {batch.last_id} AND "
            + self._settled(batch.cutoff, batch.horizon)
        )

    def waiting(self, cutoff: dt.datetime, horizon: int | None) -> int:
        """Return how many rows an archive would take now."""
        where = self._settled(cutoff, horizon)
        found = self.connection.value(
            f"SELECT count(*) FROM {self.table.relation} t WHERE {where}"
        )
        return int(found)

    def plan(
        self, after: int, rows: int, cutoff: dt.datetime, horizon: int | None
    ) -> Batch | None:
        """Write down the next batch of at most `rows` rows with ids above `after`."""
        where = self._settled(cutoff, horizon)
        first, last = self.connection.rows(
            f"SELECT min(id), max(id) FROM (SELECT t.id FROM {self.table.relation} t"
            f" WHERE t.id > %s AND {where} ORDER BY t.id LIMIT %s) AS chosen",
            after, rows,
        )[0]  # fmt: skip
        if first is None:
            return None
        row = self.connection.rows(
            f"INSERT INTO {_BATCHES} (source, lake, first_id, last_id, cutoff, horizon,"
            " state, token, attempt, rows, checksum, run_by, error, started_at)"
            " VALUES (%s, %s, %s, %s, %s, %s, 'planned', %s, '', 0, '', %s, '', %s)"
            f" RETURNING {_FIELDS}",
            self.table.name, self.lake, first, last, self._parameter(cutoff), horizon,
            str(uuid.uuid4()), self.run_by, self._parameter(self.clock()[0]),
        )[0]  # fmt: skip
        return _batch(row)

    def begin(self, batch: Batch) -> Batch:
        """Start a new attempt at a planned batch: older ones are void from here on."""
        attempt = str(uuid.uuid4())
        self._change(batch, "planned", "attempt = %s", attempt, fenced=False)
        return replace(batch, attempt=attempt)

    def still_ours(self, batch: Batch) -> bool:
        """Whether no other archiver has taken this batch over."""
        return bool(
            self.connection.value(
                f"SELECT count(*) FROM {_BATCHES} WHERE id = %s AND attempt = %s"
                " AND state = 'planned'",
                batch.id,
                batch.attempt,
            )
        )

    def committed(self, batch: Batch, version: int, rows: int, checksum: str) -> Batch:
        """Record that the lake holds the batch, and the sums that prove it."""
        self._change(
            batch, "planned",
            "state = 'committed', lake_version = %s, rows = %s, checksum = %s",
            version, rows, checksum,
        )  # fmt: skip
        return replace(
            batch, state="committed", lake_version=version, rows=rows, checksum=checksum
        )

    def refuse(self, batch: Batch, error: str) -> Batch:
        """Begin to withdraw a batch whose rows are not what the lake has of them."""
        self._change(batch, "committed", "state = 'abandoning', error = %s", error)
        return replace(batch, state="abandoning")

    def abandoned(self, batch: Batch) -> None:
        """Record that the batch is withdrawn; its rows will be planned anew."""
        now = self._parameter(self.clock()[0])
        self._change(batch, "abandoning", "state = 'abandoned', finished_at = %s", now)

    def purge(
        self,
        batch: Batch,
        columns: Sequence[Column],
        on_step: Callable[[str], None] = lambda step: None,
    ) -> None:
        """Delete the batch's rows in the transaction that proves them to be the lake's.

        On a connection of its own, so that several batches may be purged at once.
        Raises VerificationRefused, with nothing deleted, when the sums differ.
        """
        connection = connect_plain(self.spec)
        try:
            with connection.transaction():
                rows, checksum = self._delete(connection, batch, columns)
                if (rows, str(checksum)) != (batch.rows, batch.checksum):
                    raise VerificationRefused(
                        f"Batch {batch.id} of {self.table.name}: the lake has "
                        f"{batch.rows} rows with checksum {batch.checksum}, the "
                        f"database {rows} with {checksum}. Nothing of it was deleted."
                    )
                now = self._parameter(self.clock_of(connection))
                self._change(
                    batch, "committed", "state = 'purged', finished_at = %s", now,
                    connection=connection,
                )  # fmt: skip
                on_step("purging")
        finally:
            connection.close()

    def clock_of(self, connection: Connection) -> dt.datetime:
        """Return the present instant of the database behind a connection."""
        if self.spec.vendor == "sqlite":
            return _instant(
                connection.value("SELECT strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')")
            )
        now: dt.datetime = connection.value("SELECT now()")
        return now

    def hashes(self, batch: Batch, columns: Sequence[Column]) -> dict[int, int]:
        """Return id and checksum of the rows that are the batch's now."""
        where = self.members(batch)
        if self.spec.vendor == "postgresql":
            found = self.connection.rows(
                f"SELECT t.id, {postgres_sql(columns)} FROM {self.table.relation} t"
                f" WHERE {where}"
            )
            return {row[0]: int(row[1]) for row in found}
        pairs: dict[int, int] = {}
        raw: sqlite3.Connection = self.connection.raw
        for part in read_rows(raw, self.table, columns, where):
            ids = part.column(part.schema.get_field_index("id")).to_pylist()
            pairs.update(zip(ids, row_hashes(part, columns), strict=True))
        return pairs

    def vacuum(self) -> None:
        """Give the room of deleted rows back, on PostgreSQL, where we own the table."""
        if self.spec.vendor == "postgresql":
            self.connection.forget(f"VACUUM (ANALYZE) {self.table.relation}")

    def _delete(
        self, connection: Connection, batch: Batch, columns: Sequence[Column]
    ) -> tuple[int, int]:
        where, relation = self.members(batch), self.table.relation
        if self.spec.vendor == "postgresql":
            row = connection.rows(
                f"WITH gone AS (DELETE FROM {relation} AS t WHERE {where}"
                f" RETURNING {postgres_sql(columns)} AS hash)"
                " SELECT count(*), coalesce(sum(hash), 0) FROM gone"
            )[0]
            return int(row[0]), int(row[1])
        rows = checksum = 0
        for part in read_rows(connection.raw, self.table, columns, where):
            rows += part.num_rows
            checksum += sum(row_hashes(part, columns))
        deleted = connection.execute(f"DELETE FROM {relation} AS t WHERE {where}")
        return (rows, checksum) if deleted == rows else (deleted, -1)

    def _settled(self, cutoff: dt.datetime, horizon: int | None) -> str:
        literal = self.database.instant(cutoff, upper=False)
        where = "(" + self.table.settled.format(cutoff=literal, t="t") + ")"
        if horizon is not None and self.table.tracked:
            below = f"t.changed_xid < '{int(horizon)}'::xid8"
            where += f" AND (t.changed_xid IS NULL OR {below})"
        return where

    def _change(
        self,
        batch: Batch,
        state: str,
        assignments: str,
        *values: Any,
        fenced: bool = True,
        connection: Connection | None = None,
    ) -> None:
        """Change a batch that is in `state` and, when `fenced`, of this attempt."""
        fence = " AND attempt = %s" if fenced else ""
        changed = (connection or self.connection).execute(
            f"UPDATE {_BATCHES} SET {assignments} WHERE id = %s AND state = %s{fence}",
            *values, batch.id, state, *([batch.attempt] if fenced else []),
        )  # fmt: skip
        if changed != 1:
            raise EnvironmentFault(
                f"Batch {batch.id} of {self.table.name} is not {state} any more, or of "
                "another attempt: another archiver has taken it over. Run again."
            )

    def _parameter(self, instant: dt.datetime) -> Any:
        if self.spec.vendor == "sqlite":
            return instant_text(instant, upper=True)
        return instant


def _batch(row: Sequence[Any]) -> Batch:
    values = list(row)
    values[3] = _instant(values[3])
    return Batch(*values)


def _instant(value: Any) -> dt.datetime:
    if isinstance(value, str):
        value = dt.datetime.fromisoformat(value)
    instant: dt.datetime = value
    return instant if instant.tzinfo else instant.replace(tzinfo=dt.timezone.utc)
