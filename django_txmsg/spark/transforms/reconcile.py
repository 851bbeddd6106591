"""Judges messages: for each message and consumer, compares what was sent with what was
received.

A message that was sent after the horizon is never judged lost, because the logs may not
have its rows yet.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import pyspark.sql.functions as sf
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import types as t

from ..noted import KEY
from ..schemas import struct_of
from . import EPOCH, MICROSECOND, among, timestamp
from .journeys import PROMPT, RESOLUTIONS, is_topic, merged

VERDICT = struct_of(
    "message_id string, destination string, sender string, consumer string, "
    "sent_at timestamp, due_at timestamp, dispatched_at timestamp, "
    "received_at timestamp, processed_at timestamp, deliveries long, "
    "times_processed long, verdict string"
)

#: A verdict that is a finding, and when a run first found it.
FINDING = struct_of(VERDICT, "found_at timestamp, acknowledged_at timestamp")

#: A change of a finding: a run has found it for the first time, or no longer finds it.
#: Rows of early releases have neither, because each run wrote all of its findings.
FOUND, GONE = "found", "gone"

#: A line of the lake's journal of findings.
CHANGE = struct_of(FINDING, "change string")

#: Known findings. No consumer is an empty text.
KNOWN = t.StructType([*[VERDICT[n] for n in KEY], *FINDING.fields[len(VERDICT) :]])

SUMMARY = struct_of(
    "sent_on date, destination string, verdict string, messages long, "
    "first_sent_at timestamp, last_sent_at timestamp"
)

#: The columns of a summary, with a row for each finding.
OUTCOME = struct_of(SUMMARY).add("finding", VERDICT)

#: Verdicts of messages that are lost, and of messages and runs of flows that wait for
#: too long; both end a run with exit code 1. And all that are worth a look.
LOST = ("never_received", "processed_twice", "undo_without_request")
STUCK = ("not_processed", "not_sent", "unanswered", "not_undone")
FINDINGS = (*LOST, *STUCK, "dead", "late", "unknown_sender")


@dataclass(frozen=True)
class Judgement:
    """The rules by which messages are judged."""

    #: Messages that were due before it should have arrived.
    horizon: dt.datetime
    #: A message is late that is processed later than this after it was due.
    late_after: dt.timedelta
    #: The same for destinations by a pattern; the first one that fits.
    late_at: Sequence[tuple[str, dt.timedelta]] = ()
    #: What was due before it should have left, or been processed.
    stuck_before: dt.datetime = EPOCH
    #: Patterns of destinations which something consumes that keeps no log of ours, of
    #: listeners of topics, or of brokers, as `broker:PATTERN`.
    external: Sequence[str] = ()
    #: Patterns of senders that keep no log of ours.
    external_senders: Sequence[str] = ()
    #: Services, and their brokers at which workers of Celery take messages.
    task_brokers: Sequence[tuple[str, str]] = ()
    #: Destinations from which a stage has received.
    received: Collection[str] = ()
    #: Sender, receiver, and by how many microseconds the receiver's clock is ahead.
    clocks: Sequence[tuple[str, str, int]] = ()
    #: By service, the instants from which its outbox and its inbox are complete.
    outbox_from: Mapping[str, dt.datetime] = field(default_factory=dict)
    inbox_from: Mapping[str, dt.datetime] = field(default_factory=dict)
    #: Services, and the destinations that they consume.
    receivers: Collection[tuple[str, str]] = ()
    #: Of messages that were neither sent or due nor, by a sender unknown, received
    #: since then, nothing is reported, except of those in `standing`.
    since: dt.datetime | None = None
    #: The messages and runs about which there are findings, each with its verdict, and
    #: messages that have died or were redelivered since then.
    standing: Sequence[tuple[str, str]] = ()

    @property
    def strictest(self) -> dt.timedelta:
        """The shortest time after which a message is late, over all destinations."""
        return min([self.late_after, *(limit for _, limit in self.late_at)])


def reconcile(steps: DataFrame, expected: DataFrame, by: Judgement) -> DataFrame:
    """Return one VERDICT row for each message and consumer, from all steps of the
    messages.

    A message to a queue has one consumer. If two consumers have processed it, it was
    processed twice. The consumers of a message to a topic are those of `expected` that
    listened when it was due, and those that have received it.

    Sent and received messages are in the same frame, so that Spark shuffles them only
    once.
    """
    wanted = expected.withColumnsRenamed(
        {"destination": "topic", "consumer": "listener"}
    )
    listens = (
        (sf.col("destination") == sf.col("topic"))
        & (sf.col("due_at") >= sf.col("since"))
        & (sf.col("until").isNull() | (sf.col("due_at") < sf.col("until")))
        & (sf.col("stored") > 0)
    )
    owed = steps.join(sf.broadcast(wanted), listens, "left").withColumn(
        "pair", sf.coalesce("listener", "pair")
    )
    return judge(_complete(merged(owed, "message_id", "destination", "pair")), by)


def _complete(journeys: DataFrame) -> DataFrame:
    """Return journeys, one for each message and consumer, each with what is known of
    the whole message. Only a topic's message has several.

    A dead letter without a stage belongs to a message that could not leave, wherever
    that is expected. And a message may have been received where it was not expected. A
    row without a listener has the fate of the whole message: this one may have died
    before the first stage listened, and have been sent again since.
    """
    message = Window.partitionBy("message_id", "destination")
    unexpected = (sf.col("stored") == 0) & sf.col("received_at").isNotNull()
    partial = unexpected | ((sf.col("pair") == "") & (sf.col("stored") > 0))
    of_letter = ("copied_at", *RESOLUTIONS.values())
    first = ("stored_at", "due_at", "sender", "broker")
    last = ("sent_again_at", "due_again_at", "dispatched_at", "died_at", "expires_at")
    stored = sf.max("stored").over(message)
    sent = {
        **{name: sf.min(name).over(message) for name in first},
        **{name: sf.max(name).over(message) for name in last},
        "stored": stored,
        # Each row may count other rows of the outbox than the next one.
        **{
            name: stored - sf.max(sf.col("stored") - sf.col(name)).over(message)
            for name in ("died", "cancelled", "expire")
        },
    }
    alone = {
        name: sf.max(sf.when(sf.col("pair") == "", sf.col(name))).over(message)
        for name in of_letter
    }
    return journeys.withColumns(
        {name: sf.greatest(name, whole) for name, whole in alone.items()}
        | {
            name: sf.when(partial, whole).otherwise(sf.col(name))
            for name, whole in sent.items()
        }
    )


def judge(journeys: DataFrame, by: Judgement) -> DataFrame:
    """Return one VERDICT row for each message and consumer, from complete journeys. The
    verdict is null if the message is older than the log that should contain it."""
    if by.since is not None:
        start = timestamp(by.since)
        # In a form by which Spark skips parts of files.
        journeys = journeys.where(
            (sf.col("sent_again_at") >= start)
            | (sf.col("due_again_at") >= start)
            | (sf.col("dispatched_at") >= start)
            | (sf.col("sent_again_at").isNull() & (sf.col("begun_at") >= start))
            | among(dict(by.standing))
        )
    first, last = sf.col("consumer"), sf.col("other_consumer")
    steps = journeys.withColumns(
        {
            "consumer": sf.when(first == last, first)
            .when(first.isNotNull(), sf.concat_ws(", ", first, last))
            .when(sf.col("pair") != "", sf.col("pair")),
            "sent_at": sf.coalesce("stored_at", "copied_at", "told_at"),
            "due_at": sf.coalesce("due_at", "told_at"),
            # Dead, or expired, only if no row of it has left or may still leave.
            "died_at": sf.when(sf.col("stored") == sf.col("died"), sf.col("died_at")),
            "expires_at": sf.when(
                sf.col("stored") == sf.col("expire"), sf.col("expires_at")
            ),
            "was_sent": (sf.col("stored") > 0) | sf.col("copied_at").isNotNull(),
            "in_outbox": sf.col("stored") > 0,
            # It may have died at its relay, and been redelivered, before that.
            "by_intent": (sf.col("cancelled") > 0)
            & (sf.col("stored") == sf.col("died"))
            & (
                (sf.col("cancelled") == sf.col("died")) | sf.isnotnull("redelivered_at")
            ),
        }
    )
    # A message to a topic without listeners has no receiver to judge. A listener that
    # was gone when its dead message was redelivered is owed it no more. And nothing is
    # known about a message of which only a dead letter is left.
    idle = is_topic(sf.col("destination")) & sf.when(
        sf.col("pair") == "", sf.col("died_at").isNull()
    ).otherwise(
        sf.col("received_at").isNull() & (sf.col("redelivered_at") >= sf.col("died_at"))
    )
    forgotten = ~sf.col("in_outbox") & sf.col("received_at").isNull()
    owed = steps.where(~sf.coalesce(idle, sf.lit(False)) & ~forgotten)
    return owed.select(
        *[name for name in VERDICT.fieldNames() if name != "verdict"],
        _verdict(by).alias("verdict"),
    )


def is_finding(prefix: str) -> list[Column]:
    """Return join conditions that compare a finding with the columns that have this
    prefix. In these columns, an unknown value is "", not null."""
    return [sf.coalesce(n, sf.lit("")) == sf.col(f"{prefix}{n}") for n in KEY]


def aged(findings: DataFrame, known: DataFrame, now: dt.datetime) -> DataFrame:
    """Return FINDING rows: the findings, each with the time of the run that first found
    it. A finding that is not in `known`, or without a time, was first found `now`. In
    `known`, a finding may have several rows."""
    first = known.groupBy(
        *[sf.coalesce(name, sf.lit("")).alias(f"known_{name}") for name in KEY]
    ).agg(
        sf.min("found_at").alias("first_at"),
        sf.max("acknowledged_at").alias("acknowledged_at"),
    )
    return (
        findings.join(first, is_finding("known_"), "left")
        .withColumn("found_at", sf.coalesce("first_at", timestamp(now)))
        .select(*FINDING.fieldNames())
    )


def standing(journal: DataFrame) -> DataFrame:
    """Return the unresolved FINDING rows of a journal. A finding is unresolved if its
    last CHANGE row has the change `found`."""
    last = {
        name: sf.max_by(name, "recorded_at").alias(name)
        for name in CHANGE.fieldNames()
        if name not in KEY
    }
    empty = {name: sf.coalesce(name, sf.lit("")) for name in KEY}
    found = journal.where("change IS NOT NULL").withColumns(empty)
    found = found.groupBy(*KEY).agg(*last.values())
    return found.where(sf.col("change") == FOUND).select(*FINDING.fieldNames())


def changes(findings: DataFrame, before: DataFrame) -> DataFrame:
    """Return CHANGE rows: findings that are new in this run, and earlier findings
    (`before`) that are now resolved."""
    same = {name: sf.coalesce(name, sf.lit("")) for name in KEY}
    known = before.where("found_at IS NOT NULL")
    stood = known.select(*[sf.col(n).alias(f"stood_{n}") for n in KEY])
    fresh = findings.join(stood, is_finding("stood_"), "left_anti")
    there = findings.withColumns(same).select(*KEY)
    gone = before.join(there, list(KEY), "left_anti")
    return fresh.withColumn("change", sf.lit(FOUND)).unionByName(
        gone.withColumn("change", sf.lit(GONE)).select(*CHANGE.fieldNames())
    )


def outcome(verdicts: DataFrame) -> DataFrame:
    """Return OUTCOME rows: the number of verdicts by day, destination and kind, and one
    row for each finding. Both are in one frame, so that a run needs only one pass over
    the verdicts."""
    finding = sf.when(
        sf.col("verdict").isin(*FINDINGS), sf.struct(*VERDICT.fieldNames())
    )
    return verdicts.groupBy(
        sf.to_date("sent_at").alias("sent_on"),
        "destination",
        "verdict",
        finding.alias("finding"),
    ).agg(
        sf.count("*").alias("messages"),
        sf.min("sent_at").alias("first_sent_at"),
        sf.max("sent_at").alias("last_sent_at"),
    )


def summary(outcome: DataFrame) -> DataFrame:
    """Return SUMMARY rows: the number of verdicts by day, destination and kind."""
    return outcome.groupBy("sent_on", "destination", "verdict").agg(
        sf.sum("messages").alias("messages"),
        sf.min("first_sent_at").alias("first_sent_at"),
        sf.max("last_sent_at").alias("last_sent_at"),
    )


def findings(outcome: DataFrame) -> DataFrame:
    """Return the VERDICT rows that are findings."""
    return outcome.where("finding IS NOT NULL").select("finding.*")


def places(steps: DataFrame) -> DataFrame:
    """Return one row for each combination of destination, sender and receiving service.
    For a topic, the combination includes the consumer. Each row has the times of the
    first and the last message, the times when the first and the last one were sent, and
    the messages' transit times. A topic's last message has the time of its receipt."""
    listener = sf.when(is_topic(sf.col("destination")), sf.col("consumer"))
    # If a message was received long after it was stored, its stage may have begun to
    # listen in between.
    waited = sf.col("received_at") > sf.col("begun_at") + sf.lit(PROMPT)
    heard_at = sf.when(listener.isNotNull() & waited, sf.col("received_at"))
    heard_at = sf.coalesce(heard_at, sf.col("begun_at"))
    last_at = sf.when(listener.isNotNull(), sf.col("received_at"))
    # A copy was made where it was received.
    due = sf.when(sf.col("copied_at").isNull(), sf.col("due_at"))
    transit = sf.unix_micros("received_at") - sf.unix_micros(
        sf.coalesce(due, sf.col("told_at"))
    )
    return (
        steps.where(sf.col("consumer").isNotNull())
        .groupBy(
            "destination",
            listener.alias("consumer"),
            sf.col("told_by").alias("sender"),
            service_of(sf.col("consumer")).alias("receiver"),
        )
        .agg(
            sf.min(heard_at).alias("first_at"),
            sf.max(sf.coalesce(last_at, "begun_at")).alias("last_at"),
            sf.min("begun_at").alias("sent_from"),
            sf.max("begun_at").alias("sent_at"),
            sf.count(transit).alias("messages"),
            sf.min(transit).alias("least_us"),
            sf.percentile_approx(transit, 0.5, 100).alias("median_us"),
        )
    )


def service_of(consumer: Column) -> Column:
    """Return the service of a consumer."""
    return sf.substring_index(consumer, "/", 1)


def of_service(service: Column, instants: Mapping[str, dt.datetime]) -> Column:
    """Return the instant of a service. Null if there is none."""
    known = [sf.when(service == one, timestamp(at)) for one, at in instants.items()]
    return sf.coalesce(*known, sf.lit(None).cast("timestamp"))


def fits(column: Column, patterns: Sequence[str]) -> Column:
    """Return whether a text matches one of these patterns. * matches any characters.
    False for null."""
    if not patterns:
        return sf.lit(False)
    tests = [re.escape(one).replace(_ANY, ".*") for one in patterns]
    return sf.coalesce(column.rlike(f"^(?:{'|'.join(tests)})$"), sf.lit(False))


#: A pattern's star, as it is escaped.
_ANY = r"\*"
#: The prefix of a broker's pattern.
BROKER = "broker:"


def _verdict(by: Judgement) -> Column:
    limit = timestamp(by.horizon)
    stuck = timestamp(by.stuck_before)
    took = sf.unix_micros("processed_at") - sf.unix_micros("due_at") - _ahead(by)
    # A message that was sent again is in flight, however old it is. So is a message
    # that has just left, however long its relay had to wait.
    due = sf.coalesce("due_again_at", "due_at", "received_at")
    left = sf.greatest(due, "dispatched_at")
    young = left >= limit
    foreign = ~sf.col("was_sent") & fits(sf.col("told_by"), by.external_senders)
    told_at = sf.coalesce("told_at", "received_at")
    kept = told_at >= of_service(sf.col("told_by"), by.outbox_from)
    # A message that was revoked before it arrived has a row only because of that.
    came = sf.col("revoked_at").isNull() | (sf.col("deliveries") > 0)
    unknown = ~sf.col("was_sent") & ~foreign & came & sf.coalesce(kept, sf.lit(True))
    brokers = [one[len(BROKER) :] for one in by.external if one.startswith(BROKER)]
    names = [one for one in by.external if not one.startswith(BROKER)]
    elsewhere = (
        fits(sf.col("destination"), names)
        | fits(sf.col("consumer"), [one for one in names if "/" in one])
        | fits(sf.col("broker"), brokers)
        | _is_a_task(by)
    )
    processed = sf.col("processed_at").isNotNull()
    # A stage still processes a message that it got before the sender cancelled it.
    ended = sf.greatest("buried_at", sf.when(~sf.col("by_intent"), sf.col("died_at")))
    # As long as nothing has happened since an operator resolved it.
    resolved = {
        kind: sf.coalesce(sf.col(name) >= ended, sf.lit(False))
        for kind, name in RESOLUTIONS.items()
    }
    return (
        sf.when(sf.col("times_processed") > 1, "processed_twice")
        .when(unknown & young, "in_flight")
        .when(unknown, "unknown_sender")
        .when(processed & foreign, "external")
        .when(processed & ~sf.col("was_sent"), None)
        .when(processed & (took > _late(by)), "late")
        .when(processed & (sf.col("deliveries") > 1), "redelivered_deduplicated")
        .when(processed, "ok")
        .when(sf.col("received_at").isNull() & sf.col("by_intent"), "cancelled")
        .when(resolved["discarded"], "discarded")
        .when(resolved["replaced"], "replaced")
        .when(sf.coalesce("revoked_at", "died_at") >= sf.col("expires_at"), "expired")
        .when(sf.col("revoked_at").isNotNull(), "cancelled")
        .when(ended.isNotNull() & ~resolved["redelivered"], "dead")
        .when(sf.col("tried_at") < stuck, "not_processed")
        .when(sf.col("received_at").isNotNull(), "in_flight")
        .when(
            sf.col("dispatched_at").isNull() & (sf.col("due_again_at") < stuck),
            "not_sent",
        )
        .when(sf.col("dispatched_at").isNull() | young, "in_flight")
        .when(elsewhere, "external")
        .when(sf.col("expires_at") < limit, "expired")
        .when(left >= _inbox_from(by), "never_received")
    )


def _inbox_from(by: Judgement) -> Column:
    """Return the instant from which the receiver's inbox is complete. If several
    services may be the receiver, the last of their instants."""
    latest = sorted(by.inbox_from.items(), key=lambda one: one[1], reverse=True)
    there = [
        sf.when(
            sf.col("destination").isin(*(at for who, at in by.receivers if who == one)),
            timestamp(start),
        )
        for one, start in latest
    ]
    listener = of_service(service_of(sf.col("consumer")), by.inbox_from)
    last = max(by.inbox_from.values(), default=EPOCH)
    return sf.coalesce(listener, *there, timestamp(last))


def _is_a_task(by: Judgement) -> Column:
    """Return True if the message seems to be a Celery task whose worker keeps no inbox:
    the message went to a Celery broker, and no inbox has received any message from its
    destination."""
    by_celery = sf.lit(False)
    for service, alias in by.task_brokers:
        sent = (sf.col("sender") == service) & (sf.col("broker") == alias)
        by_celery = by_celery | sent
    not_received = ~sf.col("destination").isin(*by.received)
    return sf.coalesce(by_celery & not_received, sf.lit(False))


def _late(by: Judgement) -> Column:
    """Return the time after which a message is late at its destination, in
    microseconds."""
    limits = [
        sf.when(fits(sf.col("destination"), [pattern]), sf.lit(limit // MICROSECOND))
        for pattern, limit in by.late_at
    ]
    return sf.coalesce(*limits, sf.lit(by.late_after // MICROSECOND))


def _ahead(by: Judgement) -> Column:
    """Return by how much the receiver's clock is ahead of the sender's clock, in
    microseconds."""
    receiver = service_of(sf.col("consumer"))
    known = [
        sf.when((sf.col("sender") == sender) & (receiver == name), sf.lit(micros))
        for sender, name, micros in by.clocks
    ]
    return sf.coalesce(*known, sf.lit(0))
