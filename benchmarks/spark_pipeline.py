"""The pipeline against plain ways of doing the same, turn by turn on one database.

    python benchmarks/spark_pipeline.py [--rows 2000000] [--turns 3] [--only archive,…]

JDBC takes part where Debian's `libpostgresql-jdbc-java` is installed. Start-up of the
JVM is left out everywhere and printed; each way is warmed up once before it counts.
With `--database URL` the log is filled there once, and found there by the next run;
so is the lake for `reconcile` with `--lake DIRECTORY`.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pyspark.sql.functions as sf
from pyspark.sql import DataFrame, SparkSession

from benchmarks import stand
from benchmarks.pipeline_ways import Bench, family, fill
from django_txmsg.spark.jobs.outgoing import run_replay
from django_txmsg.spark.jobs.outgoing_options import ReplayOptions
from django_txmsg.spark.jobs.reconcile import ReconcileOptions, run_reconcile
from django_txmsg.spark.lake import Lake
from django_txmsg.spark.lakefile import LakeFile, directory_of
from django_txmsg.spark.runs import Run
from django_txmsg.spark.schemas import INBOX, OUTBOX, Table
from django_txmsg.spark.session import build
from django_txmsg.spark.spec import JobSpec, LakeSpec, SourceSpec

JAR = Path("/usr/share/java/postgresql.jar")

#: The lines of the table at the end: measure, ours, the other, ratio, goal.
LINES: list[tuple[str, str, str, str, str]] = []


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
    return {name: statistics.median(values) for name, values in found.items()}


def measure_write(bench: Bench, count: int) -> None:
    """The write step with two tasks a core against COPY in one process, JDBC, itself
    with one task, and itself on one core."""
    ways: dict[str, Callable[[], float]] = {
        "archive": lambda: bench.write_step(4), "copy": bench.copy_step,
        "one task": bench.write_step, "one core": bench.on_one_core,
    }  # fmt: skip
    if JAR.exists():
        ways["jdbc"] = bench.jdbc_step
    found = turns(ways, count)
    bench.write = found["one task"]
    ours = f"{bench.rows / found['archive']:,.0f} rows/s"
    for name, measure, goal in (
        ("copy", "archive, write step; COPY in one process", "1.5"),
        ("jdbc", "archive, write step; spark.read.jdbc", "2"),
        ("one task", "archive, write step; one task, as it is on two cores", ""),
        ("one core", "archive, write step; all on one core", "1.3"),
    ):
        if name in found:
            other = f"{bench.rows / found[name]:,.0f} rows/s"
            ratio = f"{found[name] / found['archive']:.2f} x"
            LINES.append((measure, ours, other, ratio, goal and f">= {goal} x"))


def measure_archive(bench: Bench) -> None:
    """The whole of `archive`, and where its time goes."""
    if not bench.write:
        bench.write_step()
        bench.write = bench.write_step()
    archiver = bench.archiver()
    started = time.monotonic()
    result = archiver.run()
    spent = time.monotonic() - started
    assert result.rows == bench.rows
    steps = ", ".join(f"{k} {v:.1f} s" for k, v in result.seconds.items())
    print(f"  where archive's time goes: {steps}")
    LINES.append(
        (
            "archive, whole; its write step", f"{spent:.1f} s", f"{bench.write:.1f} s",
            f"{spent / bench.write:.2f} x", "<= 4 x, < 40 s",
        )
    )  # fmt: skip


def measure_replay(bench: Bench, count: int) -> None:
    """`replay` against one process: COPY into staging and the same merge."""
    from django_txmsg.spark.schemas import STAGED
    from django_txmsg.spark.staging import Staging

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
    rates = [f"{rows / spent:,.0f} rows/s" for spent in found.values()]
    ratio = found["copy and merge"] / found["replay"]
    LINES.append(
        ("replay; COPY and merge in one process", *rates, f"{ratio:.2f} x", ">= 1 x")
    )


def measure_latency(bench: Bench) -> None:
    """How long a transaction with one send_message() takes, beside an archive, and
    beside one process that does nothing but read the same table."""
    spans: dict[str, list[tuple[float, float]]] = {"alone": []}

    def during(name: str, work: Callable[[], Any]) -> None:
        started = time.monotonic()
        work()
        spans.setdefault(name, []).append((started, time.monotonic()))

    alone = partial(during, "alone", lambda: time.sleep(5))
    archiver = bench.archiver()
    command = [sys.executable, "-m", "benchmarks._sends", bench.url]
    with subprocess.Popen(
        command,
        cwd=Path(__file__).resolve().parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as sender:
        assert sender.stdout is not None
        sender.stdout.readline()
        alone()
        during("COPY to a client", lambda: read_all(bench))
        alone()
        during("archive", archiver.run)
        alone()
        sends = json.loads(sender.communicate()[0])
    p95: dict[str, float] = {}
    for name, parts in spans.items():
        spent = [
            seconds for instant, seconds in sends
            if any(start <= instant < end for start, end in parts)
        ]  # fmt: skip
        p95[name] = statistics.quantiles(spent, n=20)[18] * 1000
        print(f"  {name}: {len(spent)} sends, p95 {p95[name]:.2f} ms", flush=True)
    for name, goal in (("archive", "<= 1.5 x"), ("COPY to a client", "")):
        LINES.append(
            (
                f"send_message p95 beside {name}; alone", f"{p95[name]:.2f} ms",
                f"{p95['alone']:.2f} ms", f"{p95[name] / p95['alone']:.2f} x", goal,
            )
        )  # fmt: skip


def read_all(bench: Bench) -> None:
    """Read the whole outbox again and again for a while, and do nothing with it."""
    sql = f"COPY (SELECT * FROM {OUTBOX.relation}) TO STDOUT (FORMAT binary)"
    with psycopg.connect(bench.url) as connection, connection.cursor() as cursor:
        until = time.monotonic() + 5
        while time.monotonic() < until:
            with cursor.copy(sql) as copy:
                for _ in copy:
                    pass


def measure_reconcile(spark: SparkSession, lake: LakeSpec, rows: int) -> None:
    """`reconcile` of two services with so many messages each, all in the lake."""
    if not Path(lake.uri).exists():
        fill_lake(spark, lake, rows)
    # Nothing is live: both have the one empty database.
    directory = tempfile.mkdtemp(prefix="txmsg-bench-empty-")
    subprocess.run(
        [sys.executable, "tests/manage.py", "migrate", "-v0", "--skip-checks"],
        cwd=Path(__file__).resolve().parents[1],
        env=os.environ | {"TXMSG_TEST_DIR": directory, "TXMSG_TEST_DATABASE_URL": ""},
        check=True,
    )
    url = f"sqlite:///{directory}/default.sqlite3"
    services = [SourceSpec(name, url) for name in ("a", "b")]
    spec = JobSpec(services=tuple(services), lake=lake)
    started = time.monotonic()
    options = ReconcileOptions(grace=dt.timedelta(0), keep=False)
    found = run_reconcile(spark, spec, options, Run("reconcile", {}))
    spent = time.monotonic() - started
    lost = 2 * sum(1 for number in range(rows) if number % 1000 == 7)
    assert found.counts == {"ok": 2 * rows - lost, "never_received": lost}
    LINES.append(
        (
            f"reconcile, two services, {rows:,} messages each", f"{spent:.0f} s",
            f"JVM at most {peak():.1f} GiB", f"{2 * rows / spent:,.0f}/s",
            "driver has 2 GiB",
        )
    )  # fmt: skip


def peak() -> float:
    """Return the most memory that Spark's JVM, driver and executors in one, has had
    resident: its heap, and all that is beside it."""
    for pid in family(os.getpid()):
        status = Path(f"/proc/{pid}/status").read_text()
        if status.startswith("Name:\tjava"):
            return int(status.partition("VmHWM:")[2].split()[0]) / 2**20
    return 0.0


def fill_lake(spark: SparkSession, lake: LakeSpec, rows: int) -> None:
    """Make a lake in which each of two services has sent the other so many messages,
    of which one in a thousand is lost."""
    ids = spark.range(rows).withColumn("h", sf.md5(sf.col("id").cast("string")))
    sent_at = sf.timestamp_seconds(sf.lit(1_780_000_000) + sf.col("id") / 10)
    for service, other in (("a", "b"), ("b", "a")):
        digits = sf.concat(sf.lit(service), sf.substring("h", 2, 31))
        cuts = ((1, 8), (9, 4), (13, 4), (17, 4), (21, 12))
        parts = [sf.substring(digits, start, size) for start, size in cuts]
        messages = ids.select(
            "id", sf.concat_ws("-", *parts).alias("message_id"),
            sf.lit(f"{other}.in").alias("destination"), sent_at.alias("created_at"),
            sf.to_date(sent_at).alias("day"),
        )  # fmt: skip
        sent = messages.withColumn("dispatched_at", sf.col("created_at"))
        _into_lake(lake, OUTBOX, service, sent)
        got = messages.where("id % 1000 <> 7").withColumns(
            {
                "stage": sf.lit("s"), "deliveries": sf.lit(1),
                "first_received_at": sf.col("created_at"),
                "processed_at": sf.col("created_at"),
            }
        )  # fmt: skip
        _into_lake(lake, INBOX, other, got)


def _into_lake(lake: LakeSpec, table: Table, service: str, rows: DataFrame) -> None:
    place = Lake(lake, create=True).table(table.name, table.lake_struct())
    root = Path(place.root)
    below = Path(directory_of(service, dt.date.min)).parent
    rows.write.partitionBy("day").parquet(str(root / below))
    files = [
        LakeFile(
            str(path.relative_to(root)), service,
            dt.date.fromisoformat(path.parent.name.partition("=")[2]),
            path.stat().st_size, pq.read_metadata(path).num_rows,
            int(path.stat().st_mtime * 1000),
        )
        for path in (root / below).rglob("*.parquet")
    ]  # fmt: skip
    place.commit(place.ensure(), files, metadata={})


def print_table() -> None:
    """Print what was measured, beside what it was measured against."""
    head = ("measure; against", "ours", "other", "ratio", "goal")
    widths = [max(len(line[n]) for line in [head, *LINES]) for n in range(5)]
    print()
    for line in [head, *LINES]:
        cells = [f"{one:{widths[n]}}" for n, one in enumerate(line)]
        print("  ".join(cells).rstrip())


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--messages", type=int, default=5_000_000)
    parser.add_argument("--only", default="write,archive,replay,latency,reconcile")
    parser.add_argument("--database", default="")
    parser.add_argument("--lake", default="")
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
        url = given.database or stand.postgresql()
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
        directory = given.lake or f"{tempfile.mkdtemp(prefix='txmsg-bench-')}/lake"
        measure_reconcile(spark, LakeSpec(directory), given.messages)
        if not given.lake:
            shutil.rmtree(Path(directory).parent)
    spark.stop()
    print_table()


if __name__ == "__main__":
    main()
