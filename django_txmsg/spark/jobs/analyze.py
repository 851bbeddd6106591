"""`analyze`: statistics about the flow of messages, as tables in the lake and as an
HTML report."""

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

from ..noted import Noted, Which
from ..report.page import Findings, render
from ..runs import Run
from ..schemas import DEAD_LETTERS, INBOX, OUTBOX, Table
from ..spec import JobSpec
from ..transforms.analyze import (
    BACKLOG,
    GROUPS,
    LATENCY,
    REDELIVERIES,
    SENDERS,
    THROUGHPUT,
    backlog,
    from_due,
    groups,
    percentiles,
    redeliveries,
    senders,
    stage_latencies,
    throughput,
)
from ..transforms.normalise import timestamp
from ..versions import insist_on
from .outcome import Outcome, job_session
from .reading import WholeLog
from .usage import usage

#: Most rows of the report's lists. The lake's tables have them all.
TOP = 25


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
        waiting = backlog(outbox, options.since, until)
        waiting = waiting.persist(StorageLevel.MEMORY_AND_DISK)
        latencies = stage_latencies(from_due(received, outbox))
        latencies = latencies.persist(StorageLevel.MEMORY_AND_DISK)
        grouped = groups(letters)
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
                ("latency", LATENCY, latencies),
                ("dead_letter_groups", GROUPS, grouped),
                ("throughput", THROUGHPUT, throughput(sent, received)),
                ("backlog", BACKLOG, waiting),
                ("redeliveries", REDELIVERIES, redeliveries(received)),
                ("senders", SENDERS, senders(sent)),
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
    flow = _by_hour(throughput(sent, received))
    waiting = _by_hour(backlogs)
    critical = latencies.where("measure = 'critical'")
    times = _by_hour(percentiles(critical, "hour"))
    # To the end of the period: a system that is down has no rows there.
    last = found.until.replace(minute=0, second=0, microsecond=0)
    first = min([*flow, *waiting, *times], default=last)
    last = max([*flow, *times, last])
    count = int((last - first) / dt.timedelta(hours=1)) + 1
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
        for row in percentiles(
            latencies.where("measure = 'processing'"), "receiver", "stage"
        ).collect()
    }
    again = {(row.receiver, row.stage): row for row in redeliveries(received).collect()}
    stages = percentiles(critical, "receiver", "stage").orderBy(
        sf.desc("messages"), "receiver", "stage"
    )
    found.stages = [
        row.asDict()
        | {"handler_p95": handler.get((row.receiver, row.stage)) or 0.0}
        | {"redelivered": again[row.receiver, row.stage].redelivered}
        | {"received": again[row.receiver, row.stage].messages}
        for row in stages.limit(TOP).collect()
    ]
    found.senders = [
        row.asDict()
        for row in senders(sent).orderBy(sf.desc("messages")).limit(TOP).collect()
    ]
    shown = grouped.withColumns(
        {
            name: sf.date_format(name, "dd MMM HH:mm")
            for name in ("first_seen", "last_seen")
        }
    )
    found.groups = [
        row.asDict() for row in shown.orderBy(sf.desc("letters")).limit(TOP).collect()
    ]
    overall = percentiles(critical).collect()
    found.totals = {
        "stored": sum(one or 0 for one in found.throughput["stored"]),
        "processed": sum(one or 0 for one in found.throughput["processed"]),
        "received": sum(row.messages for row in again.values()),
        "redelivered": sum(row.redelivered for row in again.values()),
        "backlog": max((one or 0 for one in levels), default=0),
        "p95": (overall[0].p95 if overall else 0.0) or 0.0,
        "open": grouped.agg(sf.coalesce(sf.sum("open"), sf.lit(0))).collect()[0][0],
    }


def _by_hour(frame: DataFrame) -> dict[dt.datetime, dict[str, Any]]:
    # As seconds: a collected timestamp would be in this machine's time zone.
    rows = frame.withColumn("hour", sf.unix_seconds("hour")).collect()
    return {
        dt.datetime.fromtimestamp(row["hour"], dt.timezone.utc): row.asDict()
        for row in rows
    }


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
