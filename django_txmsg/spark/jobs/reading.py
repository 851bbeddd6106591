"""Reads the message logs of several services as one log, from the lake and from the
databases."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa
import pyspark.sql.functions as sf
from deltalake import DeltaTable
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import types as t
from pyspark.storagelevel import StorageLevel

from ..batchlog import marks_of
from ..connection import connect_plain
from ..databases import Database, open_database
from ..engine import parallelism, spread
from ..errors import EnvironmentFault, UsageError, is_outside, reason
from ..lake import Lake, NoLake
from ..lakefile import LakeFile
from ..schemas import TABLES, Table, arrow_schema
from ..source.batch import Selection, id_ranges
from ..source.snapshot import snapshot
from ..spec import JobSpec
from ..transforms import EPOCH, whole_log, with_cancelled

#: Most rows of a table that are read without tasks.
FEW = 20_000
#: When a row ended, and a condition: the row is kept for a fixed time after that.
_ENDED = {
    # A flow's request that may be undone is kept until it has expired.
    "outbox": ("dispatched_at", "dispatched_at IS NOT NULL AND expires_at IS NULL"),
    # Each copy that arrives later prolongs the time.
    "inbox": ("processed_at", "processed_at IS NOT NULL AND deliveries = 1"),
}
#: A condition: a database does not keep the row for longer, because it has a dead
#: letter, may be undone, or holds its unique key.
_NOT_LONGER = {
    "outbox": "dead_at IS NULL AND expires_at IS NULL AND NOT unique_until_processed",
    "inbox": "dead_at IS NULL AND NOT EXISTS (SELECT 1 FROM django_txmsg_flowundo"
    " WHERE request_id = message_id)",
}
#: Whether rows of a table were deleted, as far as this role may see its sequence, and
#: the first row shows it.
_PRUNED = {
    "postgresql": "SELECT last_value > 0 AND NOT EXISTS (SELECT FROM {0} WHERE id = 1"
    " AND {1}) FROM pg_sequences WHERE pg_get_serial_sequence('{0}', 'id') ="
    " format('%I.%I', schemaname, sequencename)",
    "sqlite": "SELECT seq > 0 AND NOT EXISTS (SELECT 1 FROM {0} WHERE id = 1 AND {1})"
    " FROM sqlite_sequence WHERE name = '{0}'",
}


@dataclass
class Live:
    """A snapshot of a service's database, with the time at which it was taken."""

    service: str
    database: Database
    snapshot: str
    taken: dt.datetime
    #: By table and lake, the batch up to which no row is live any more.
    settled: Mapping[tuple[str, str], int] = field(default_factory=dict)

    def condition(self, where: str, day: dt.date | None) -> str:
        """Return an SQL condition with the beginning of a day for `{day}`."""
        start = dt.datetime.combine(day or dt.date.min, dt.time(), dt.timezone.utc)
        return where.format(day=self.database.instant(start, upper=False))


def _read_live(
    table: Table, struct: t.StructType, work: Iterator[tuple[Live, str]]
) -> Iterator[pa.RecordBatch]:
    """Yield the rows that SQL conditions select in databases. Executors run this
    function.

    The jobs use it instead of `format("txmsg")`: for every load of a Python data
    source, Spark would start several processes just to plan it.
    """
    for live, where in work:
        selection = Selection(live.service, table, struct)
        try:
            yield from selection.read(live.database, where, live.snapshot)
        except Exception as error:
            if not is_outside(error):
                raise
            raise EnvironmentFault(
                f"The database of service {live.service!r} failed: {reason(error)}."
            ) from error


@dataclass
class WholeLog:
    """The message logs of all specified services, each at one instant. The snapshots of
    the databases are taken before the lake is read, so a row that is archived in
    between is never missed. Such a row is read twice, but counted only once."""

    spark: SparkSession
    spec: JobSpec
    live: list[Live] = field(default_factory=list)
    lake: Lake | None = None
    #: Whether `read()` has found a row, or files that may have one.
    found: bool = False
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> WholeLog:
        if not self.spec.services:
            raise UsageError("No service is specified: whose log should be read?")
        with ExitStack() as stack:
            for source in (one.reading() for one in self.spec.services):
                taken = dt.datetime.now(dt.timezone.utc)
                if source.vendor == "postgresql":
                    with connect_plain(source) as connection:
                        # A replica's state is that of its last transaction.
                        taken = connection.value(
                            "SELECT CASE WHEN pg_is_in_recovery() THEN coalesce("
                            "pg_last_xact_replay_timestamp(), 'epoch') ELSE now() END"
                        )
                # Before the snapshot, which then has no row of a settled batch. Without
                # marks, for a role that may only read the log, rows are compared.
                marks = {
                    (table.name, one.lake_id): one.purged_through
                    for table, known in marks_of(source)
                    for one in known
                }
                options = stack.enter_context(snapshot(source))
                there = dataclasses.replace(source.resolved(), url=options["url"])
                database = open_database(there)
                self.live.append(
                    Live(source.service, database, options["snapshot"], taken, marks)
                )
            if self.spec.lake is not None:
                with suppress(NoLake):
                    self.lake = Lake(self.spec.lake)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def release(self) -> None:
        """Release the snapshots of the databases. The frames from `read()` stay valid,
        because they are copies."""
        self._stack.close()

    def settled(self, service: str, table: str, lake_id: str) -> int:
        """Return the number of the batch up to which no row is live any more. A service
        may have several databases, which archive into one log: each of them must have
        deleted its rows of the batch."""
        own = (one.settled for one in self.live if one.service == service)
        return min(one.get((table, lake_id), 0) for one in own)

    def read(
        self,
        table: str,
        struct: t.StructType,
        *,
        since: dt.date | None = None,
        above: Mapping[str, int] | None = None,
        where: str = "",
        whole: bool = False,
        only: Column | None = None,
    ) -> DataFrame:
        """Return the rows of a table from databases and lake, each row only once, with
        the columns of `struct`. With `since`, rows of earlier days are left out.
        `above` maps a service to the number of a batch: of this service, only later
        batches are read from the lake, but of all days.

        `where` is an SQL condition for the databases' rows, instead of `since`. With
        `whole`, the lake's rows of all days are read; `only` is a condition for
        them."""
        described = TABLES[table]
        narrow = described.narrow(("service", "id", "message_id", *struct.fieldNames()))
        if since and not where:
            where = f"t.{described.clock} >= {{day}}"
        live = self.copied(described, narrow, where, since)
        if self.lake is None:
            return whole_log([live], struct)
        delta, named = self.files_of(table)
        lake_id = str(delta.metadata().id) if delta else ""
        named = [one for one in named if one.reaches((above or {}).get(one.service, 0))]
        self.found |= bool(named)
        twice = any(
            one.reaches(self.settled(one.service, table, lake_id)) for one in named
        )
        days = None if whole or above else since
        archived = self._archived(table, narrow, named, since=days, above=above)
        archived = archived if only is None else archived.where(only)
        return whole_log([live, archived], struct, twice=twice)

    def known_from(self, table: str) -> dict[str, dt.datetime]:
        """Return the instant from which each service's rows of a table are complete.
        They are complete since the oldest ended row of the service's first batch with
        such a row in this lake, or of the database, whichever is earlier.
        If the latter is the first row of all, none is missing. The first service, and a
        service without such rows, has at least the rows of the retention. But if rows
        of the latter were deleted, its retention may be shorter: at most a day of it is
        trusted. Without a retention, all rows are kept, and the result is empty."""
        described, kept = TABLES[table], self.spec.retention.get(table)
        if kept is None:
            return {}
        end, ended = _ENDED[table]
        struct, plain = described.narrow(("id", end)), _NOT_LONGER[table]
        oldest = (
            f"t.id = (SELECT id FROM {described.relation} WHERE {ended} AND {plain}"
            f" ORDER BY {end}, id LIMIT 1)"
        )
        archived = self._archived_from(table)
        first = self.spec.service().service
        found, empty = dict[str, dt.datetime](), dict[str, dt.datetime]()
        for live, source in zip(self.live, self.spec.services, strict=True):
            known = list(archived.get(live.service, ()))
            for batch in _read_live(described, struct, iter([(live, oldest)])):
                rows = batch.to_pylist()
                known += [EPOCH if one["id"] == 1 else one[end] for one in rows]
            days, complete = kept, found if known else empty
            if not known and live.service != first:
                pruned = _PRUNED[source.vendor].format(described.relation, plain)
                with connect_plain(source.reading()) as connection:
                    days = min(1, kept) if connection.value(pruned) else kept
            if not known or live.service == first:
                known.append(live.taken - dt.timedelta(days=days))
            # Of several databases of a service, each may have lost rows.
            complete[live.service] = max(min(known), complete.get(live.service, EPOCH))
        # A database without rows may be in use no more.
        return empty | found

    def _archived_from(self, table: str) -> dict[str, list[dt.datetime]]:
        """Return when the oldest ended row ended, of each service's first batch that
        has such a row. If that is the first row of all, none is missing."""
        end, ended = _ENDED[table]
        named = sorted(self.files_of(table)[1], key=lambda one: one.batches or (1, 1))
        until, seen = dict[str, int](), Counter[str]()
        for one in named:
            if seen[one.service] < 1_000:  # A batch may have only a few rows.
                until[one.service] = one.batches[0] if one.batches else 1
            seen[one.service] += one.rows
        named = [one for one in named if one.reaches(0, until[one.service])]
        if not named:
            return {}
        shape = TABLES[table].narrow(("service", "id", end, "deliveries", "expires_at"))
        rows = self._archived(table, shape, named, until=until).where(ended)
        first_row = sf.min(sf.struct("batch_id", end, "id")).alias("row")
        # Of several databases, the lake does not tell whose row it is.
        alone = Counter(live.service for live in self.live)
        firsts = rows.groupBy("service").agg(first_row).toArrow().to_pylist()
        return {
            service: [EPOCH if row["id"] == 1 and alone[service] == 1 else row[end]]
            for service, row in map(dict.values, firsts)
        }

    def listening(self, struct: t.StructType, before: dt.date) -> DataFrame:
        """Find the first and the last inbox row of each pair of stage and destination
        in the databases. Return those of these rows that are older than the day
        `before`."""
        described = TABLES["inbox"]
        ends = " UNION ALL ".join(
            f"SELECT {which}(id) FROM {described.relation} GROUP BY destination, stage"
            for which in ("min", "max")
        )
        where = f"t.{described.clock} < {{day}} AND t.id IN ({ends})"
        return self.copied(described, struct, where, before)

    def copied(
        self, table: Table, struct: t.StructType, where: str, day: dt.date | None
    ) -> DataFrame:
        """Return a copy of rows in the databases. If there are at most FEW rows, this
        process reads them without Spark, which would start a Python process for each
        task."""
        few, rows = list[pa.RecordBatch](), 0
        for live in self.live:
            condition = live.condition(where, day)
            for batch in _read_live(table, struct, iter([(live, condition)])):
                few.append(batch)
                rows += batch.num_rows
                if rows > FEW:
                    self.found = True
                    many = self.read_live(table, struct, where, day)
                    return many.localCheckpoint(storageLevel=StorageLevel.DISK_ONLY)
        self.found |= rows > 0
        whole = pa.Table.from_batches(few, arrow_schema(struct))
        return self.spark.createDataFrame(whole, struct)

    def archived(
        self,
        table: str,
        struct: t.StructType,
        above: Mapping[str, int],
        until: Mapping[str, int],
        *,
        since: dt.date | None = None,
    ) -> DataFrame:
        """Return the lake's rows of the batches after `above`, up to and including
        `until`. `above` and `until` each map a service to the number of a batch. With
        `since`, rows of earlier days are left out."""
        named = [
            one
            for one in self.files_of(table)[1]
            if one.batches is not None
            and one.reaches(above.get(one.service, 0), until[one.service])
        ]
        rows = self._archived(
            table, struct, named, since=since, above=above, until=until
        )
        return rows.select(*struct.fieldNames())

    def files_of(self, table: str) -> tuple[DeltaTable | None, list[LakeFile]]:
        """Return the current version of a table in the lake, and the files of these
        services."""
        if self.lake is None:
            return None, []
        kept = self.lake.table(table, TABLES[table].lake_struct())
        if (delta := kept.load()) is None:
            return None, []
        services = {one.service for one in self.live}
        return delta, [one for one in kept.named(delta) if one.service in services]

    def _archived(
        self,
        table: str,
        struct: t.StructType,
        named: Sequence[LakeFile],
        *,
        since: dt.date | None = None,
        above: Mapping[str, int] | None = None,
        until: Mapping[str, int] | None = None,
    ) -> DataFrame:
        assert self.lake is not None
        kept = self.lake.table(table, TABLES[table].lake_struct())
        live = [one.spark for one in TABLES[table].live if one.name in struct.names]
        columns = [f.name for f in struct.fields if f not in live]
        columns += ["batch_id"] if above or until else []
        cancelled = "cancelled_at" in columns
        if cancelled:
            columns = list(dict.fromkeys([*columns, "dead_at", "last_error"]))
        rows = kept.read(self.spark, since=since, named=named, columns=columns)
        rows = with_cancelled(rows) if cancelled else rows
        nothing = {one.name: sf.lit(None).cast(one.dataType) for one in live}
        rows = rows.withColumns(nothing) if live else rows
        batch, service = sf.coalesce("batch_id", sf.lit(0)), sf.col("service")
        for name, number in (above or {}).items():
            if number:
                rows = rows.where((service != name) | (batch > number))
        for name, number in (until or {}).items():
            rows = rows.where((service != name) | (batch <= number))
        return rows

    def read_live(
        self,
        table: Table,
        struct: t.StructType,
        where: str = "",
        day: dt.date | None = None,
    ) -> DataFrame:
        """Return rows from the databases only. `where` is an SQL condition, in which
        `{day}` stands for the beginning of a day."""
        work = []
        cores = parallelism(self.spark)
        parts = max(1, 2 * cores // len(self.live))
        for live in self.live:
            chosen = live.condition(where, day)
            for part in id_ranges(live.database, table, parts):
                conditions = filter(None, (part.condition(), chosen))
                work.append((live, " AND ".join(conditions)))
        read = partial(_read_live, table, struct)
        return spread(self.spark, read, work, struct, len(work))


def day_of(since: dt.datetime) -> dt.date:
    """Return the first day to read: earlier than `since`, because clocks may differ."""
    return (since - dt.timedelta(days=1)).date()
