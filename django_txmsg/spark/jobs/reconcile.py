"""`reconcile`: compares what was sent with what arrived, over the logs of all
services."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pyspark.sql.functions as sf
from pyspark.sql import DataFrame, SparkSession
from pyspark.storagelevel import StorageLevel

from ... import wire
from ..lakelog import Named
from ..noted import MOST, Noted
from ..results import result_struct
from ..runs import Run
from ..spec import JobSpec
from ..tally import Line
from ..transforms.instants import timestamp
from ..transforms.journeys import is_topic
from ..transforms.reconcile import (
    EXPECTED,
    FINDING,
    FINDINGS,
    LOST,
    SUMMARY,
    aged,
    findings,
    judge,
    observed,
    outcome,
    reconcile,
    summary,
)
from .counted import as_outcome, usable
from .findings import known_findings
from .journeys import MANY, Journeys, Marks, marks_of, parted
from .reading import WholeLog

_Subscription = tuple[str, str, dt.datetime]
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)


@dataclass(frozen=True)
class ReconcileOptions:
    """What is judged, and with which tolerances."""

    since: dt.datetime | None = None
    grace: dt.timedelta = dt.timedelta(hours=1)
    late_after: dt.timedelta = dt.timedelta(hours=1)
    fail_on: str = "lost"
    known: bool = False
    """Whether acknowledged findings count as well."""
    external: tuple[str, ...] = ()
    """Destinations with another consumer that keeps no log of ours."""
    keep: bool = True
    """Whether findings and summary are stored in the lake."""
    many: int = MANY
    """Number of journeys from which on those that need no merging are looked for."""


@dataclass
class Reconciliation:
    """Counts of verdicts per destination, and some findings in detail."""

    horizon: dt.datetime
    counts: dict[str, int] = field(default_factory=dict)
    fresh: dict[str, int] = field(default_factory=dict)
    """Findings that no earlier run had, by verdict."""
    unseen: dict[str, int] = field(default_factory=dict)
    """Findings that are not acknowledged, by verdict."""
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
    """Judge every message, store the findings in the lake, and return the counts."""
    with (
        WholeLog(spark, spec) as log,
        Journeys(log, run, keep=options.keep, many=options.many) as journeys,
    ):
        rest = journeys.rest(options.since)
        # Live rows are copied: no transaction is open during the comparison.
        log.release()
        journeys.catch_up()
        marks = marks_of(rest) if journeys.large else None
        tallied = _tallied(journeys, marks, options)
        # The counted messages were sent to queues, so no topic's subscriber is missed.
        settled = journeys.read(but=tallied)
        known = rest if settled is None else rest.unionByName(settled)
        declared, fresh = _declared(log)
        expected = observed(known).unionByName(
            spark.createDataFrame(declared + fresh, EXPECTED)
        )
        expected = expected.groupBy("destination", "consumer").agg(
            sf.min("since").alias("since")
        )
        horizon = log.horizon(options.grace)
        judging: dict[str, Any] = {
            "horizon": horizon, "late_after": options.late_after,
            "external": options.external, "since": options.since,
        }  # fmt: skip
        again, whole = known, None
        if settled is not None and marks is not None:
            again, whole = _parts(rest, settled, marks)
        verdicts = reconcile(again, expected, **judging)
        if whole is not None:
            verdicts = verdicts.unionByName(judge(whole, **judging))
        found = Reconciliation(horizon)
        told = outcome(verdicts)
        if tallied:
            lines = chain.from_iterable(tallied.values())
            told = told.unionByName(as_outcome(spark, lines))
        told = told.persist(StorageLevel.DISK_ONLY)
        per_kind = told.groupBy("destination", "verdict").agg(
            sf.sum("messages").alias("messages")
        )
        for row in per_kind.collect():
            place = found.destinations.setdefault(row.destination or "?", {})
            place[row.verdict] = row.messages
            found.counts[row.verdict] = found.counts.get(row.verdict, 0) + row.messages
        listed = aged(findings(told), known_findings(log), run.started_at)
        listed = listed.persist(StorageLevel.DISK_ONLY)
        _show(found, listed, run.started_at)
        if options.keep and spec.lake is not None:
            results = run.results(spec.lake, spec.service().service)
            results.save("verdicts", FINDING, listed)
            results.save("reconciliation", SUMMARY, summary(told))
            if fresh:
                rows = [dict(zip(EXPECTED.fieldNames(), f, strict=True)) for f in fresh]
                results.save_rows("subscriptions", EXPECTED, rows)
        if options.keep:
            noted = Noted(spec.service())
            noted.keep(_worst(listed), run.started_at, options.since)
        for one in (listed, told):
            one.unpersist()
    run.rows = sum(found.counts.values())
    run.counts = dict(found.counts)
    bad = {"lost": LOST, "new": LOST, "findings": FINDINGS, "never": ()}
    counted = found.fresh if options.fail_on == "new" else found.unseen
    if options.known:
        counted = found.counts
    run.findings = any(counted.get(kind) for kind in bad[options.fail_on])
    return found


def _tallied(
    journeys: Journeys, marks: Marks | None, options: ReconcileOptions
) -> dict[Named, Sequence[Line]]:
    """Return the files that need not be read, and their counts: they contain no marked
    message."""
    if marks is None:
        return {}
    found = usable(journeys.known, options.late_after, options.since)
    concerned = set(journeys.concerned(marks))
    return {one: lines for one, lines in found.items() if one not in concerned}


def _parts(
    rest: DataFrame, settled: DataFrame, marks: Marks
) -> tuple[DataFrame, DataFrame]:
    """Return the steps and journeys to merge, and the journeys that are complete: those
    of queues without new steps."""
    topics = is_topic(sf.col("destination"))
    queues = settled.where(~sf.coalesce(topics, sf.lit(False)))
    concerned, whole = parted(queues, marks)
    again = rest.unionByName(settled.where(topics)).unionByName(concerned)
    return again, whole


def _show(found: Reconciliation, findings: DataFrame, now: dt.datetime) -> None:
    """Count new and unacknowledged findings, and list some of these: new ones first,
    the worst first."""
    new = sf.col("found_at") >= timestamp(now)
    unseen = findings.where("acknowledged_at IS NULL")
    counts = unseen.groupBy("verdict", new.alias("new")).count().collect()
    for kind, is_new, count in counts:
        found.unseen[kind] = found.unseen.get(kind, 0) + count
        if is_new:
            found.fresh[kind] = count
    shown = unseen.orderBy(~new, *_order()).limit(20)
    found.examples = [
        row.asDict()
        for row in shown.select(
            "verdict", "message_id", "destination", "sender", "consumer",
            sf.col("sent_at").cast("string").alias("sent_at"),
            sf.when(~new, sf.col("found_at").cast("string")).alias("known_since"),
        ).collect()
    ]  # fmt: skip


def _order() -> tuple[Any, ...]:
    worst = sf.array_position(sf.array(*map(sf.lit, FINDINGS)), sf.col("verdict"))
    return worst, "sent_at", "message_id"


def _worst(findings: DataFrame) -> Iterator[dict[str, Any]]:
    """Yield the findings that need action, the worst first, then the acknowledged
    ones."""
    # As microseconds: a collected timestamp would be in this machine's time zone.
    instants = {name: sf.unix_micros(name) for name in ("sent_at", "found_at")}
    seen = sf.col("acknowledged_at").isNotNull()
    for chosen in (findings.where(seen), findings.where(~seen).orderBy(*_order())):
        for row in chosen.limit(MOST).withColumns(instants).toLocalIterator():
            at = {name: _instant(row[name]) for name in instants}
            yield row.asDict() | at


def _instant(micros: int | None) -> dt.datetime | None:
    return None if micros is None else _EPOCH + dt.timedelta(microseconds=micros)


def _declared(log: WholeLog) -> tuple[list[_Subscription], list[_Subscription]]:
    """Return the topics' subscribers that an earlier run has seen declared, and new
    ones.

    What a service declares at first is assumed to have always been declared. A later
    subscriber is expected to receive messages from now on.
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
