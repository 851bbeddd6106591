"""Streams new rows of the log. Rows that are committed late are not missed.

An id is assigned before its transaction commits, so a stream that reads by id would
miss rows. On PostgreSQL, the offset is a transaction id below which all transactions
have ended (`pg_snapshot_xmin`), together with the id of the cluster. On SQLite, only
one transaction writes at a time, so ids are in the order of commits.

The stream never reads past an open transaction. If rows wait for one, the stream
reports their number on the error stream. After `stuckAfter` seconds it fails.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from ..connection import connect_plain, held
from ..databases import open_database
from ..engine import installed
from ..errors import EnvironmentFault, UsageError
from ..schemas import Table
from ..spec import SourceSpec
from .batch import Selection, Stretch

#: Seconds between two checks for waiting rows, while no others arrive.
LOOK = 10.0

#: Seconds for which a transaction must be open before it is reported.
TELL_AFTER = 60.0


class LogStream(DataSourceStreamReader):
    """A stream of rows, in the order of the transactions that stored them. With
    `follow=changed`, rows are in the order of the transactions that last changed them,
    and a row is read again after each change.

    Before version 4.2, Spark passes no start position for the end of a micro-batch. The
    micro-batch then begins at the end of the previous one. `LimitedStream` is for newer
    versions.
    """

    #: The end of the query; None if it has none.
    target: dict[str, Any] | None = None

    def __init__(
        self,
        spec: SourceSpec,
        table: Table,
        schema: StructType,
        options: Mapping[str, str],
    ) -> None:
        follow = options.get("follow", "stored")
        if follow not in ("stored", "changed"):
            raise UsageError(f"follow is stored or changed, not {follow!r}.")
        self.postgres = spec.vendor == "postgresql"
        if self.postgres and not table.tracked:
            raise UsageError(
                f"Rows of {table.name} do not say which transaction stored them: "
                "stream the outbox or the inbox."
            )
        if follow == "changed" and not self.postgres:
            raise UsageError("follow=changed needs PostgreSQL.")
        self.position = "changed_xid" if follow == "changed" else "created_xid"
        # Worded like the index, which is on this expression.
        xid = f"(t.{self.position}::text::bigint)"
        self.place = xid if self.postgres else "t.id"
        self.spec, self.table = spec.resolved(), table
        self.columns = Selection(spec.service, table, schema)
        self.database = open_database(spec)
        self.most = int(options.get("maxrowsperbatch", 0))
        self.stuck_after = float(options.get("stuckafter", 6 * 3600))
        self._looked = self._stood_since = float("-inf")
        self._stood_at = -1
        #: The end of the last micro-batch.
        self._reached: dict[str, Any] | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return the beginning of the log. Raises EnvironmentFault if there are rows
        that the stream cannot see."""
        if self.postgres:
            self._insist_on_own_rows()
        return self.end() | {"position": "0"}

    def latestOffset(  # noqa: N802 - Spark's name
        self, start: dict[str, Any] | None = None, limit: object = None
    ) -> dict[str, Any]:
        """Return the end of the next micro-batch, within the limit. Only a limit on the
        number of rows has `max_rows`."""
        end = self.target or self.end()
        start = start or self._reached or end | {"position": "0"}
        following = self._insist_on_its_log(start)
        first, last = int(start["position"]), int(end["position"])
        # A standby does not see the open transactions.
        if self.postgres and first >= last and following is not None:
            self.tell_standstill(last, following)
        if most := getattr(limit, "max_rows", 0):
            last = min(last, self.after(first, last, most))
        self._reached = end | {"position": str(max(first, last))}
        return self._reached

    def partitions(
        self, start: dict[str, Any], end: dict[str, Any]
    ) -> Sequence[InputPartition]:
        """Return a single partition for each micro-batch. A micro-batch is small. A
        single statement must read it, because two statements could see different states
        of the database."""
        self._insist_on_its_log(start)
        first, last = int(start["position"]), int(end["position"])
        return [Stretch(first, last)] if first < last else []

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a partition. If Spark reads a partition again, the same
        rows are yielded, except rows that were deleted or (with `follow=changed`)
        changed in between."""
        assert isinstance(partition, Stretch)
        where = partition.condition(self.place)
        if self.postgres and partition.first == 0:
            # They are older than the column: the pipeline's app was installed later.
            where = f"({where} OR t.{self.position} IS NULL)"
        yield from self.columns.read(self.database, where)

    def _insist_on_its_log(self, start: Mapping[str, Any]) -> int | None:
        """Return the position that the database assigns next, as `_ends()` does.

        Raises EnvironmentFault if the stream has read another PostgreSQL cluster up to
        `start`, or if this database has not reached `start`. The database has then lost
        transactions, and new rows get their ids."""
        _, following, cluster = self._ends()
        if start["cluster"] != cluster:
            raise EnvironmentFault(
                f"The stream's checkpoint is of PostgreSQL cluster {start['cluster']}, "
                f"and {self.spec.shown} is on {cluster}: transaction ids do not "
                "survive a dump and restore. Start with a new checkpoint."
            )
        position = int(start["position"])
        if following is not None and following < position:
            raise EnvironmentFault(
                f"The stream's checkpoint is at {position}, and {self.spec.shown} has "
                f"only come to {following}: it was restored to an earlier state, and "
                f"the stream would miss new rows of {self.table.relation}. Start with "
                "a new checkpoint."
            )
        return following

    def end(self) -> dict[str, Any]:
        """Return the position up to which the stream may read. It is before the first
        row of any open transaction."""
        position, _, cluster = self._ends()
        return {"position": str(position), "cluster": cluster}

    def _ends(self) -> tuple[int, int | None, str]:
        """Return the position up to which the stream may read, the position that the
        database assigns next, and the PostgreSQL cluster. The second one is None on a
        standby, which may lag behind the server that the stream has read before."""
        sql = (
            "SELECT pg_snapshot_xmin(s)::text::bigint, CASE WHEN NOT"
            " pg_is_in_recovery() THEN pg_snapshot_xmax(s)::text::bigint END,"
            " system_identifier::text FROM pg_current_snapshot() s, pg_control_system()"
        )
        if not self.postgres:
            name = self.table.relation
            sql = (
                f"SELECT (SELECT coalesce(max(id), 0) + 1 FROM {name}),"
                " coalesce(max(seq), 0) + 1, 'sqlite' FROM sqlite_sequence"
                f" WHERE name = '{name}'"
            )
        with connect_plain(self.spec) as connection:
            [(position, following, cluster)] = connection.rows(sql)
        return position, following, cluster

    def tell_standstill(self, position: int, following: int) -> None:
        """From time to time, check whether rows between these positions wait for an
        open transaction. If so, report their number. Raises EnvironmentFault if the
        transaction is open for longer than `stuckAfter`."""
        if time.monotonic() - self._looked < LOOK:
            return
        self._looked = time.monotonic()
        if position != self._stood_at:
            self._stood_at, self._stood_since = position, self._looked
        with connect_plain(self.spec) as connection:
            rows = connection.value(
                f"SELECT count(*) FROM {self.table.relation} t"
                f" WHERE {Stretch(position, following).condition(self.place)}"
            )
            waiting = held(connection, rows)
        if not waiting.rows:
            return
        what = (
            f"The stream of {self.table.name} stands still: {rows:,} rows wait for "
            f"{waiting.whom}."
        )
        seconds = waiting.seconds
        if waiting.since is None:
            # This role may not see when it began: the position has stood still since.
            seconds = self._looked - self._stood_since
        if self.stuck_after and seconds > self.stuck_after:
            raise EnvironmentFault(
                f"{what} End that transaction; then the stream continues."
            )
        if seconds > TELL_AFTER:
            sys.stderr.write(f"{what}\n")

    def _insist_on_own_rows(self) -> None:
        """Raise EnvironmentFault if rows were restored from a dump. Their transaction
        ids belong to another cluster, and this cluster may take months to reach
        them."""
        ahead = f"{self.place} >= pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
        with connect_plain(self.spec) as connection:
            rows = connection.value(
                f"SELECT count(*) FROM {self.table.relation} t WHERE {ahead}"
            )
        if rows:
            raise EnvironmentFault(
                f"{rows:,} rows of {self.table.name} carry ids of transactions that "
                "this PostgreSQL cluster has not given yet: they come from another "
                "one, by a dump. Say that they are old, and start again: UPDATE "
                f"{self.table.relation} t SET {self.position} = NULL WHERE {ahead};"
            )

    def after(self, first: int, last: int, rows: int) -> int:
        """Return the end of a range that starts at `first` and has at most `rows` rows.
        A transaction is never split. So if the first transaction has more rows, the
        range has more rows, too."""
        with connect_plain(self.spec) as connection:
            found = connection.rows(
                f"SELECT {self.place} FROM {self.table.relation} t WHERE"
                f" {Stretch(first, last).condition(self.place)} ORDER BY 1 LIMIT %s",
                rows + 1,
            )
        if len(found) <= rows:
            return last
        cut: int = found[-1][0]
        return cut if cut > found[0][0] else cut + 1


if installed() >= (4, 2):
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )

    class LimitedStream(LogStream, SupportsTriggerAvailableNow):
        """A stream for PySpark 4.2 and newer. Spark passes the start of each
        micro-batch. With `trigger(availableNow=True)`, the stream reads only rows that
        existed when the query started."""

        def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
            """Return the limit `maxRowsPerBatch` if the option is set; otherwise no
            limit."""
            return ReadMaxRows(self.most) if self.most else ReadAllAvailable()

        def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
            """Record the end of the log at this moment as the end of the query."""
            self.target = self.end()
