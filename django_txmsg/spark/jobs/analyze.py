"""`analyze`: statistics about the flow of messages, and the costs of each service, as
tables in the lake and as an HTML report.

Latencies are stored as one sketch for each stage and hour. Unlike percentiles, sketches
can be merged over hours, days and destinations.
"""

from __future__ import annotations

import argparse
import datetime as dt
from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import pyspark.sql.functions as sf
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import types as t

from ..engine import insist_on
from ..lake import Lake
from ..noted import Noted, Which
from ..report import Findings, render
from ..results import result_struct
from ..runs import RUN, Run
from ..schemas import DEAD_LETTERS, INBOX, OUTBOX, TABLES, struct_of
from ..spec import JobSpec
from ..transforms import timestamp
from ..transforms.journeys import due_at
from .reading import WholeLog, day_of
from .running import job_session

#: Most rows of the report's lists. The lake's tables have them all.
TOP = 25
#: Days whose bytes the report shows, and days over which it averages them.
SHOWN, AVERAGED = 30, 7


def run_analyze(
    spark: SparkSession, spec: JobSpec, since: dt.datetime, run: Run, *, keep: bool
) -> Findings:
    """Analyse the messages since an instant, and return the report's data. With `keep`,
    store the tables in the lake."""
    with WholeLog(spark, spec) as log:
        until = max(one.taken for one in log.live)
        day, start = day_of(since), timestamp(since)
        # Messages that waited at the beginning may have been stored at any time before.
        outbox = log.read(OUTBOX.name, _SENT)
        sent = outbox.where(sf.col("created_at") >= start)
        received = log.read(INBOX.name, _RECEIVED, since=day).where(
            sf.col("first_received_at") >= start
        )
        letters = log.read(DEAD_LETTERS.name, _LETTERS, since=day).where(
            sf.col("created_at") >= start
        )
        log.release()
        sent, received, letters = (one.persist() for one in (sent, received, letters))
        waiting = backlog(outbox, since, until).persist()
        latencies = stage_latencies(from_due(received, outbox)).persist()
        frames = {
            "latency": (LATENCY, latencies),
            "dead_letter_groups": (GROUPS, groups(letters)),
            "throughput": (THROUGHPUT, throughput(sent, received)),
            "backlog": (BACKLOG, waiting),
            "redeliveries": (REDELIVERIES, redeliveries(received)),
            "senders": (SENDERS, senders(sent)),
        }
        found = Findings(
            services=[one.service for one in spec.services],
            since=since.astimezone(dt.timezone.utc),
            until=until.astimezone(dt.timezone.utc),
        )
        _fill(found, {name: frame for name, (_, frame) in frames.items()})
        add_findings(found, Noted(spec.service()))
        found.usage = usage(log, since)
        if keep and spec.lake is not None:
            results = run.results(spec.lake, spec.service().service)
            for name, (struct, frame) in frames.items():
                results.save(name, struct, frame)
        for one in (sent, received, letters, latencies, waiting):
            one.unpersist()
    run.rows = int(found.totals["stored"] + found.totals["received"])
    run.counts = dict(found.totals)
    return found


def add_findings(found: Findings, noted: Noted) -> None:
    """Add the findings of the last `reconcile` to the report, with operators' notes."""
    if (last := noted.last_run()) is None:
        return
    found.judged_at, found.verdicts = last.started_at, last.counts
    unseen = noted.read(Which(acknowledged=False))
    found.lost = [*unseen, *noted.read(Which(acknowledged=True))][:TOP]
    found.unseen = len(unseen)


def _fill(found: Findings, frames: Mapping[str, DataFrame]) -> None:
    """Collect the data of the report from its tables: one row for each hour, and one
    row for each stage."""
    latencies, grouped = frames["latency"], frames["dead_letter_groups"]
    critical = latencies.where("measure = 'critical'")
    by_hour = (
        frames["throughput"]
        .join(frames["backlog"], "hour", "full")
        .join(percentiles(critical, "hour"), "hour", "full")
    )
    # Unlike collect(), Arrow returns instants with their time zone.
    rows = {row["hour"]: row for row in by_hour.toArrow().to_pylist()}
    # To the end of the period: a system that is down has no rows there. Rows of a clock
    # that is ahead are left out.
    last = found.until.replace(minute=0, second=0, microsecond=0)
    first = min(rows, default=last)
    count = max(0, int((last - first) / dt.timedelta(hours=1))) + 1
    found.hours = [first + dt.timedelta(hours=number) for number in range(count)]
    hours = [rows.get(hour, {}) for hour in found.hours]
    for kind in ("stored", "dispatched", "processed", "buried"):
        found.throughput[kind] = [row.get(kind) or 0 for row in hours]
    for rank in ("p50", "p95", "p99"):
        found.critical[rank] = [row.get(rank) for row in hours]
    levels = [0.0]
    for row in hours:
        level = row.get("backlog")
        levels.append(levels[-1] if level is None else level)
    found.backlog = levels[1:]
    stage = ["receiver", "stage"]
    handled = percentiles(latencies.where("measure = 'processing'"), *stage)
    again = frames["redeliveries"].withColumnRenamed("messages", "received")
    stages = (
        percentiles(critical, *stage)
        .join(handled.select(*stage, handled.p95.alias("handler_p95")), stage, "left")
        .join(again.select(*stage, "received", "redelivered"), stage)
        .fillna(0.0, ["handler_p95"])
    )
    found.stages = _first(stages.orderBy(sf.desc("messages"), *stage))
    [(received_in_all, redelivered)] = again.agg(
        *[sf.coalesce(sf.sum(one), sf.lit(0)) for one in ("received", "redelivered")]
    ).collect()
    found.senders = _first(frames["senders"].orderBy(sf.desc("messages")))
    found.groups = _first(grouped.orderBy(sf.desc("letters")))
    overall = percentiles(critical).collect()
    found.totals = {
        "stored": sum(one or 0 for one in found.throughput["stored"]),
        "processed": sum(one or 0 for one in found.throughput["processed"]),
        "received": received_in_all,
        "redelivered": redelivered,
        "backlog": max(levels),
        "p95": (overall[0].p95 if overall else 0.0) or 0.0,
        "open": grouped.agg(sf.coalesce(sf.sum("open"), sf.lit(0))).collect()[0][0],
    }


def _first(frame: DataFrame) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = frame.limit(TOP).toArrow().to_pylist()
    return rows


_SENT = OUTBOX.narrow((
    "service", "message_id", "destination", "created_at", "due_at", "attempts",
    "dispatched_at", "dead_at", "cancelled_at",
))  # fmt: skip
_RECEIVED = INBOX.narrow((
    "service", "stage", "message_id", "destination", "created_at",
    "first_received_at", "started_at", "processed_at", "dead_at", "deliveries",
    "attempts",
))  # fmt: skip
_LETTERS = DEAD_LETTERS.narrow((
    "service", "stage", "reason", "exception", "fingerprint", "resolution",
    "created_at",
))  # fmt: skip


def usage(log: WholeLog, since: dt.datetime) -> list[dict[str, Any]]:
    """Return the usage of each service, the largest first. `seconds` is the total time
    that the service's runs have taken since an instant. The runs of `follow` itself are
    left out, because they never end. The runs that `follow` starts are included."""
    if log.lake is None:
        return []
    found = in_lake(log.lake)
    kept = log.lake.table("runs", result_struct(RUN)).read(log.spark)
    seconds = (sf.unix_micros("finished_at") - sf.unix_micros("started_at")) / 1e6
    runs = kept.where(
        (sf.col("job") != "follow") & (sf.col("started_at") >= timestamp(since))
    )
    by_service = runs.groupBy("service").agg(sf.sum(seconds)).collect()
    spent = {row[0]: row[1] for row in by_service}
    return [one | {"seconds": spent.get(one["service"]) or 0.0} for one in found]


def in_lake(lake: Lake) -> list[dict[str, Any]]:
    """Return the bytes and files of each service, from the logs of all tables.

    `growth` lists the archived bytes of each of the SHOWN days up to the newest
    archived day. `a_day` is the average over the last AVERAGED of these days. A message
    counts for the day on which it was stored, so the latest days may not be archived
    yet.
    """
    services: defaultdict[str, Counter[str]] = defaultdict(Counter)
    days: defaultdict[str, Counter[dt.date]] = defaultdict(Counter)
    for name in lake.names():
        for file in lake.table(name, t.StructType()).named():
            results = 0 if name in TABLES else file.size
            services[file.service].update(files=1, bytes=file.size, results=results)
            if name in TABLES:
                days[file.service][file.day] += file.size
    found = [
        {"service": service, **one, **_growth(days[service])}
        for service, one in services.items()
    ]
    return sorted(found, key=lambda one: (-one["bytes"], one["service"]))


def _growth(days: Counter[dt.date]) -> dict[str, Any]:
    if not days:
        return {"growth": [], "a_day": 0.0}
    newest = max(days)
    growth = [days[newest - dt.timedelta(days=ago)] for ago in reversed(range(SHOWN))]
    counted = min(AVERAGED, (newest - min(days)).days + 1)
    return {"growth": growth, "a_day": sum(growth[-counted:]) / counted}


LATENCY = struct_of(
    "receiver string, stage string, destination string, hour timestamp, "
    "measure string, messages long, negative long, longest double, sketch binary"
)

#: Each measure, and the instants it lies between, all from the receiver's row.
MEASURES = {
    "critical": ("created_at", "processed_at"),
    "transit": ("created_at", "first_received_at"),
    "processing": ("started_at", "processed_at"),
}


def from_due(received: DataFrame, sent: DataFrame) -> DataFrame:
    """Return the inbox rows. For a delayed message, `created_at` is its due time,
    because an intended delay is not latency."""
    delayed = sent.where(due_at() > sf.col("created_at"))
    due = delayed.groupBy("message_id").agg(sf.min(due_at()).alias("wanted_at"))
    wanted = sf.coalesce("wanted_at", "created_at")
    return (
        received.join(due, "message_id", "left")
        .withColumn("created_at", wanted)
        .select(*received.columns)
    )


def stage_latencies(received: DataFrame) -> DataFrame:
    """Return LATENCY rows for the processed inbox rows, in seconds.

    A latency is negative if two clocks differ. Negative values stay in the sketch. They
    are also counted separately, so that nobody mistakes them for speed.
    """
    processed = received.where("processed_at IS NOT NULL")
    times = sf.array(
        *[
            sf.struct(sf.lit(name).alias("measure"), _seconds(*ends).alias("seconds"))
            for name, ends in MEASURES.items()
        ]
    )
    each = processed.select(
        sf.col("service").alias("receiver"),
        "stage",
        "destination",
        sf.date_trunc("hour", "processed_at").alias("hour"),
        sf.inline(times),
    ).where("seconds IS NOT NULL")
    return each.groupBy("receiver", "stage", "destination", "hour", "measure").agg(
        sf.count("*").alias("messages"),
        sf.count_if(sf.col("seconds") < 0).alias("negative"),
        sf.max("seconds").alias("longest"),
        sf.kll_sketch_agg_double("seconds").alias("sketch"),
    )


def percentiles(latencies: DataFrame, *by: str) -> DataFrame:
    """Return the percentiles for each combination of values in the columns `by`,
    computed from the sketches of LATENCY rows."""
    merged = latencies.groupBy(*by).agg(
        sf.sum("messages").alias("messages"),
        sf.sum("negative").alias("negative"),
        sf.max("longest").alias("longest"),
        sf.kll_merge_agg_double("sketch").alias("sketch"),
    )
    return merged.select(
        *by,
        "messages",
        "negative",
        *[_quantile(rank).alias(f"p{rank}") for rank in (50, 95, 99)],
        "longest",
    )


def _quantile(rank: int) -> Column:
    # Without any message there is no percentile, and no sketch to query.
    found = sf.kll_sketch_get_quantile_double("sketch", sf.lit(rank / 100))
    return sf.when(sf.col("messages") > 0, found)


def _seconds(start: str, end: str) -> Column:
    return (sf.unix_micros(end) - sf.unix_micros(start)) / 1e6


THROUGHPUT = struct_of(
    "hour timestamp, stored long, dispatched long, processed long, buried long"
)

BACKLOG = struct_of("hour timestamp, backlog long")

REDELIVERIES = struct_of(
    "receiver string, stage string, messages long, redelivered long, "
    "deliveries long, attempts long, dead long"
)

SENDERS = struct_of("sender string, destination string, messages long, dead long")


def throughput(sent: DataFrame, received: DataFrame) -> DataFrame:
    """Return THROUGHPUT rows: for each hour, the number of messages that reached each
    state."""
    events = [
        frame.select(
            sf.date_trunc("hour", instant).alias("hour"), sf.lit(kind).alias("kind")
        )
        for frame, kind, instant in (
            (sent, "stored", "created_at"),
            (sent, "dispatched", "dispatched_at"),
            (received, "processed", "processed_at"),
            (received, "buried", "dead_at"),
        )
    ]
    whole = reduce(DataFrame.unionByName, events).where("hour IS NOT NULL")
    by_kind = whole.groupBy("hour").pivot("kind", [*THROUGHPUT.fieldNames()[1:]])
    return by_kind.count().fillna(0)


def backlog(sent: DataFrame, since: dt.datetime, until: dt.datetime) -> DataFrame:
    """Return BACKLOG rows: for the end of each hour, the number of messages that were
    due, but not dispatched. Messages that were already waiting at `since` are included.
    Messages that are due after `until` are left out."""
    left = sf.coalesce("dispatched_at", "dead_at")
    start = timestamp(since)
    stored, gone, dead = (sf.col(n) for n in ("created_at", "dispatched_at", "dead_at"))
    # In a form by which Spark skips the parts of the lake's files that ended before.
    sent = sent.where(
        (stored >= start)
        | (gone >= start)
        | (gone.isNull() & ((dead >= start) | dead.isNull()))
    )
    sent = sent.withColumn("wanted_at", due_at()).where(
        (sf.col("wanted_at") <= timestamp(until))
        & (left.isNull() | (left >= sf.col("wanted_at")))
    )
    came = sf.date_trunc("hour", sf.greatest("wanted_at", start)).alias("hour")
    changes = sent.select(came, sf.lit(1).alias("change")).unionByName(
        sent.where(left.isNotNull()).select(
            sf.date_trunc("hour", left).alias("hour"), sf.lit(-1).alias("change")
        )
    )
    hours = changes.groupBy("hour").agg(sf.sum("change").alias("change"))
    # As many rows as there are hours: one partition is enough for years.
    so_far = Window.orderBy("hour").rowsBetween(Window.unboundedPreceding, 0)
    return hours.select("hour", sf.sum("change").over(so_far).alias("backlog"))


def redeliveries(received: DataFrame) -> DataFrame:
    """Return REDELIVERIES rows: for each stage, the number of messages that were
    delivered more than once, tried again, or given up."""
    again = (sf.col("deliveries") > 1) | (sf.col("attempts") > 1)
    return received.groupBy(sf.col("service").alias("receiver"), "stage").agg(
        sf.count("*").alias("messages"),
        sf.count_if(again).alias("redelivered"),
        sf.sum("deliveries").cast("long").alias("deliveries"),
        sf.sum("attempts").cast("long").alias("attempts"),
        sf.count("dead_at").alias("dead"),
    )


def senders(sent: DataFrame) -> DataFrame:
    """Return SENDERS rows: the number of messages from each sender to each destination.
    Cancelled messages do not count as failed."""
    failed = sf.col("cancelled_at").isNull()
    return sent.groupBy(sf.col("service").alias("sender"), "destination").agg(
        sf.count("*").alias("messages"),
        sf.count(sf.when(failed, sf.col("dead_at"))).alias("dead"),
    )


#: Parts of the period for which a group's dead letters are counted.
BUCKETS = 24

GROUPS = struct_of(
    "group string, receiver string, stage string, reason string, exception string, "
    "letters long, open long, first_seen timestamp, last_seen timestamp"
).add("growth", t.ArrayType(t.LongType()))


def groups(letters: DataFrame) -> DataFrame:
    """Return GROUPS rows: the dead letters by fingerprint, service, stage and reason.
    The column `growth` has the number of dead letters in each of BUCKETS equal parts
    of the period."""
    marked = letters.withColumnRenamed("fingerprint", "group")
    # Over all groups, so that their small charts share an axis.
    ends = marked.agg(
        sf.unix_micros(sf.min("created_at")).alias("low"),
        sf.unix_micros(sf.max("created_at")).alias("high"),
    )
    width = sf.greatest(sf.col("high") - sf.col("low"), sf.lit(1))
    place = (sf.unix_micros("created_at") - sf.col("low")) * BUCKETS / width
    bucket = sf.least(sf.floor(place), sf.lit(BUCKETS - 1))
    placed = marked.crossJoin(sf.broadcast(ends)).withColumn("bucket", bucket)
    counts = [sf.count_if(sf.col("bucket") == number) for number in range(BUCKETS)]
    return placed.groupBy(
        "group", sf.col("service").alias("receiver"), "stage", "reason"
    ).agg(
        sf.max_by("exception", "created_at").alias("exception"),
        sf.count("*").alias("letters"),
        sf.count_if(sf.col("resolution") == "open").alias("open"),
        sf.min("created_at").alias("first_seen"),
        sf.max("created_at").alias("last_seen"),
        sf.array(*counts).alias("growth"),
    )


def analyze_command(spec: JobSpec, given: argparse.Namespace, run: Run) -> None:
    """Run the analysis, and list stages and dead letters. Raises PipelineError."""
    insist_on("4.1.2", "analyze")  # its sketches of latencies
    keep = not given.dry_run
    with job_session(given) as spark:
        found = run_analyze(spark, spec, given.since, run, keep=keep)
    run.lines = [
        f"  {row['receiver']}/{row['stage']}: {row['messages']:,} messages, 95 % "
        f"within {row['p95']:.3f} s, {row['redelivered']:,} of {row['received']:,} "
        "redelivered"
        for row in found.stages
    ]
    run.lines += [
        f"  {row['letters']:,} dead letters ({row['open']:,} open): "
        f"{row['exception'].partition(chr(10))[0][:100] or row['reason']}"
        for row in found.groups
    ]
    if html := given.html if keep else "":
        Path(html).write_text(render(found), encoding="utf-8")
        run.lines.append(f"The report is in {html}.")
    run.facts |= {
        "stages": found.stages, "groups": found.groups, "usage": found.usage,
        "html": html,
    }  # fmt: skip
