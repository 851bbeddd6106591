"""The cost of `reconcile`: for a whole lake, for a lake with existing journeys, and
after a day of new messages."""

from __future__ import annotations

import dataclasses
import datetime as dt
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow.parquet as pq
import pyspark.sql.functions as sf
from pyspark.sql import DataFrame, SparkSession

from benchmarks.pipeline_ways import peak, turns
from django_txmsg.spark.cli import parsed
from django_txmsg.spark.jobs.reconcile import run_reconcile
from django_txmsg.spark.lake import Lake, app_name
from django_txmsg.spark.lakefile import LakeFile, directory_of
from django_txmsg.spark.ledger import Ledger
from django_txmsg.spark.runs import Run
from django_txmsg.spark.schemas import INBOX, OUTBOX, Table
from django_txmsg.spark.session import SparkProcess
from django_txmsg.spark.spec import JobSpec, LakeSpec, SourceSpec

#: When the first message was sent, in microseconds: at noon, so that each day that is
#: added goes on with the one before.
_BEGUN = 1_767_268_800_000_000


def measure(
    spark: SparkSession, messages: int, day: int, count: int
) -> list[tuple[str, str, str, str, str]]:
    """Measure runs of `reconcile`. The first runs see a lake with `messages` messages
    from each service. Then `day` more messages are added `count` times, with a run
    after each. The last runs use `--since`. Each run reads the empty databases and the
    lake, counts the verdicts, and compares its findings with those of earlier runs.
    Returns the lines of the table."""
    directory = tempfile.mkdtemp(prefix="txmsg-bench-reconcile-")
    subprocess.run(
        [sys.executable, "tests/manage.py", "migrate", "-v0", "--skip-checks"],
        cwd=Path(__file__).resolve().parents[1],
        env=os.environ | {"TXMSG_TEST_DIR": directory, "TXMSG_TEST_DATABASE_URL": ""},
        check=True,
    )
    lake = LakeSpec(f"{directory}/lake")
    source = SourceSpec("a", f"sqlite:///{directory}/default.sqlite3")
    spec = JobSpec((source, dataclasses.replace(source, service="b")), lake)

    def whole() -> float:
        started = time.monotonic()
        given = parsed(["reconcile", "--grace", "0s", "--dry-run"])
        found = run_reconcile(spark, spec, given, Run("reconcile", {}))
        spent = time.monotonic() - started
        assert found.counts == _counts(messages)
        return spent

    fill_lake(spark, lake, source, range(messages), 1, day)
    at_once = turns({"reconcile": whole}, count)["reconcile"]
    # As `follow` does: one process for all runs, whose start is part of the first.
    staying = SparkProcess(spec)
    first = _judged(staying, _counts(messages))
    again = _judged(staying, _counts(messages))
    days, until = [], messages
    for number in range(count):
        until += day
        fill_lake(spark, lake, source, range(until - day, until), 2 + number, day)
        days.append(_judged(staying, _counts(until)))
    staying.stop()
    last_sent = dt.datetime.fromtimestamp(
        (_BEGUN + until * (86_400_000_000 // day)) / 1e6, dt.timezone.utc
    )
    since = (last_sent - dt.timedelta(hours=24)).isoformat()
    once = SparkProcess(spec)
    late = _judged(once, None, "--since", since)
    late_again = _judged(once, None, "--since", since)
    once.stop()
    print(f"  the first run with journeys: {first:.1f}", flush=True)
    print("  the next days: " + ", ".join(f"{one:.1f}" for one in days), flush=True)
    print(f"  JVM at most {peak():.1f} GiB")
    shutil.rmtree(directory)
    name, following = f"reconcile 2 x {messages:,}", statistics.median(days)
    return [
        (what, f"{spent:.1f} s", f"{other:.1f} s", f"{other / spent:.2f} x", "")
        for what, spent, other in (
            (f"{name} making journeys; nothing kept", first, at_once),
            ("nothing new; that first run", again, first),
            (f"2 x {day:,} more; that first run", following, first),
            ("the last 24 h, a process of its own; that", late, first),
            ("the last 24 h, the process stays; that", late_again, first),
        )
    ]


def _judged(runs: SparkProcess, counts: dict[str, int] | None, *words: str) -> float:
    """Return the duration of a run in seconds. Fails if its verdicts differ from
    `counts`."""
    started = time.monotonic()
    runs.start("reconcile", "--grace", "0s", *words)
    while (facts := runs.poll()) is None:
        time.sleep(0.02)
    spent = time.monotonic() - started
    assert facts.get("state") == ("findings" if counts else facts.get("state")), facts
    assert counts is None or facts["counts"] == counts
    return spent


def _counts(until: int) -> dict[str, int]:
    lost = 2 * sum(1 for number in range(until) if number % 1000 == 7)
    return {"ok": 2 * until - lost, "never_received": lost}


def fill_lake(
    spark: SparkSession,
    lake: LakeSpec,
    source: SourceSpec,
    numbers: range,
    batch: int,
    day: int,
) -> None:
    """Archive messages with these numbers as one settled batch. Each of two services
    has sent `day` messages a day to the other. One in twenty goes to a topic, the
    others to a queue. One in a thousand of the messages is lost on its way to the
    queue."""
    ids = spark.range(numbers.start, numbers.stop)
    ids = ids.withColumn("h", sf.md5(sf.col("id").cast("string")))
    ids = ids.withColumn("batch_id", sf.lit(batch).cast("long"))
    each = 86_400_000_000 // day
    sent_at = sf.timestamp_micros(sf.lit(_BEGUN) + sf.col("id") * each)
    for service, other in (("a", "b"), ("b", "a")):
        digits = sf.concat(sf.lit(service), sf.substring("h", 2, 31))
        cuts = ((1, 8), (9, 4), (13, 4), (17, 4), (21, 12))
        parts = [sf.substring(digits, start, size) for start, size in cuts]
        messages = ids.select(
            "id", sf.concat_ws("-", *parts).alias("message_id"), "batch_id",
            sf.when(sf.col("id") % 20 == 3, f"topic:{other}.news")
            .otherwise(f"{other}.in").alias("destination"),
            sent_at.alias("created_at"), sent_at.alias("due_at"),
            sf.to_date(sent_at).alias("day"),
        )  # fmt: skip
        sent = messages.withColumn("dispatched_at", sf.col("created_at"))
        _into_lake(lake, OUTBOX, service, sent, source, batch)
        got = messages.where("id % 1000 <> 7").withColumns(
            {
                "stage": sf.lit("s"), "deliveries": sf.lit(1), "attempts": sf.lit(1),
                "first_received_at": sf.col("created_at"),
                "processed_at": sf.col("created_at"),
            }
        )  # fmt: skip
        _into_lake(lake, INBOX, other, got, source, batch)


def _into_lake(
    lake: LakeSpec, table: Table, service: str, rows: DataFrame, source: SourceSpec,
    batch: int,
) -> None:  # fmt: skip
    place = Lake(lake, create=True).table(table.name, table.lake_struct())
    root = Path(place.root)
    below = Path(directory_of(service, dt.date.min)).parent
    there = set((root / below).rglob("*.parquet"))
    rows.write.partitionBy("day").mode("append").parquet(str(root / below))
    files = [
        LakeFile(
            str(path.relative_to(root)), service,
            dt.date.fromisoformat(path.parent.name.partition("=")[2]),
            path.stat().st_size, pq.read_metadata(path).num_rows,
            int(path.stat().st_mtime * 1000), (batch, batch),
        )
        for path in set((root / below).rglob("*.parquet")) - there
    ]  # fmt: skip
    delta = place.ensure()
    app = app_name("archive", service, table.name)
    place.commit(delta, files, metadata={}, app=(app, batch))
    ledger = Ledger(source, table)
    ledger.place(str(delta.metadata().id), lake.uri, batch)
    ledger.close()
