"""`reconcile`: compares what was sent with what arrived, over the logs of all
services."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pyspark.sql.functions as sf
from pyspark.sql import DataFrame, SparkSession
from pyspark.storagelevel import StorageLevel

from ..lakelog import Named
from ..noted import MOST, Noted
from ..results import result_struct
from ..runs import Run
from ..spec import JobSpec
from ..tally import Line
from ..transforms.instants import timestamp
from ..transforms.journeys import is_topic
from ..transforms.reconcile import (
    CHANGE,
    EXPECTED,
    FINDINGS,
    LOST,
    STUCK,
    SUMMARY,
    Judgement,
    aged,
    changes,
    findings,
    judge,
    outcome,
    reconcile,
    summary,
)
from .clocks import Difference, differences
from .counted import as_outcome, usable
from .findings import known_findings, standing_findings
from .journeys import MANY, Journeys, Marks, marks_of, parted
from .places import Listener, instant, listeners, read_places
from .reading import WholeLog

_MICROSECOND = dt.timedelta(microseconds=1)

#: The default of `--late-after`, and of `--stuck-after`.
LATE_AFTER = dt.timedelta(hours=1)
STUCK_AFTER = dt.timedelta(hours=6)


@dataclass(frozen=True)
class ReconcileOptions:
    """What is judged, and with which tolerances."""

    since: dt.datetime | None = None
    grace: dt.timedelta = dt.timedelta(hours=1)
    late_after: dt.timedelta | None = None
    """For all destinations; without it, as the specification has it."""
    stuck_after: dt.timedelta | None = None
    fail_on: str = "lost"
    known: bool = False
    """Whether acknowledged findings count as well."""
    external: tuple[str, ...] = ()
    """Patterns of destinations that something else consumes, which keeps no log of
    ours; and of senders that keep none. They are added to those of the
    specification."""
    external_senders: tuple[str, ...] = ()
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
    clocks: list[Difference] = field(default_factory=list)
    """Services whose clocks differ."""
    retired: list[Listener] = field(default_factory=list)
    """Listeners of topics that are expected to receive nothing more."""

    @property
    def unheard(self) -> list[str]:
        """Destinations from which no service of this run has ever received."""
        silent = {"never_received", "in_flight", "not_sent"}
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
        least = _judgement(spec, options, log)
        tallied = _tallied(journeys, marks, least)
        # The counted messages were sent to queues, so no topic's subscriber is missed.
        settled = journeys.read(but=tallied)
        known = rest if settled is None else rest.unionByName(settled)
        lines = list(chain.from_iterable(tallied.values()))
        there = read_places(known)
        now = max(one.taken for one in log.live)
        listening = listeners(_noted(log), there, spec.subscriptions, now)
        expected = spark.createDataFrame(
            [dataclasses.astuple(one) for one in listening.expected], EXPECTED
        )
        clocks = differences(there, lines)
        by = dataclasses.replace(
            least,
            heard={one.destination for one in there}
            | {one.destination for one in lines},
            clocks=[
                (one.sender, one.receiver, one.ahead // _MICROSECOND) for one in clocks
            ],
        )
        again, whole = known, None
        if settled is not None and marks is not None:
            again, whole = _parts(rest, settled, marks)
        verdicts = reconcile(again, expected, by)
        if whole is not None:
            verdicts = verdicts.unionByName(judge(whole, by))
        found = Reconciliation(by.horizon, clocks=clocks)
        found.retired = listening.retired
        told = outcome(verdicts)
        if lines:
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
            before = standing_findings(log)
            journal = changes(listed, before, run.started_at, options.since)
            results.save("verdicts", CHANGE, journal)
            results.save("reconciliation", SUMMARY, summary(told))
            if listening.fresh:
                rows = [dataclasses.asdict(one) for one in listening.fresh]
                results.save_rows("subscriptions", EXPECTED, rows)
        if options.keep:
            noted = Noted(spec.service())
            noted.keep(_worst(listed), run.started_at, options.since)
        for one in (listed, told):
            one.unpersist()
    run.rows = sum(found.counts.values())
    run.counts = dict(found.counts)
    lost = LOST + STUCK
    bad = {"lost": lost, "new": lost, "findings": FINDINGS, "never": ()}
    counted = found.fresh if options.fail_on == "new" else found.unseen
    if options.known:
        counted = found.counts
    run.findings = any(counted.get(kind) for kind in bad[options.fail_on])
    return found


def _judgement(spec: JobSpec, options: ReconcileOptions, log: WholeLog) -> Judgement:
    """Return the rules of this run, before anything is known from the logs."""
    late = dict(spec.late_after)
    general = late.pop("*", LATE_AFTER.total_seconds())
    stuck = options.stuck_after
    if stuck is None:
        stuck = dt.timedelta(seconds=spec.stuck_after or STUCK_AFTER.total_seconds())
    return Judgement(
        horizon=log.horizon(options.grace),
        late_after=options.late_after or dt.timedelta(seconds=general),
        late_at=[]
        if options.late_after
        else [(one, dt.timedelta(seconds=limit)) for one, limit in late.items()],
        stuck_before=log.horizon(stuck),
        external=(*spec.external, *options.external),
        external_senders=(*spec.external_senders, *options.external_senders),
        task_brokers=[(one[0], one[1]) for one in spec.task_brokers],
        since=options.since,
    )


def _tallied(
    journeys: Journeys, marks: Marks | None, by: Judgement
) -> dict[Named, Sequence[Line]]:
    """Return the files that need not be read, and their counts: they contain no marked
    message."""
    if marks is None:
        return {}
    found = usable(journeys.known, by.strictest, by.since)
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
    return None if micros is None else instant(micros)


def _noted(log: WholeLog) -> list[Listener]:
    """Return the topics' listeners that earlier runs have recorded."""
    if log.lake is None:
        return []
    place = log.lake.table("subscriptions", result_struct(EXPECTED))
    # As microseconds: a collected timestamp would be in this machine's time zone.
    micros = {name: sf.unix_micros(name) for name in ("since", "until")}
    rows = place.read(log.spark).withColumns(micros)
    return [
        Listener(one.destination, one.consumer, instant(one.since), _instant(one.until))
        for one in rows.collect()
    ]
