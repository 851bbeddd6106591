"""The pipeline against plain ways of doing the same, turn by turn on one database.

    python benchmarks/spark_pipeline.py [--rows 2000000] [--turns 3] [--only archive,…]

JDBC takes part where Debian's `libpostgresql-jdbc-java` is installed. Start-up of the
JVM is left out everywhere and printed; each way is warmed up once before it counts.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psycopg
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
from pyarrow import fs
from pyspark.sql import SparkSession

from benchmarks import stand
from django_txmsg.spark.jobs.archive import (
    MANIFEST,
    ArchiveOptions,
    Archiver,
    BatchTask,
)
from django_txmsg.spark.jobs.outgoing import ReplayOptions, run_replay
from django_txmsg.spark.lakefile import DayFiles
from django_txmsg.spark.runs import Run
from django_txmsg.spark.schemas import OUTBOX
from django_txmsg.spark.session import build
from django_txmsg.spark.spec import JobSpec, LakeSpec, SourceSpec

JAR = Path("/usr/share/java/postgresql.jar")
WEEK = timedelta(days=7)
DATES = ["created_at", "due_at", "expires_at", "dispatched_at", "dead_at"]


def fill(url: str, rows: int) -> None:
    """Store settled rows with bodies of 288 bytes, over four days."""
    with psycopg.connect(url, autocommit=True) as connection:
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


class Bench:
    """A filled database, a session, and the ways to compare."""

    def __init__(self, spark: SparkSession, url: str, rows: int) -> None:
        self.spark, self.url, self.rows = spark, url, rows
        self.source = SourceSpec("bench", url)
        self.directory = Path(tempfile.mkdtemp(prefix="txmsg-bench-lake-"))

    def lake(self) -> LakeSpec:
        """Return a fresh lake, and remove the one before."""
        shutil.rmtree(self.directory)
        self.directory.mkdir()
        return LakeSpec(f"{self.directory}/lake")

    def archiver(self, **options: Any) -> Archiver:
        """Return an archive of the outbox into a fresh lake."""
        return Archiver(
            self.spark, self.source, self.lake(), OUTBOX,
            ArchiveOptions(WEEK, vacuum=False, **options),
        )  # fmt: skip

    def write_step(self, cores: int = 0) -> float:
        """Write all rows as `archive` does, by day, without proof, log or purge."""
        archiver = self.archiver()
        now, horizon = archiver.ledger.clock()
        work, after = [], 0
        while batch := archiver.ledger.plan(after, 100_000, now - WEEK, horizon):
            batch = archiver.ledger.begin(batch)
            work.append((batch, archiver.ledger.members(batch)))
            after = batch.last_id
        task = BatchTask(
            archiver.ledger.database, archiver.lake_spec, OUTBOX, "bench", work, False
        )
        started = time.monotonic()
        tasks = cores or len(work)
        places = self.spark.range(0, len(work), 1, tasks)
        rows = places.mapInArrow(task, MANIFEST).groupBy().sum("rows").collect()
        spent = time.monotonic() - started
        assert rows[0][0] == self.rows
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute("DELETE FROM django_txmsg_archivebatch")
        archiver.ledger.close()
        return spent

    def copy_step(self) -> float:
        """One process: COPY as CSV, parsed by Arrow, written by day."""
        lake = self.lake()
        names = [one.name for one in OUTBOX.columns]
        types = {one.name: one.arrow.type for one in OUTBOX.columns}
        # CSV has a body as hexadecimal text; to be fair it stays so.
        types |= {"body": pa.string()}
        asked = ", ".join(one.selected for one in OUTBOX.columns)
        files, root = fs.FileSystem.from_uri(lake.uri)
        started = time.monotonic()
        days = DayFiles(files, f"{root}/outbox", "bench", "created_at", "copy")
        with psycopg.connect(self.url) as connection, connection.cursor() as cursor:
            sql = f"COPY (SELECT {asked} FROM {OUTBOX.relation}) TO STDOUT (FORMAT csv)"
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

    def jdbc_step(self) -> float:
        """`spark.read.jdbc` in as many partitions, written by day by Spark."""
        target = f"{self.lake().uri}/jdbc"
        asked = ", ".join(one.selected for one in OUTBOX.columns)
        user, _, place = self.url.partition("://")[2].rpartition("@")
        name, _, password = user.partition(":")
        tasks = -(-self.rows // 100_000)
        started = time.monotonic()
        (
            self.spark.read.format("jdbc").option("driver", "org.postgresql.Driver")
            .option("url", f"jdbc:postgresql://{place}")
            .option("user", name).option("password", password)
            .option("dbtable", f"(SELECT {asked}, created_at::date AS day FROM"
                               f" {OUTBOX.relation}) t")
            .option("partitionColumn", "id").option("lowerBound", 1)
            .option("upperBound", self.rows).option("numPartitions", tasks)
            .option("fetchsize", 10_000).load()
            .write.partitionBy("day").parquet(target)
        )  # fmt: skip
        spent = time.monotonic() - started
        rows = sum(
            pq.read_metadata(p).num_rows for p in Path(target).rglob("*.parquet")
        )
        assert rows == self.rows
        return spent


def median(values: list[float]) -> float:
    return statistics.median(values)


def turns(ways: dict[str, Callable[[], float]], count: int) -> dict[str, float]:
    """Warm each way up, then let them take turns; return the medians."""
    for name, way in ways.items():
        print(f"  warm-up {name}: {way():.1f} s", flush=True)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(count):
        for name, way in ways.items():
            found[name].append(way())
    for name, values in found.items():
        print(f"  {name}: " + ", ".join(f"{one:.1f}" for one in values), flush=True)
    return {name: median(values) for name, values in found.items()}


def measure_write(bench: Bench, count: int) -> None:
    """The write step against COPY in one process, and against JDBC."""
    ways: dict[str, Callable[[], float]] = {
        "archive": bench.write_step, "copy": bench.copy_step,
        "archive, one core": lambda: bench.write_step(1),
    }  # fmt: skip
    if JAR.exists():
        ways["jdbc"] = bench.jdbc_step
    found = turns(ways, count)
    for name in ways:
        rate = bench.rows / found[name]
        ratio = found[name] / found["archive"]
        print(f"write step  {name:18} {rate:10,.0f} rows/s   archive is {ratio:.2f} x")
    bench.write = found["archive"]  # type: ignore[attr-defined]


def measure_archive(bench: Bench) -> None:
    """The whole of `archive`, and where its time goes."""
    archiver = bench.archiver()
    started = time.monotonic()
    result = archiver.run()
    spent = time.monotonic() - started
    assert result.rows == bench.rows
    steps = ", ".join(f"{k} {v:.1f}" for k, v in result.seconds.items())
    print(f"archive     whole {spent:.1f} s, {bench.rows / spent:,.0f} rows/s: {steps}")
    if hasattr(bench, "write"):
        print(f"archive     whole is {spent / bench.write:.2f} x the write step")


def measure_replay(bench: Bench, count: int) -> None:
    """`replay` against one process: COPY into staging and the same merge."""
    from django_txmsg.spark.staging import STAGED, Staging

    rows = min(bench.rows, 500_000)
    lake = LakeSpec(f"{bench.directory}/lake")
    spec = JobSpec(services=(bench.source,), lake=lake)
    names = STAGED.fieldNames()

    def clear() -> None:
        with psycopg.connect(bench.url, autocommit=True) as connection:
            connection.execute("TRUNCATE django_txmsg_outboxmessage")
            connection.execute("TRUNCATE django_txmsg_stagedmessage")
            connection.execute("CHECKPOINT")

    def ours() -> float:
        clear()
        started = time.monotonic()
        options = ReplayOptions(where=f"id <= {rows}", name=uuid.uuid4().hex)
        done = run_replay(bench.spark, spec, options, Run("replay", {}))
        assert done.merged is not None
        assert done.merged.stored == rows
        return time.monotonic() - started

    def plain() -> float:
        clear()
        started = time.monotonic()
        staging = Staging(bench.source, uuid.uuid4().hex)

        def batches() -> Any:
            left = rows
            for path in sorted(Path(lake.uri, "outbox").rglob("*.parquet")):
                asked = [n for n in names if n not in ("position", "dead_letter")]
                file = pq.ParquetFile(path)
                for batch in file.iter_batches(32_768, columns=[*asked, "created_at"]):
                    batch = batch.slice(0, left)
                    left -= batch.num_rows
                    arrays = [batch[n] for n in asked]
                    arrays += [
                        batch["created_at"],
                        pa.nulls(batch.num_rows, pa.int64()),
                    ]
                    if batch.num_rows:
                        yield pa.RecordBatch.from_arrays(
                            arrays, names=[*asked, "position", "dead_letter"]
                        )

        staged = staging.stage("one", batches())
        assert staging.merge([("one", staged)]).stored == rows
        return time.monotonic() - started

    found = turns({"replay": ours, "copy and merge": plain}, count)
    for name, spent in found.items():
        ratio = spent / found["replay"]
        print(f"replay      {name:18} {rows / spent:10,.0f} rows/s   {ratio:.2f} x")


def measure_latency(bench: Bench) -> None:
    """How long a transaction with one send_message() takes, beside an archive."""
    from django.db import transaction

    from django_txmsg import send_message

    def sends(until: threading.Event, least: int) -> list[float]:
        spent: list[float] = []
        while not until.is_set() or len(spent) < least:
            started = time.monotonic()
            with transaction.atomic():
                send_message("bench.latency", {"n": len(spent)})
            spent.append(time.monotonic() - started)
            time.sleep(0.005)
        return spent

    def p95(values: list[float]) -> float:
        return statistics.quantiles(values, n=20)[18] * 1000

    idle = threading.Event()
    idle.set()
    before = sends(idle, 1500)
    done = threading.Event()
    archiver = bench.archiver()

    def archive() -> None:
        archiver.run()
        done.set()

    thread = threading.Thread(target=archive)
    thread.start()
    during = sends(done, 100)
    thread.join()
    after = sends(idle, 1500)
    alone = p95(before + after)
    print(
        f"latency     p95 {p95(during):.2f} ms while archiving ({len(during)} sends),"
        f" {alone:.2f} ms alone   {p95(during) / alone:.2f} x"
    )


def measure_reconcile(spark: SparkSession, rows: int) -> None:
    """`reconcile` of two services with so many messages each, from the lake."""
    import datetime as dt

    import pyspark.sql.functions as sf

    from django_txmsg.spark.transforms.reconcile import (
        EXPECTED,
        reconcile,
        summarise,
    )  # fmt: skip

    directory = tempfile.mkdtemp(prefix="txmsg-bench-reconcile-")
    ids = spark.range(rows).select(
        sf.col("id"), sf.md5(sf.col("id").cast("string")).alias("h")
    )
    message_id = sf.concat_ws("-", *[
        sf.substring("h", a, n) for a, n in ((1, 8), (9, 4), (13, 4), (17, 4), (21, 12))
    ])  # fmt: skip
    sent_at = sf.timestamp_seconds(sf.lit(1_780_000_000) + sf.col("id") / 10)
    for service, other in (("a", "b"), ("b", "a")):
        name = sf.concat(sf.lit(service), message_id)
        ids.select(
            sf.lit(service).alias("service"), name.alias("message_id"),
            sf.lit(f"{other}.in").alias("destination"), sent_at.alias("created_at"),
            sent_at.alias("dispatched_at"),
            sf.lit(None).cast("timestamp").alias("dead_at"),
        ).write.mode("append").parquet(f"{directory}/sent")  # fmt: skip
        ids.where("id % 1000 <> 7").select(
            sf.lit(other).alias("service"), sf.lit("s").alias("stage"),
            name.alias("message_id"), sf.lit(f"{other}.in").alias("destination"),
            sent_at.alias("created_at"), sent_at.alias("first_received_at"),
            sent_at.alias("processed_at"),
            sf.lit(None).cast("timestamp").alias("dead_at"),
            sf.lit(1).alias("deliveries"),
        ).write.mode("append").parquet(f"{directory}/received")  # fmt: skip
    started = time.monotonic()
    verdicts = reconcile(
        spark.read.parquet(f"{directory}/sent"),
        spark.read.parquet(f"{directory}/received"),
        spark.createDataFrame([], EXPECTED),
        horizon=dt.datetime.now(dt.timezone.utc) + dt.timedelta(days=3650),
        late_after=dt.timedelta(hours=1),
    )
    counts: dict[str, int] = {}
    for row in summarise(verdicts).groupBy("verdict").sum("messages").collect():
        counts[row[0]] = row[1]
    spent = time.monotonic() - started
    assert counts["never_received"] == 2 * sum(1 for n in range(rows) if n % 1000 == 7)
    total = 2 * rows
    print(
        f"reconcile   two services, {rows:,} messages each: {spent:.1f} s,"
        f" {total / spent:,.0f} messages/s"
    )
    shutil.rmtree(directory)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--messages", type=int, default=5_000_000)
    parser.add_argument("--only", default="write,archive,replay,latency,reconcile")
    given = parser.parse_args()
    wanted = given.only.split(",")
    settings = {"spark.master": "local[2]", "spark.driver.memory": "2g"}
    if JAR.exists():
        settings["spark.jars"] = str(JAR)
    started = time.monotonic()
    spark = build("benchmark", settings)
    spark.range(10).count()
    print(f"start-up of Spark: {time.monotonic() - started:.1f} s, in no figure below")
    if set(wanted) - {"reconcile"}:
        url = stand.postgresql()
        stand.django(url, {"SERVICE": "bench", "DISPATCH_ON_COMMIT": "off"})
        bench = Bench(spark, url, given.rows)
        fill(url, given.rows)
        if "write" in wanted:
            measure_write(bench, given.turns)
        if "archive" in wanted or "replay" in wanted:
            measure_archive(bench)
        if "replay" in wanted:
            measure_replay(bench, given.turns)
        if "latency" in wanted:
            fill(url, given.rows)
            measure_latency(bench)
        shutil.rmtree(bench.directory, ignore_errors=True)
    if "reconcile" in wanted:
        measure_reconcile(spark, given.messages)
    spark.stop()


if __name__ == "__main__":
    main()
