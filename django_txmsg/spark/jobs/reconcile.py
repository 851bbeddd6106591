"""`reconcile`: compares sent messages with received messages, over the logs of all
services.

It also detects services whose clocks differ. If the receiver's clock is ahead, every
message from one service to the other seems to take at least a minute, and most of them
almost equally long. (If the messages had waited for a consumer instead, earlier
messages would have taken longer than later ones.) If the receiver's clock is behind,
most messages seem to arrive before they were sent.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain
from typing import Any

import pyspark.sql.functions as sf
from pyspark.sql import DataFrame, SparkSession
from pyspark.storagelevel import StorageLevel

from ..connection import connect_plain
from ..lakefile import LakeFile
from ..lock import storing
from ..noted import KEY, MOST, Noted
from ..runs import Run, describe
from ..schemas import TABLES
from ..spec import JobSpec
from ..tally import Line
from ..transforms import MICROSECOND, timestamp
from ..transforms import reconcile as judging
from ..transforms.journeys import (
    EXPECTED,
    LETTERS,
    RECEIVED,
    arrivals,
    is_topic,
    parted,
)
from ..transforms.reconcile import FINDINGS, LOST, STUCK, Judgement
from .counted import as_outcome, received_by_all, usable
from .findings import described, ended_runs, known_findings, standing_findings
from .flows import Flows
from .journeys import Journeys, marks_of
from .listeners import (
    Listener,
    Place,
    counted_places,
    kept_listeners,
    listeners,
    read_places,
)
from .reading import WholeLog, day_of
from .running import job_session

#: Smaller differences are not reported.
SMALL = dt.timedelta(minutes=1)
#: Fewest messages that show a difference.
FEW = 3
#: How much their times may differ, as a fraction of the period in which they were sent.
SPREAD = 0.1


@dataclass(frozen=True)
class Difference:
    """The time by which a receiver's clock is ahead of a sender's clock. It is negative
    if the receiver's clock is behind."""

    sender: str
    receiver: str
    ahead: dt.timedelta

    def describe(self) -> str:
        """Return the difference as text."""
        seconds = abs(self.ahead.total_seconds())
        side = "ahead of" if self.ahead > dt.timedelta() else "behind"
        return (
            f"The clock of {self.receiver} is about {seconds:,.0f} s {side} that of "
            f"{self.sender}: that much is not counted as late. Set the clocks."
        )


def differences(
    places: Iterable[Place], prompt: Sequence[Line], former: Mapping[str, str] = {}
) -> list[Difference]:
    """Compute the differences between the clocks of services from the transit times of
    messages. `prompt` are counts of promptly processed messages, from the footers of
    files. If two services exchanged such messages, their clocks agree. `former` maps
    former names of services to present ones."""

    def now(name: str) -> str:
        return former.get(name, name)

    between = defaultdict[tuple[str, str], list[Place]](list)
    for one in places:
        pair = now(one.sender), now(one.receiver)
        if one.messages and pair[0] != pair[1]:
            between[pair].append(one)
    soon = defaultdict[tuple[str, str, str], set[dt.date]](set)
    for line in prompt:
        if line.consumer and line.sender:
            receiver = now(line.consumer.partition("/")[0])
            soon[now(line.sender), receiver, line.destination].add(line.sent_on)
    found = []
    for pair, own in sorted(between.items()):
        least = dt.timedelta(microseconds=min(one.least_us for one in own))
        if abs(least) >= SMALL and any(
            _shows(one, least)
            and not any(
                one.first_at.date() <= day <= one.last_at.date()
                for day in soon[(*pair, one.destination)]
            )
            for one in own
        ):
            found.append(Difference(*pair, least))
    return found


def _shows(place: Place, least: dt.timedelta) -> bool:
    """Return True if the messages' transit times are so similar that the shortest one,
    `least`, must be a difference between two clocks."""
    if place.messages < FEW:
        return False
    spread = dt.timedelta(microseconds=place.median_us) - least
    # A single message may have a wrong time, and a consumer may process messages in
    # batches: most times must be close to the shortest one.
    alike = spread < max(SMALL, SPREAD * abs(least))
    behind = least < dt.timedelta()
    return alike and (behind or spread < SPREAD * (place.sent_at - place.sent_from))


#: The default of `--late-after`, and of `--stuck-after`.
LATE_AFTER = dt.timedelta(hours=1)
STUCK_AFTER = dt.timedelta(hours=6)


def stuck_after(spec: JobSpec) -> dt.timedelta:
    """Return the time after which a due message is stuck."""
    return dt.timedelta(seconds=spec.stuck_after or STUCK_AFTER.total_seconds())


@dataclass
class Reconciliation:
    """The result of `reconcile`, as `--json` prints it: for each destination, the
    number of messages with each verdict, and example findings."""

    horizon: dt.datetime
    counts: Counter[str] = field(default_factory=Counter)
    #: Findings that no earlier run had, by verdict.
    new: Counter[str] = field(default_factory=Counter)
    #: Findings that are not acknowledged, by verdict.
    unacknowledged: Counter[str] = field(default_factory=Counter)
    destinations: dict[str, Counter[str]] = field(default_factory=dict)
    examples: list[dict[str, Any]] = field(default_factory=list)
    #: The number of messages that are older than the log which should have them.
    not_judged: int = 0
    #: Services whose clocks differ.
    clocks: list[Difference] = field(default_factory=list)
    #: Listeners of topics that are expected to receive nothing more.
    retired: list[Listener] = field(default_factory=list)

    @property
    def not_received(self) -> list[str]:
        """The destinations that have lost messages, and from which no service of this
        run has received any message."""
        silent = {"never_received", "in_flight", "not_sent"}
        return sorted(
            name
            for name, verdicts in self.destinations.items()
            if "never_received" in verdicts and silent.issuperset(verdicts)
        )


def run_reconcile(
    spark: SparkSession, spec: JobSpec, given: argparse.Namespace, run: Run
) -> Reconciliation:
    """Judge every message, store the findings in the lake, and return the counts. A dry
    run stores nothing."""
    keep = not given.dry_run
    with WholeLog(spark, spec) as log, Journeys(log, run, keep=keep) as journeys:
        before = standing_findings(log).localCheckpoint()
        seen = known_findings(log, before)
        least = _judgement(spec, given, log, seen)
        since, earlier = least.since, list[DataFrame]()
        flows = Flows(log, least)
        rest = journeys.rest(since, {*dict(least.standing), *flows.requests})
        if since is not None:
            # Older arrivals show which stages listen to topics.
            earlier.append(arrivals(log.listening(RECEIVED, day_of(since))))
        # Live rows are copied: no transaction is open during the comparison.
        log.release()
        # What a file counts, no run need look for again: where its messages went.
        unread = usable(journeys.known, least.strictest, since)
        lines = [line for one in unread for line in journeys.known[one].lines]
        others = (journeys.fresh, journeys.read(but=unread))
        earlier += [one for one in others if one is not None]
        there = read_places(reduce(DataFrame.unionByName, earlier, rest))
        there += counted_places(lines)
        now = max(one.taken for one in log.live)
        heard = [] if log.lake is None else kept_listeners(log.lake)
        # A run without Django knows no stages, and has recorded none.
        ended = ended_runs(log).where("options LIKE '%\"declares_stages\": true%'")
        ran = [] if ended.isEmpty() else [spec.service().service]
        listening = listeners(heard, there, spec.subscriptions, now, ran)
        expected = spark.createDataFrame(
            [dataclasses.astuple(one) for one in listening.expected], EXPECTED
        )
        journeys.catch_up(listening.expected)
        marks = marks_of(rest, log.found) if journeys.large else None
        tallied = _tallied(journeys, marks, least, listening.expected)
        settled = journeys.read(but=tallied)
        known = rest if settled is None else rest.unionByName(settled)
        clocks = differences(there, lines, spec.former)
        receivers = {(one.receiver, one.destination) for one in there}
        receivers |= {
            (one.consumer.partition("/")[0], one.destination)
            for one in lines
            if one.consumer
        }
        declared = {(one.service, one.destination) for one in spec.subscriptions}
        ahead = [(one.sender, one.receiver, one.ahead // MICROSECOND) for one in clocks]
        by = dataclasses.replace(
            least,
            receivers=receivers | declared,
            received={destination for _, destination in receivers},
            clocks=ahead,
        )
        counts = list(chain.from_iterable(tallied.values()))
        again, whole = known, None
        if settled is not None and marks is not None:
            again, whole = _parts(rest, settled, marks)
        verdicts = judging.reconcile(again, expected, by)
        if whole is not None:
            verdicts = verdicts.unionByName(judging.judge(whole, by))
        of_flows = flows.verdicts(rest, journeys)
        if of_flows is not None:
            verdicts = verdicts.unionByName(of_flows)
        retired = [one for one in listening.expected if one.until is not None]
        found = Reconciliation(by.horizon, clocks=clocks, retired=retired)
        outcomes = judging.outcome(verdicts)
        if counts:
            outcomes = outcomes.unionByName(as_outcome(spark, counts))
        outcomes = outcomes.persist(StorageLevel.DISK_ONLY)
        summed = judging.summary(outcomes).toArrow().to_pylist()
        found.not_judged = sum(one["messages"] for one in summed if not one["verdict"])
        summed = [one for one in summed if one["verdict"]]
        for row in summed:
            place = found.destinations.setdefault(row["destination"] or "?", Counter())
            for counted in (place, found.counts):
                counted[row["verdict"]] += row["messages"]
        listed = judging.aged(judging.findings(outcomes), seen, run.started_at)
        listed = listed.persist(StorageLevel.DISK_ONLY)
        _show(found, listed, run.started_at)
        if keep and spec.lake is not None:
            results = run.results(spec.lake, spec.service().service)
            journal = judging.changes(listed, before)
            results.save("verdicts", judging.CHANGE, journal, few=MOST)
            results.save_rows("reconciliation", judging.SUMMARY, summed)
            if listening.fresh:
                rows = [dataclasses.asdict(one) for one in listening.fresh]
                results.save_rows("subscriptions", EXPECTED, rows)
        if keep:
            noted, former = Noted(spec.service()), spec.former_names()
            noted.keep(_worst(listed), run.started_at, former)
            judged = min(by.horizon, by.stuck_before)
            services = sorted({one.service for one in spec.services})
            run.options |= {"services": services, "judged_until": judged.isoformat()}
            # Django's settings always have a retention, even if there are no stages.
            run.options["declares_stages"] = bool(spec.subscriptions or spec.retention)
            describe(spec.service(), run)
        for one in (listed, outcomes):
            one.unpersist()
    run.rows = found.counts.total()
    run.counts = dict(found.counts)
    bearing = found.new if given.fail_on == "new" else found.unacknowledged
    bad = {"findings": FINDINGS, "never": ()}.get(given.fail_on, LOST + STUCK)
    run.findings = any(bearing[kind] for kind in bad)
    return found


def _judgement(
    spec: JobSpec, given: argparse.Namespace, log: WholeLog, known: DataFrame
) -> Judgement:
    """Return the rules that follow from the options, the specification and the known
    findings. Rules that depend on the messages are added later."""
    since, standing = given.since, list[tuple[str, str]]()
    if since is not None:
        # The last run may have kept only MOST findings.
        rows = known.select(*KEY).distinct().limit(MOST).collect()
        standing = [(one.message_id, one.verdict) for one in rows]
        standing += [(one, "dead") for one in _revived(log, since)]
        # To look for each of so many takes longer.
        most = max(len(rows), len(dict(standing)))
        since = None if most >= MOST else since
    late = dict(spec.late_after)
    general = late.pop("*", LATE_AFTER.total_seconds())
    if given.late_after:
        late, general = {}, given.late_after.total_seconds()
    outbox_from = log.known_from("outbox")
    # Old receipts name their sender as it was called.
    outbox_from = {
        old: outbox_from[new] for old, new in spec.former.items() if new in outbox_from
    } | outbox_from
    stuck = stuck_after(spec) if given.stuck_after is None else given.stuck_after
    # Up to then, every service's log is complete.
    taken = min(one.taken for one in log.live)
    return Judgement(
        horizon=taken - given.grace,
        late_after=dt.timedelta(seconds=general),
        late_at=[(one, dt.timedelta(seconds=limit)) for one, limit in late.items()],
        stuck_before=taken - stuck,
        external=(*spec.external, *given.external),
        external_senders=(*spec.external_senders, *given.external_sender),
        task_brokers=spec.task_brokers,
        outbox_from=outbox_from,
        inbox_from=log.known_from("inbox"),
        since=since,
        standing=standing,
    )


def _revived(log: WholeLog, since: dt.datetime) -> list[str]:
    """Return the ids of messages that were sent before `since`, and are dead, were
    redelivered since then, or have an attempt that became due since then. Their rows
    have the times of their first receipt. An open dead letter may be older than
    `since`, because `restore` opens it again."""
    day, start = day_of(since), timestamp(since)
    where = "(t.resolution = 'open' OR t.resolved_at >= {day})"
    # The lake has each letter on the day on which it was stored.
    letters = log.read("dead_letters", LETTERS, where=where, since=day, whole=True)
    redelivered = (sf.col("resolution") == "redelivered") & (
        sf.col("resolved_at") >= start
    )
    letters = letters.where((sf.col("resolution") == "open") | redelivered)
    parked = log.copied(TABLES["inbox"], RECEIVED, "t.due_at >= {day}", day)
    parked = parked.where(sf.col("due_at").between(start, sf.current_timestamp()))
    sent = letters.select("message_id", sf.col("message_created_at").alias("sent_at"))
    sent = sent.union(parked.select("message_id", "created_at"))
    old = sent.where(sf.coalesce(sf.col("sent_at") < start, sf.lit(True)))
    rows = old.select("message_id").distinct().limit(MOST).collect()
    return [one.message_id for one in rows]


def _tallied(
    journeys: Journeys,
    marks: DataFrame | None,
    by: Judgement,
    expected: Sequence[Listener],
) -> dict[LakeFile, Sequence[Line]]:
    """Return the files that need not be read, with the counts from their footers. Such
    a file contains no marked message. Its messages to topics were received by exactly
    the expected listeners."""
    if marks is None:
        return {}
    listening = defaultdict[str, list[Listener]](list)
    for listener in expected:
        listening[listener.destination].append(listener)
    found = usable(journeys.known, by.strictest, by.since)
    concerned = set(journeys.concerned(marks))
    return {
        one: lines
        for one, lines in found.items()
        if one not in concerned and received_by_all(lines, listening)
    }


def _parts(
    rest: DataFrame, settled: DataFrame, marks: DataFrame
) -> tuple[DataFrame, DataFrame]:
    """Return two frames. The first has the steps and journeys to merge. The second has
    the journeys that stay unchanged. A journey stays unchanged if its message was sent
    to a queue and has no new steps."""
    topics = is_topic(sf.col("destination"))
    queues = settled.where(~sf.coalesce(topics, sf.lit(False)))
    concerned, whole = parted(queues, marks)
    again = rest.unionByName(settled.where(topics)).unionByName(concerned)
    return again, whole


def _show(found: Reconciliation, findings: DataFrame, now: dt.datetime) -> None:
    """Count the unacknowledged findings, and how many of them are new. Store the counts
    in `found`. Also store examples: first new findings, then old ones. In each of the
    two groups, the worst findings come first."""
    new = sf.col("found_at") >= timestamp(now)
    unseen = findings.where("acknowledged_at IS NULL")
    counts = unseen.groupBy("verdict", new.alias("new")).count().collect()
    for kind, is_new, count in counts:
        found.unacknowledged[kind] += count
        if is_new:
            found.new[kind] = count
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
    """Yield acknowledged findings, in any order. Then yield unacknowledged findings,
    and begin with the worst of them. Yields at most MOST acknowledged and at most MOST
    unacknowledged findings."""
    seen = sf.col("acknowledged_at").isNotNull()
    for chosen in (findings.where(seen), findings.where(~seen).orderBy(*_order())):
        yield from chosen.limit(MOST).toArrow().to_pylist()


def reconcile_command(spec: JobSpec, given: argparse.Namespace, run: Run) -> None:
    """Judge the messages, and list the findings. Raises PipelineError, such as Taken if
    an erasure is running: findings could name erased messages."""
    source = spec.service()
    with (
        connect_plain(source) as connection,
        storing(connection, source),
        job_session(given) as spark,
    ):
        found = run_reconcile(spark, spec, given, run)
    lines = run.lines
    lines.append(f"Judged: messages sent before {found.horizon:%Y-%m-%d %H:%M:%S} UTC.")
    for name, verdicts in sorted(found.destinations.items()):
        text = ", ".join(f"{n:,} {kind}" for kind, n in sorted(verdicts.items()))
        lines.append(f"  {name}: {text}")
    if found.not_judged:
        lines.append(
            f"  {found.not_judged:,} messages have no verdict: they are older than the "
            "log of the service that should have sent or received them."
        )
    if new := found.new.total():
        lines.append(f"  New findings: {new:,}.")
    if unseen := found.unacknowledged.total():
        lines.append(f"  Findings not acknowledged: {unseen:,} (`pipeline findings`).")
    for one in found.examples:
        since = f", known since {one['known_since']} UTC" if one["known_since"] else ""
        lines.append(f"  {described(one)}, sent {one['sent_at']} UTC{since}")
    lines += [f"  {one.describe()}" for one in found.clocks]
    lines += [
        f"  {one.consumer} is expected to receive from {one.destination} what was sent"
        f" before {one.until:%Y-%m-%d %H:%M:%S} UTC."
        for one in found.retired
    ]
    lines += [
        f"  None of these services has ever received from {name}. If another service "
        f"does, add it: --service NAME=URL. If something else does: --external {name}."
        for name in found.not_received
    ]
    run.facts = vars(found) | {
        "not_received": found.not_received,
        "clocks": [dataclasses.asdict(one) for one in found.clocks],
        "retired": [dataclasses.asdict(one) for one in found.retired],
    }
