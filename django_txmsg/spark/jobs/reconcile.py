"""`reconcile`: who sent what, and did it arrive? Over the logs of all services."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from typing import Any

import pyspark.sql.functions as sf
from pyspark.sql import SparkSession
from pyspark.storagelevel import StorageLevel

from ... import wire
from ..results import result_struct
from ..runs import Run
from ..spec import JobSpec
from ..transforms.reconcile import (
    EXPECTED,
    FINDINGS,
    LOST,
    RECEIVED,
    SENT,
    SUMMARY,
    VERDICT,
    observed,
    reconcile,
    summarise,
)
from .reading import WholeLog

_Subscription = tuple[str, str, dt.datetime]
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)


@dataclass(frozen=True)
class ReconcileOptions:
    """What is judged, and how patiently."""

    since: dt.datetime | None = None
    grace: dt.timedelta = dt.timedelta(hours=1)
    late_after: dt.timedelta = dt.timedelta(hours=1)
    fail_on: str = "lost"
    keep: bool = True
    """Whether findings and summary go into the lake."""


@dataclass
class Reconciliation:
    """Counts of verdicts per destination, and some findings by name."""

    horizon: dt.datetime
    counts: dict[str, int] = field(default_factory=dict)
    destinations: dict[str, dict[str, int]] = field(default_factory=dict)
    examples: list[dict[str, Any]] = field(default_factory=list)

    @property
    def unheard(self) -> list[str]:
        """Destinations from which no service of this run has ever received."""
        silent = {"never_received", "in_flight"}
        return sorted(
            name
            for name, verdicts in self.destinations.items()
            if "never_received" in verdicts and silent.issuperset(verdicts)
        )


def run_reconcile(
    spark: SparkSession, spec: JobSpec, options: ReconcileOptions, run: Run
) -> Reconciliation:
    """Judge every message, keep the findings in the lake, and return the counts."""
    with WholeLog(spark, spec) as log:
        day = (options.since - dt.timedelta(days=1)).date() if options.since else None
        sent = log.read("outbox", SENT, since=day)
        received = log.read("inbox", RECEIVED, since=day)
        if options.since is not None:
            since = sf.timestamp_micros(sf.lit(int(options.since.timestamp() * 1e6)))
            sent = sent.where(sf.col("created_at") >= since)
            received = received.where(
                sf.coalesce("created_at", "first_received_at") >= since
            )
        declared, fresh = _declared(log)
        expected = observed(received).unionByName(
            spark.createDataFrame(declared + fresh, EXPECTED)
        )
        expected = expected.groupBy("destination", "consumer").agg(
            sf.min("since").alias("since")
        )
        horizon = log.horizon(options.grace)
        verdicts = reconcile(
            sent, received, expected, horizon=horizon, late_after=options.late_after
        ).persist(StorageLevel.DISK_ONLY)
        found = Reconciliation(horizon)
        summary = summarise(verdicts)
        per_kind = summary.groupBy("destination", "verdict").agg(
            sf.sum("messages").alias("messages")
        )
        for row in per_kind.collect():
            place = found.destinations.setdefault(row.destination or "?", {})
            place[row.verdict] = row.messages
            found.counts[row.verdict] = found.counts.get(row.verdict, 0) + row.messages
        notable = verdicts.where(sf.col("verdict").isin(*FINDINGS))
        shown = ["verdict", "message_id", "destination", "sender", "consumer"]
        worst = sf.array_position(sf.array(*map(sf.lit, FINDINGS)), sf.col("verdict"))
        examples = (
            notable.orderBy(worst, "sent_at", "message_id")
            .select(*shown, sf.col("sent_at").cast("string").alias("sent_at"))
            .limit(20)
        )
        found.examples = [row.asDict() for row in examples.collect()]
        if options.keep and spec.lake is not None:
            results = run.results(spec.lake, spec.service().service)
            results.save("verdicts", VERDICT, notable)
            results.save("reconciliation", SUMMARY, summary)
            if fresh:
                rows = [dict(zip(EXPECTED.fieldNames(), f, strict=True)) for f in fresh]
                results.save_rows("subscriptions", EXPECTED, rows)
        verdicts.unpersist()
    run.rows = sum(found.counts.values())
    run.counts = dict(found.counts)
    bad = {"lost": LOST, "findings": FINDINGS, "never": ()}[options.fail_on]
    run.findings = any(found.counts.get(kind) for kind in bad)
    return found


def _declared(log: WholeLog) -> tuple[list[_Subscription], list[_Subscription]]:
    """Return the topics' listeners that a run before has seen declared, and new ones.

    What a service declares at first has always been so. What it declares later on is
    expected to receive what is sent from now on.
    """
    known: list[_Subscription] = []
    if log.lake is not None:
        place = log.lake.table("subscriptions", result_struct(EXPECTED))
        # As microseconds: a collected timestamp would be in this machine's time zone.
        rows = place.read(log.spark).withColumn("since", sf.unix_micros("since"))
        known = [
            (
                one.destination,
                one.consumer,
                _EPOCH + dt.timedelta(microseconds=one.since),
            )
            for one in rows.collect()
        ]
    pairs = {(destination, consumer) for destination, consumer, _ in known}
    services = {consumer.partition("/")[0] for _, consumer in pairs}
    now = max(one.taken for one in log.live)
    fresh = [
        (one.destination, consumer, now if one.service in services else _EPOCH)
        for one in log.spec.subscriptions
        if wire.is_topic(one.destination)
        and (one.destination, consumer := f"{one.service}/{one.stage}") not in pairs
    ]
    return known, fresh
