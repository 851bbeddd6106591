"""Compares the pipeline with simpler ways to do the same work. The pipeline and the
other ways run alternately on one database.

    python benchmarks/spark_pipeline.py [--rows 2000000] [--turns 3] [--only archive,…]

JDBC is measured only if Debian's `libpostgresql-jdbc-java` is installed. The start-up
time of the JVM is printed, but no figure includes it. Each way runs once to warm up.
With `--database URL`, the message log stays in that database for the next run.
`reconcile` creates a lake with `--messages` messages from each of two services to the
other, and then adds days of `--day` messages. The option `--only instead` compares
`archive` with a script written by hand. It needs DuckDB (`pip install duckdb`); also
pass `--rows 400000`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
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

from benchmarks import pipeline_reconcile, stand
from benchmarks.pipeline_ways import Bench, fill, turns
from django_txmsg.spark.cli import parsed
from django_txmsg.spark.jobs.outgoing import replay_command
from django_txmsg.spark.runs import Run
from django_txmsg.spark.schemas import OUTBOX
from django_txmsg.spark.session import build
from django_txmsg.spark.spec import JobSpec, LakeSpec

JAR = Path("/usr/share/java/postgresql.jar")

#: The lines of the table at the end: measure, ours, the other, ratio, goal.
LINES: list[tuple[str, str, str, str, str]] = []


def measure_write(bench: Bench, count: int) -> None:
    """Measure the write step of `archive`, in four tasks. Compare it with COPY in one
    process, with JDBC, with the default number of tasks, and with a single core."""
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
    """Measure a whole archive, and each of its steps."""
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


def measure_instead(bench: Bench, count: int) -> None:
    """Measure how long each of five ways takes to archive all rows. Four ways are
    `archive` in one process, the same on all cores as the script is, `archive
    --overlap`, and `archive` with Spark. Each of them is compared to the fifth way, a
    script written by hand. The script reads the rows by COPY, writes Parquet files with
    DuckDB, and ends with DELETE."""
    cores = os.cpu_count() or 1
    everywhere = f"archive --tasks {cores} --purges {cores}"
    found = turns(
        {
            "archive": lambda: bench.archive_step(None),
            everywhere: lambda: bench.archive_step(None, tasks=cores, purges=cores),
            "archive --overlap": lambda: bench.archive_step(None, overlap=True),
            "archive with Spark": lambda: bench.archive_step(bench.spark),
            "DuckDB": bench.duckdb_step,
        },
        count,
    )
    other = found.pop("DuckDB")
    for name, spent in found.items():
        LINES.append(
            (
                f"{name}, whole; COPY, DuckDB's Parquet, DELETE", f"{spent:.1f} s",
                f"{other:.1f} s", f"{spent / other:.2f} x", "<= 1.5 x",
            )
        )  # fmt: skip


def measure_replay(bench: Bench, count: int) -> None:
    """Compare `replay` with one process that copies the rows into the staging table and
    merges them in the same way."""
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
        words = ["--where", f"id <= {rows}", "--name", uuid.uuid4().hex]
        run = Run("replay", {})
        replay_command(spec, parsed(["replay", *words]), run)
        assert run.rows == rows
        return time.monotonic() - started

    def plain() -> float:
        clear()
        started = time.monotonic()
        staging = Staging(bench.source, uuid.uuid4().hex)

        def batches() -> Any:
            left = rows
            for path in sorted(Path(lake.uri, "outbox").rglob("*.parquet")):
                asked = [n for n in names if n not in ("position", "sequence")]
                file = pq.ParquetFile(path)
                columns = [*asked, "created_at", "id"]
                for batch in file.iter_batches(32_768, columns=columns):
                    batch = batch.slice(0, left)
                    left -= batch.num_rows
                    if batch.num_rows:
                        yield pa.RecordBatch.from_arrays(
                            [batch[n] for n in columns],
                            names=[*asked, "position", "sequence"],
                        )

        staged = staging.stage("one", batches())
        assert staging.merge([staged]) == rows
        return time.monotonic() - started

    found = turns({"replay": ours, "copy and merge": plain}, count)
    own, other = (f"{rows / spent:,.0f} rows/s" for spent in found.values())
    ratio = f"{found['copy and merge'] / found['replay']:.2f} x"
    LINES.append(("replay; COPY and merge in one process", own, other, ratio, ">= 1 x"))


def measure_latency(bench: Bench) -> None:
    """Measure a transaction with one `send_message()` while an archive runs, and while
    a process only reads the same table."""
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
    """Read the whole outbox repeatedly for a while, and discard the rows."""
    sql = f"COPY (SELECT * FROM {OUTBOX.relation}) TO STDOUT (FORMAT binary)"
    with psycopg.connect(bench.url) as connection, connection.cursor() as cursor:
        until = time.monotonic() + 5
        while time.monotonic() < until:
            with cursor.copy(sql) as copy:
                for _ in copy:
                    pass


def print_table() -> None:
    """Print each measurement and its comparison."""
    head = ("measure; against", "ours", "other", "ratio", "goal")
    widths = [max(len(line[n]) for line in [head, *LINES]) for n in range(5)]
    print()
    for line in [head, *LINES]:
        cells = [f"{one:{widths[n]}}" for n, one in enumerate(line)]
        print("  ".join(cells).rstrip())


def main() -> None:
    """Run the measurements, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--messages", type=int, default=5_000_000)
    parser.add_argument("--only", default="write,archive,replay,latency,reconcile")
    parser.add_argument("--database", default="")
    parser.add_argument("--day", type=int, default=200_000)
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
        txmsg = {"SERVICE": "bench", "DISPATCH_ON_COMMIT": "off"}
        stand.django(url, txmsg, ["django_txmsg.spark"])
        bench = Bench(spark, url, given.rows)
        fill(url, given.rows)
        if "write" in wanted:
            measure_write(bench, given.turns)
        if "archive" in wanted or "replay" in wanted:
            measure_archive(bench)
        if "replay" in wanted:
            measure_replay(bench, given.turns)
        if "instead" in wanted:
            measure_instead(bench, given.turns)
        if "latency" in wanted:
            fill(url, given.rows)
            measure_latency(bench)
        shutil.rmtree(bench.directory, ignore_errors=True)
    if "reconcile" in wanted:
        LINES.extend(
            pipeline_reconcile.measure(spark, given.messages, given.day, given.turns)
        )
    spark.stop()
    print_table()


if __name__ == "__main__":
    main()
