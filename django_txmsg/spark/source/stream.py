"""Following the log as it grows, without missing a row that commits late.

An id is drawn before its transaction commits, so that a reader of ids loses rows. On
PostgreSQL the offset is a transaction id below which every transaction has ended
(`pg_snapshot_xmin`), together with the identity of the cluster that counts them. On
SQLite writers take turns, and ids are in the order of commits.

Nothing passes a transaction that is open. Rows that wait for it are counted and told on
the error stream; after `stuckAfter` seconds the stream fails, rather than stand still.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from ..connection import Connection, connect_plain
from ..databases import open_database
from ..errors import EnvironmentFault, UsageError
from ..schemas import Table
from ..spec import SourceSpec
from ..standstill import held
from ..versions import insist_on
from .batch import Selection

#: Seconds from one look for rows that wait to the next, while nothing else comes.
LOOK = 10.0

#: Seconds that a transaction has been open before it is told of.
TELL_AFTER = 60.0


@dataclass
class Stretch(InputPartition):
    """A part of the log: `first <= position < last`, and every n-th id of it."""

    first: int
    last: int


class LogStream(DataSourceStreamReader):
    """Rows by the transaction that stored them or, with `follow=changed`, by the one
    that changed them last: then a row comes again with each change.

    How Spark asks for the end of a micro-batch depends on its version: see
    `WholeStream` and `limited.LimitedStream`.
    """

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
        self.spec, self.table = spec.resolved(), table
        self.columns = Selection(spec.service, table, schema)
        self.database = open_database(spec)
        self.most = int(options.get("maxrowsperbatch", 0))
        self.stuck_after = float(options.get("stuckafter", 6 * 3600))
        self._looked = float("-inf")

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Begin at the beginning. Raises EnvironmentFault where rows are there that the
        stream would not see."""
        if self.postgres:
            self._insist_on_own_rows()
        return {"position": "0", "cluster": self._cluster()}

    def partitions(
        self, start: dict[str, Any], end: dict[str, Any]
    ) -> Sequence[InputPartition]:
        """One task a micro-batch: a range is short, and one statement is one state."""
        self.insist_on_one_cluster(start, end)
        first, last = int(start["position"]), int(end["position"])
        return [Stretch(first, last)] if first < last else []

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a range. Read again, it has the same rows, as long as
        nobody has deleted any."""
        assert isinstance(partition, Stretch)
        where = self._between(partition.first, partition.last)
        if self.postgres and partition.first == 0:
            # They are older than the column: the pipeline's app came later.
            where = f"({where} OR t.{self.position} IS NULL)"
        yield from self.columns.read(self.database, where)

    def _between(self, first: int, last: int) -> str:
        # Written like the index, which is on this expression.
        name = f"(t.{self.position}::text::bigint)" if self.postgres else "t.id"
        return f"{name} >= {first} AND {name} < {last}"

    def insist_on_one_cluster(
        self, start: Mapping[str, Any], end: Mapping[str, Any]
    ) -> None:
        """Raise EnvironmentFault where a checkpoint counts another's transactions."""
        if start["cluster"] != end["cluster"]:
            raise EnvironmentFault(
                f"The stream's checkpoint is of PostgreSQL cluster {start['cluster']}, "
                f"and {self.spec.shown} is on {end['cluster']}: transaction ids do not "
                "survive a dump and restore. Start with a new checkpoint."
            )

    def end(self) -> dict[str, Any]:
        """Return how far may be read: never past a transaction still open."""
        connection = connect_plain(self.spec)
        try:
            if self.postgres:
                position = connection.value(
                    "SELECT pg_snapshot_xmin(pg_current_snapshot())::text"
                )
            else:
                highest = connection.value(f"SELECT max(id) FROM {self.table.relation}")
                position = str((highest or 0) + 1)
            return {"position": position, "cluster": self._cluster(connection)}
        finally:
            connection.close()

    def tell_standstill(self, position: int) -> None:
        """Look, now and then, whether rows wait for a transaction that is open. Raises
        EnvironmentFault when it is open for too long."""
        if time.monotonic() - self._looked < LOOK:
            return
        self._looked = time.monotonic()
        connection = connect_plain(self.spec)
        try:
            following = connection.value(
                "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
            )
            rows = connection.value(
                f"SELECT count(*) FROM {self.table.relation} t"
                f" WHERE {self._between(position, following)}"
            )
            waiting = held(connection, rows)
        finally:
            connection.close()
        if not waiting.rows:
            return
        what = (
            f"The stream of {self.table.name} stands still: {rows:,} rows wait for "
            f"{waiting.whom}."
        )
        if self.stuck_after and waiting.seconds > self.stuck_after:
            raise EnvironmentFault(f"{what} End that transaction; the stream goes on.")
        if waiting.seconds > TELL_AFTER:
            sys.stderr.write(f"{what}\n")
            sys.stderr.flush()

    def _insist_on_own_rows(self) -> None:
        """A dump brings ids of its own cluster's transactions, and the counter here
        comes to them in months."""
        name = f"({self.position}::text::bigint)"
        foreign = f"{name} >= pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
        connection = connect_plain(self.spec)
        try:
            rows = connection.value(
                f"SELECT count(*) FROM {self.table.relation} WHERE {foreign}"
            )
        finally:
            connection.close()
        if rows:
            raise EnvironmentFault(
                f"{rows:,} rows of {self.table.name} carry ids of transactions that "
                "this PostgreSQL cluster has not given yet: they come from another "
                "one, by a dump. Say that they are old, and start again: UPDATE "
                f"{self.table.relation} SET {self.position} = NULL WHERE {foreign};"
            )

    def _cluster(self, connection: Connection | None = None) -> str:
        if not self.postgres:
            return "sqlite"
        opened = connection or connect_plain(self.spec)
        try:
            identity = opened.value("SELECT system_identifier FROM pg_control_system()")
            return str(identity)
        finally:
            if connection is None:
                opened.close()

    def after(self, first: int, last: int, rows: int) -> int:
        """Return the end of a range of at least one transaction and, where that allows
        it, at most `rows` rows. A transaction is never split."""
        name = "created_xid::text::bigint" if self.postgres else "id"
        name = name.replace("created_xid", self.position)
        connection = connect_plain(self.spec)
        try:
            found = connection.rows(
                f"SELECT {name} AS p FROM {self.table.relation} t"
                f" WHERE {self._between(first, last)} ORDER BY 1 LIMIT %s",
                rows + 1,
            )
        finally:
            connection.close()
        if len(found) <= rows:
            return last
        cut: int = found[-1][0]
        return cut if cut > found[0][0] else cut + 1


class WholeStream(LogStream):
    """A stream as PySpark 4.0 and 4.1 ask for it: without saying from where, and all
    that there is."""

    def __init__(
        self,
        spec: SourceSpec,
        table: Table,
        schema: StructType,
        options: Mapping[str, str],
    ) -> None:
        super().__init__(spec, table, schema, options)
        if self.most:
            insist_on("4.2", 'The option "maxRowsPerBatch" of a stream')
        self._reached = -1

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]  # noqa: N802 - Spark's name
        """Return how far may be read."""
        end = self.end()
        position = int(end["position"])
        if self.postgres and position <= self._reached:
            self.tell_standstill(position)
        self._reached = max(position, self._reached)
        return end | {"position": str(self._reached)}
