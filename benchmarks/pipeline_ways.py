"""Fills a message log, and writes it into one Parquet file per day in several ways."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from django_txmsg.spark.engine import gather
from django_txmsg.spark.jobs.archive import ArchiveOptions, Archiver, tasks_on
from django_txmsg.spark.jobs.batch_task import BatchTask
from django_txmsg.spark.lake import Lake
from django_txmsg.spark.lakefile import DayFiles
from django_txmsg.spark.ledger import Batch
from django_txmsg.spark.schemas import OUTBOX, Column
from django_txmsg.spark.spec import LakeSpec, SourceSpec
from django_txmsg.spark.storage import place_of

WEEK = timedelta(days=7)

#: DuckDB's types for the columns that are not text.
DUCKDB_TYPES = {
    "long": "BIGINT", "int": "INTEGER", "instant": "TIMESTAMPTZ", "xid": "BIGINT",
}  # fmt: skip


def turns(ways: dict[str, Callable[[], float]], count: int) -> dict[str, float]:
    """Run each way once to warm up. Then run all ways alternately, and return their
    median durations."""
    for name, way in ways.items():
        print(f"  warm-up {name}: {way():.1f} s", flush=True)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(count):
        for name, way in ways.items():
            found[name].append(way())
    for name, values in found.items():
        print(f"  {name}: " + ", ".join(f"{one:.1f}" for one in values), flush=True)
    return {name: statistics.median(values) for name, values in found.items()}


def fill(url: str, rows: int) -> None:
    """Store settled rows of four days with bodies of 288 bytes, unless they are already
    there."""
    with psycopg.connect(url, autocommit=True) as connection:
        there = connection.execute(
            "SELECT count(dispatched_at) FROM django_txmsg_outboxmessage"
        ).fetchone()
        if there == (rows,):
            return
        connection.execute("TRUNCATE django_txmsg_outboxmessage RESTART IDENTITY")
        connection.execute(
            "INSERT INTO django_txmsg_outboxmessage (message_id, replay_id, broker,"
            " destination, key, correlation_id, headers, content_type, body,"
            " created_at, due_at, attempts, last_error, dispatched_at)"
            " SELECT gen_random_uuid(), '',"
            " 'default', 'orders.place', '', '', jsonb_build_object('traceparent',"
            " '00-' || md5(g::text) || '-00f067aa0ba902b7-01'), 'application/json',"
            " convert_to(repeat(md5(g::text), 9), 'UTF8'), now() - interval '20 days' +"
            " g * interval '4 days' / %s, now(), 0, '', now() - interval '15 days'"
            " FROM generate_series(1, %s) g",
            (rows, rows),
        )
        connection.execute("VACUUM (ANALYZE) django_txmsg_outboxmessage")
        connection.execute("CHECKPOINT")


def as_text(column: Column) -> str:
    """Return an SQL expression for a column that CSV and JDBC can transfer. Bytes are
    converted to text."""
    casts = {"uuid": "::text", "xid": "::text::bigint", "json": "::text"}
    return f'{column.sql}{casts.get(column.kind, "")} AS "{column.name}"'


def parent_of(pid: int) -> int:
    """Return the id of a process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def family(pid: int) -> set[int]:
    """Return the ids of a process and of all its descendants."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            children.setdefault(parent_of(int(path.name)), []).append(int(path.name))
    found, left = set(), [pid]
    while left:
        found.add(one := left.pop())
        left += children.get(one, [])
    return found


def peak() -> float:
    """Return the peak resident memory of Spark's JVM in GiB. This JVM is both driver
    and executor."""
    for pid in family(os.getpid()):
        status = Path(f"/proc/{pid}/status").read_text()
        if status.startswith("Name:\tjava"):
            return int(status.partition("VmHWM:")[2].split()[0]) / 2**20
    return 0.0


def pin(pids: set[int], cores: set[int]) -> None:
    """Restrict processes, with all their threads, to these cores."""
    for pid in pids:
        with suppress(OSError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), cores)


class Bench:
    """A filled database, a Spark session, and the ways to compare."""

    def __init__(self, spark: SparkSession, url: str, rows: int) -> None:
        self.spark, self.url, self.rows = spark, url, rows
        self.source = SourceSpec("bench", url)
        self.directory = Path(tempfile.mkdtemp(prefix="txmsg-bench-lake-"))
        self.write = 0.0

    def lake(self) -> LakeSpec:
        """Return a new lake. The previous one is removed, with its marks in the
        database."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute("DELETE FROM django_txmsg_archivemark")
        shutil.rmtree(self.directory)
        self.directory.mkdir()
        return Lake(LakeSpec(f"{self.directory}/lake"), create=True).spec

    def archiver(self, **options: Any) -> Archiver:
        """Return an archiver that moves the outbox into a new lake."""
        return Archiver(
            self.spark, self.source, self.lake(), OUTBOX,
            ArchiveOptions(WEEK, vacuum=False, **options),
        )  # fmt: skip

    def on_one_core(self) -> float:
        """Measure the write step while Spark, its workers and PostgreSQL share one
        core."""
        with psycopg.connect(self.url) as connection:
            servers = family(parent_of(connection.info.backend_pid))
        pids = servers | family(os.getpid())
        everywhere = os.sched_getaffinity(0)
        pin(pids, {min(everywhere)})
        try:
            return self.write_step(4)
        finally:
            pin(family(os.getpid()) | pids, everywhere)

    def write_step(self, tasks: int = 0) -> float:
        """Measure only the step in which `archive` writes all rows. The proof, the log
        entries and the deletes are left out."""
        archiver = self.archiver()
        ledger, after = archiver.ledger, 0
        horizon = ledger.horizon(WEEK)
        work: list[Batch] = []
        while batch := ledger.plan(len(work) + 1, after, 100_000, horizon):
            work.append(batch)
            after = batch.last_id
        task = BatchTask(ledger.database, archiver.lake, OUTBOX, "bench", False)
        started = time.monotonic()
        parts = tasks or tasks_on(self.spark)
        written = gather(self.spark, task, work, parts)
        spent = time.monotonic() - started
        assert sum(rows for _, _, rows, _ in written) == self.rows
        ledger.close()
        return spent

    def copy_step(self) -> float:
        """Measure one process that reads the rows with COPY as CSV, parses them with
        Arrow, and writes a file per day."""
        lake = self.lake()
        names = [one.name for one in OUTBOX.columns]
        types = {one.name: one.arrow.type for one in OUTBOX.columns}
        # CSV has a body as hexadecimal text; to be fair it stays so.
        types |= {"body": pa.string()}
        asked = ", ".join(as_text(one) for one in OUTBOX.columns)
        started = time.monotonic()
        days = DayFiles(place_of(lake), "outbox", "bench", "created_at", "copy")
        with psycopg.connect(self.url) as connection, connection.cursor() as cursor:
            rows = f"SELECT {asked} FROM {OUTBOX.relation} t"
            sql = f"COPY ({rows}) TO STDOUT (FORMAT csv)"
            with cursor.copy(sql) as copy:
                parts: list[bytes] = []
                size = 0

                def flush() -> None:
                    table = csv.read_csv(
                        pa.BufferReader(b"".join(parts)),
                        csv.ReadOptions(column_names=names),
                        csv.ParseOptions(newlines_in_values=True),
                        csv.ConvertOptions(
                            column_types=types, strings_can_be_null=False,
                            timestamp_parsers=["%Y-%m-%d %H:%M:%S%z", csv.ISO8601],
                        ),
                    )  # fmt: skip
                    for batch in table.to_batches():
                        days.write(batch)

                for part in copy:
                    parts.append(bytes(part))
                    size += len(part)
                    if size > 16 << 20:
                        flush()
                        parts, size = [], 0
                if parts:
                    flush()
        days.close()
        assert days.rows == self.rows
        return time.monotonic() - started

    def archive_step(self, spark: SparkSession | None, **options: Any) -> float:
        """Fill the table, then measure a whole archive: files, proof, log entries and
        deletes."""
        fill(self.url, self.rows)
        archiver = Archiver(
            spark,
            self.source,
            self.lake(),
            OUTBOX,
            ArchiveOptions(WEEK, vacuum=False, **options),
        )
        started = time.monotonic()
        result = archiver.run()
        spent = time.monotonic() - started
        steps = ", ".join(f"{k} {v:.1f} s" for k, v in result.seconds.items())
        print(f"  {spent:.1f} s: {steps}")
        assert result.rows == self.rows
        return spent

    def duckdb_step(self) -> float:
        """Fill the table, then measure how DuckDB moves all rows, like a script written
        by hand.

        One transaction (REPEATABLE READ) copies the settled rows as CSV into a file.
        DuckDB reads that file on all cores, and writes Parquet files by day, with the
        compression of the lake. Then the transaction deletes the same rows. Three
        counts are compared, but no contents: no file is read back, and no log says
        which files are complete. If the script is killed before the commit, the next
        run writes the rows a second time.
        """
        import duckdb

        fill(self.url, self.rows)
        target = Path(self.lake().uri.removeprefix("file://"), "duckdb")
        spool = self.directory / "rows.csv"
        asked = ", ".join(as_text(one) for one in OUTBOX.columns)
        types = ", ".join(
            f"'{one.name}': '{DUCKDB_TYPES.get(one.kind, 'VARCHAR')}'"
            for one in OUTBOX.columns
        )
        settled = "dispatched_at < now() - interval '7 days'"
        started = time.monotonic()
        with psycopg.connect(self.url) as connection, connection.cursor() as cursor:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            rows = f"SELECT {asked} FROM {OUTBOX.relation} t WHERE {settled}"
            with (
                spool.open("wb") as file,
                cursor.copy(f"COPY ({rows}) TO STDOUT (FORMAT csv)") as copy,
            ):
                for part in copy:
                    file.write(part)
            with duckdb.connect() as database:
                written = database.execute(
                    "COPY (SELECT * REPLACE (unhex(substr(body, 3)) AS body),"
                    " created_at::DATE AS day"
                    f" FROM read_csv('{spool}', header = false,"
                    f" allow_quoted_nulls = false, columns = {{{types}}}))"
                    f" TO '{target}' (FORMAT parquet, PARTITION_BY (day),"
                    " COMPRESSION zstd, COMPRESSION_LEVEL 1)"
                ).fetchall()
            cursor.execute(f"DELETE FROM {OUTBOX.relation} WHERE {settled}")
            assert written == [(self.rows,)]
            assert cursor.rowcount == self.rows
        return time.monotonic() - started

    def jdbc_step(self) -> float:
        """Measure `spark.read.jdbc`. It has as many partitions as `archive` has
        batches, and Spark writes a file per day."""
        target = f"{self.lake().uri}/jdbc"
        asked = ", ".join(as_text(one) for one in OUTBOX.columns)
        user, _, place = self.url.partition("://")[2].rpartition("@")
        name, _, password = user.partition(":")
        parts = -(-self.rows // 100_000)
        started = time.monotonic()
        (
            self.spark.read.format("jdbc").option("driver", "org.postgresql.Driver")
            .option("url", f"jdbc:postgresql://{place}")
            .option("user", name).option("password", password)
            .option("dbtable", f"(SELECT {asked}, created_at::date AS day FROM"
                               f" {OUTBOX.relation} t) found")
            .option("partitionColumn", "id").option("lowerBound", 1)
            .option("upperBound", self.rows).option("numPartitions", parts)
            .option("fetchsize", 10_000).load()
            .write.partitionBy("day").parquet(target)
        )  # fmt: skip
        spent = time.monotonic() - started
        rows = sum(
            pq.read_metadata(p).num_rows for p in Path(target).rglob("*.parquet")
        )
        assert rows == self.rows
        return spent
