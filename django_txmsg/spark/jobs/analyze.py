"""`analyze`: statistics about the flow of messages, and the costs of each service, as
tables in the lake and as an HTML report."""

from __future__ import annotations

import argparse
import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyspark.sql.functions as sf
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as t
from pyspark.storagelevel import StorageLevel

from ..engine import insist_on
from ..lake import Lake
from ..noted import Noted, Which
from ..report import Findings, render
from ..results import result_struct
from ..runs import RUN, Run
from ..schemas import DEAD_LETTERS, INBOX, OUTBOX, TABLES, Table
from ..spec import JobSpec
from ..transforms import analyze as tables
from ..transforms import timestamp
from .outcome import Outcome, job_session
from .reading import WholeLog

#: Most rows of the report's lists. The lake's tables have them all.
TOP = 25
#: Days whose bytes the report shows, and days over which it averages them.
SHOWN, AVERAGED = 30, 7


@dataclass(frozen=True)
class AnalyzeOptions:
    """The options of `analyze`."""

    since: dt.datetime
    html: str = ""
    keep: bool = True


def run_analyze(
    spark: SparkSession, spec: JobSpec, options: AnalyzeOptions, run: Run
) -> Findings:
    """Analyse the messages since an instant, store the tables in the lake, and write
    the report."""
    with WholeLog(spark, spec) as log:
        until = max(one.taken for one in log.live)
        day = (options.since - dt.timedelta(days=1)).date()
        start = timestamp(options.since)
        # Messages that waited at the beginning may have been stored at any time before.
        outbox = _narrow(log, OUTBOX, _SENT)
        sent = outbox.where(sf.col("created_at") >= start)
        received = _narrow(log, INBOX, _RECEIVED, day).where(
            sf.col("first_received_at") >= start
        )
        letters = _narrow(log, DEAD_LETTERS, _LETTERS, day).where(
            sf.col("created_at") >= start
        )
        log.release()
        sent, received, letters = (
            one.persist(StorageLevel.MEMORY_AND_DISK)
            for one in (sent, received, letters)
        )
        waiting = tables.backlog(outbox, options.since, until)
        waiting = waiting.persist(StorageLevel.MEMORY_AND_DISK)
        latencies = tables.stage_latencies(tables.from_due(received, outbox))
        latencies = latencies.persist(StorageLevel.MEMORY_AND_DISK)
        grouped = tables.groups(letters)
        found = Findings(
            services=[one.service for one in spec.services],
            since=options.since.astimezone(dt.timezone.utc),
            until=until.astimezone(dt.timezone.utc),
        )
        _fill(found, sent, received, waiting, latencies, grouped)
        add_findings(found, Noted(spec.service()))
        found.usage = usage(log, options.since)
        if options.keep and spec.lake is not None:
            results = run.results(spec.lake, spec.service().service)
            for name, struct, frame in (
                ("latency", tables.LATENCY, latencies),
                ("dead_letter_groups", tables.GROUPS, grouped),
                ("throughput", tables.THROUGHPUT, tables.throughput(sent, received)),
                ("backlog", tables.BACKLOG, waiting),
                ("redeliveries", tables.REDELIVERIES, tables.redeliveries(received)),
                ("senders", tables.SENDERS, tables.senders(sent)),
            ):
                results.save(name, struct, frame)
        for one in (sent, received, letters, latencies, waiting):
            one.unpersist()
    if options.html:
        Path(options.html).write_text(render(found), encoding="utf-8")
    run.rows = int(found.totals["stored"] + found.totals["received"])
    run.counts = dict(found.totals)
    return found


def add_findings(found: Findings, noted: Noted) -> None:
    """Add the findings of the last `reconcile` to the report, with operators' notes."""
    if (last := noted.last_run()) is None:
        return
    found.judged_at, found.verdicts = last
    for seen in (False, True):
        found.lost = [*found.lost, *noted.read(Which(acknowledged=seen), TOP)][:TOP]
    found.unseen = sum(noted.count(Which(acknowledged=False)).values())


def _fill(
    found: Findings,
    sent: DataFrame,
    received: DataFrame,
    backlogs: DataFrame,
    latencies: DataFrame,
    grouped: DataFrame,
) -> None:
    """Collect the data of the report: one row for each hour, and one row for each
    stage."""
    flow = _by_hour(tables.throughput(sent, received))
    waiting = _by_hour(backlogs)
    critical = latencies.where("measure = 'critical'")
    times = _by_hour(tables.percentiles(critical, "hour"))
    # To the end of the period: a system that is down has no rows there. Rows of a clock
    # that is ahead are left out.
    last = found.until.replace(minute=0, second=0, microsecond=0)
    first = min([*flow, *waiting, *times], default=last)
    count = max(0, int((last - first) / dt.timedelta(hours=1))) + 1
    found.hours = [first + dt.timedelta(hours=number) for number in range(count)]
    for kind in ("stored", "dispatched", "processed", "buried"):
        found.throughput[kind] = [
            flow[hour][kind] if hour in flow else 0 for hour in found.hours
        ]
    level = 0.0
    levels: list[float | None] = []
    for hour in found.hours:
        level = waiting[hour]["backlog"] if hour in waiting else level
        levels.append(level)
    found.backlog = levels
    for rank in ("p50", "p95", "p99"):
        found.critical[rank] = [
            times[hour][rank] if hour in times else None for hour in found.hours
        ]
    handler = {
        (row.receiver, row.stage): row.p95
        for row in tables.percentiles(
            latencies.where("measure = 'processing'"), "receiver", "stage"
        ).collect()
    }
    again = {
        (row.receiver, row.stage): row
        for row in tables.redeliveries(received).collect()
    }
    stages = tables.percentiles(critical, "receiver", "stage").orderBy(
        sf.desc("messages"), "receiver", "stage"
    )
    found.stages = [
        row
        | {"handler_p95": handler.get((row["receiver"], row["stage"])) or 0.0}
        | {"redelivered": again[row["receiver"], row["stage"]].redelivered}
        | {"received": again[row["receiver"], row["stage"]].messages}
        for row in _first(stages)
    ]
    found.senders = _first(tables.senders(sent).orderBy(sf.desc("messages")))
    shown = grouped.withColumns(
        {
            name: sf.date_format(name, "dd MMM HH:mm")
            for name in ("first_seen", "last_seen")
        }
    )
    found.groups = _first(shown.orderBy(sf.desc("letters")))
    overall = tables.percentiles(critical).collect()
    found.totals = {
        "stored": sum(one or 0 for one in found.throughput["stored"]),
        "processed": sum(one or 0 for one in found.throughput["processed"]),
        "received": sum(row.messages for row in again.values()),
        "redelivered": sum(row.redelivered for row in again.values()),
        "backlog": max((one or 0 for one in levels), default=0),
        "p95": (overall[0].p95 if overall else 0.0) or 0.0,
        "open": grouped.agg(sf.coalesce(sf.sum("open"), sf.lit(0))).collect()[0][0],
    }


def _first(frame: DataFrame) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = frame.limit(TOP).toArrow().to_pylist()
    return rows


def _by_hour(frame: DataFrame) -> dict[dt.datetime, dict[str, Any]]:
    # Unlike collect(), Arrow returns instants with their time zone.
    return {row["hour"]: row for row in frame.toArrow().to_pylist()}


_SENT = (
    "service", "message_id", "destination", "created_at", "due_at", "attempts",
    "dispatched_at", "dead_at", "cancelled_at",
)  # fmt: skip
_RECEIVED = (
    "service", "stage", "message_id", "destination", "created_at",
    "first_received_at", "started_at", "processed_at", "dead_at", "deliveries",
    "attempts",
)  # fmt: skip
_LETTERS = (
    "service", "stage", "reason", "exception", "fingerprint", "resolution",
    "created_at",
)  # fmt: skip


def _narrow(
    log: WholeLog, table: Table, names: Sequence[str], day: dt.date | None = None
) -> DataFrame:
    fields = {f.name: f for f in table.struct().fields}
    return log.read(table.name, t.StructType([fields[n] for n in names]), since=day)


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
    spent = {
        row.service: row.seconds
        for row in runs.groupBy("service")
        .agg(sf.sum(seconds).alias("seconds"))
        .collect()
    }
    return [one | {"seconds": spent.get(one["service"]) or 0.0} for one in found]


def in_lake(lake: Lake) -> list[dict[str, Any]]:
    """Return the bytes and files of each service, from the logs of all tables.

    `growth` lists the archived bytes of each of the SHOWN days up to the newest
    archived day. `a_day` is the average over the last AVERAGED of these days. A message
    counts for the day on which it was stored, so the latest days may not be archived
    yet.
    """
    services: dict[str, dict[str, Any]] = {}
    days: dict[str, dict[dt.date, int]] = {}
    for name in lake.names():
        for file in lake.table(name, t.StructType()).named():
            new = {"service": file.service, "bytes": 0, "files": 0, "results": 0}
            one = services.setdefault(file.service, new)
            one["files"] += 1
            one["bytes"] += file.size
            if name in TABLES:
                day = days.setdefault(file.service, {})
                day[file.day] = day.get(file.day, 0) + file.size
            else:
                one["results"] += file.size
    for service, one in services.items():
        one |= _growth(days.get(service, {}))
    return sorted(services.values(), key=lambda one: (-one["bytes"], one["service"]))


def _growth(days: dict[dt.date, int]) -> dict[str, Any]:
    if not days:
        return {"growth": [], "a_day": 0.0}
    newest = max(days)
    growth = [
        days.get(newest - dt.timedelta(days=ago), 0) for ago in reversed(range(SHOWN))
    ]
    counted = min(AVERAGED, (newest - min(days)).days + 1)
    return {"growth": growth, "a_day": sum(growth[-counted:]) / counted}


def analyze_command(spec: JobSpec, given: argparse.Namespace, run: Run) -> Outcome:
    """Run the analysis, and return a summary of stages and dead letters. Raises
    PipelineError."""
    insist_on("4.1.2", "analyze")  # its sketches of latencies
    options = AnalyzeOptions(
        since=given.since,
        html="" if given.dry_run else given.html,
        keep=not given.dry_run,
    )
    with job_session(given) as spark:
        found = run_analyze(spark, spec, options, run)
    lines = [
        f"  {row['receiver']}/{row['stage']}: {row['messages']:,} messages, 95 % "
        f"within {row['p95']:.3f} s, {row['redelivered']:,} of {row['received']:,} "
        "redelivered"
        for row in found.stages
    ]
    lines += [
        f"  {row['letters']:,} dead letters ({row['open']:,} open): "
        f"{row['exception'].partition(chr(10))[0][:100] or row['reason']}"
        for row in found.groups
    ]
    lines += [
        f"  {row['service']}: {row['bytes'] / 1e6:,.1f} MB in {row['files']:,} files "
        f"of the lake, {row['a_day'] / 1e6:,.1f} MB more a day"
        for row in found.usage
    ]
    if options.html:
        lines.append(f"The report is in {options.html}.")
    facts = {
        "stages": found.stages, "groups": found.groups, "usage": found.usage,
        "html": options.html,
    }  # fmt: skip
    return Outcome(lines, facts)
