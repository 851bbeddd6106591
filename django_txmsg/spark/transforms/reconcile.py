"""Compares what was sent with what was received, per message and consumer.

`reconcile()` judges every pair of a message and a consumer that should have received
it. A message younger than the horizon is never judged lost: its rows may not be loaded
yet.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

import pyspark.sql.functions as sf
from pyspark.sql import Column, DataFrame
from pyspark.sql import types as t

from .instants import timestamp
from .journeys import is_topic, merged

#: The columns of `expected`: the subscribers of a topic, and since when; each pair
#: once.
EXPECTED = t.StructType(
    [
        t.StructField("destination", t.StringType()),
        t.StructField("consumer", t.StringType()),
        t.StructField("since", t.TimestampType()),
    ]
)

VERDICT = t.StructType(
    [
        t.StructField("message_id", t.StringType()),
        t.StructField("destination", t.StringType()),
        t.StructField("sender", t.StringType()),
        t.StructField("consumer", t.StringType()),
        t.StructField("sent_at", t.TimestampType()),
        t.StructField("dispatched_at", t.TimestampType()),
        t.StructField("received_at", t.TimestampType()),
        t.StructField("processed_at", t.TimestampType()),
        t.StructField("deliveries", t.LongType()),
        t.StructField("times_processed", t.LongType()),
        t.StructField("verdict", t.StringType()),
    ]
)

#: A verdict that is a finding, and when a run first found it.
FINDING = t.StructType(
    [
        *VERDICT.fields,
        t.StructField("found_at", t.TimestampType()),
        t.StructField("acknowledged_at", t.TimestampType()),
    ]
)

#: The columns by which another run recognises a finding.
_IDENTITY = ("message_id", "destination", "consumer", "verdict")

#: Known findings. No consumer is an empty text.
KNOWN = t.StructType(
    [
        *[VERDICT[n] for n in _IDENTITY],
        *FINDING.fields[len(VERDICT) :],
    ]
)

SUMMARY = t.StructType(
    [
        t.StructField("sent_on", t.DateType()),
        t.StructField("destination", t.StringType()),
        t.StructField("verdict", t.StringType()),
        t.StructField("messages", t.LongType()),
        t.StructField("first_sent_at", t.TimestampType()),
        t.StructField("last_sent_at", t.TimestampType()),
    ]
)

#: The columns of a summary, with a row for each finding.
OUTCOME = t.StructType([*SUMMARY.fields, t.StructField("finding", VERDICT)])

#: Verdicts that end a run with exit code 1, and verdicts that are findings.
LOST = ("never_received", "processed_twice")
FINDINGS = (*LOST, "dead", "late", "unknown_sender")


def reconcile(
    steps: DataFrame,
    expected: DataFrame,
    *,
    horizon: dt.datetime,
    late_after: dt.timedelta,
    external: Sequence[str] = (),
    since: dt.datetime | None = None,
) -> DataFrame:
    """Return one VERDICT row for each message and each of its consumers, from all its
    steps.

    A queue's message has one consumer: if two have processed it, it was processed
    twice. A topic's message has all consumers of `expected` that existed when it was
    sent. Destinations in `external` have consumers without a log here. Messages neither
    sent nor, if the sender is unknown, received since `since` are not judged.

    Sent and received messages are one frame, so one shuffle brings them together.
    """
    wanted = expected.select(
        sf.col("destination").alias("topic"),
        sf.col("consumer").alias("listener"),
        "since",
    )
    listens = (
        (sf.col("destination") == sf.col("topic"))
        & (sf.col("stored_at") >= sf.col("since"))
        & (sf.col("pair") == "")
    )
    owed = steps.join(sf.broadcast(wanted), listens, "left").withColumn(
        "pair", sf.coalesce("listener", "pair")
    )
    return judge(
        merged(owed, "message_id", "destination", "pair"),
        horizon=horizon, late_after=late_after, external=external, since=since,
    )  # fmt: skip


def judge(
    journeys: DataFrame,
    *,
    horizon: dt.datetime,
    late_after: dt.timedelta,
    external: Sequence[str] = (),
    since: dt.datetime | None = None,
) -> DataFrame:
    """Return the VERDICT rows of complete journeys: one row for each message and
    consumer."""
    if since is not None:
        start = timestamp(since)
        # In a form by which Spark skips parts of files.
        journeys = journeys.where(
            (sf.col("sent_again_at") >= start)
            | (sf.col("sent_again_at").isNull() & (sf.col("begun_at") >= start))
        )
    first, last = sf.col("consumer"), sf.col("other_consumer")
    told = journeys.select(
        "message_id",
        "destination",
        "pair",
        "sender",
        sf.when(first == last, first)
        .when(first.isNotNull(), sf.concat_ws(", ", first, last))
        .when(sf.col("pair") != "", sf.col("pair"))
        .alias("consumer"),
        sf.coalesce("stored_at", "told_at").alias("sent_at"),
        "sent_again_at",
        "dispatched_at",
        # Dead, or expired, only if no row of it has left or may still leave.
        sf.when(sf.col("stored") == sf.col("died"), sf.col("died_at")).alias("died_at"),
        sf.when(sf.col("stored") == sf.col("expire"), sf.col("expires_at")).alias(
            "expires_at"
        ),
        "received_at",
        "processed_at",
        "buried_at",
        "deliveries",
        "times_processed",
        (sf.col("stored") > 0).alias("was_sent"),
        (sf.col("cancelled") == sf.col("died")).alias("by_intent"),
    )
    # A message to a topic without subscribers has no one to reach.
    idle = (
        is_topic(sf.col("destination"))
        & (sf.col("pair") == "")
        & sf.col("died_at").isNull()
    )
    owed = told.where(~sf.coalesce(idle, sf.lit(False)))
    return owed.select(
        *[name for name in VERDICT.fieldNames() if name != "verdict"],
        _verdict(horizon, late_after, external).alias("verdict"),
    )


def is_finding(prefix: str) -> list[Column]:
    """Return the conditions that a finding is the one named by the columns with this
    prefix, in which an unknown value is an empty text."""
    return [sf.coalesce(n, sf.lit("")) == sf.col(f"{prefix}{n}") for n in _IDENTITY]


def aged(findings: DataFrame, known: DataFrame, now: dt.datetime) -> DataFrame:
    """Return FINDING rows: findings with the instant of the first run that found them:
    from KNOWN rows, perhaps several for a finding, or `now`."""
    first = known.groupBy(
        *[sf.coalesce(name, sf.lit("")).alias(f"known_{name}") for name in _IDENTITY]
    ).agg(
        sf.min("found_at").alias("first_at"),
        sf.max("acknowledged_at").alias("acknowledged_at"),
    )
    present = timestamp(now)
    return (
        findings.join(first, is_finding("known_"), "left")
        .withColumn("found_at", sf.coalesce("first_at", present))
        .select(*FINDING.fieldNames())
    )


def outcome(verdicts: DataFrame) -> DataFrame:
    """Return OUTCOME: verdicts counted per day, destination and kind, and each finding
    in a row of its own. The whole result of a run comes from one pass over the
    verdicts."""
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
    """Return SUMMARY: verdicts counted per day, destination and kind."""
    return outcome.groupBy("sent_on", "destination", "verdict").agg(
        sf.sum("messages").alias("messages"),
        sf.min("first_sent_at").alias("first_sent_at"),
        sf.max("last_sent_at").alias("last_sent_at"),
    )


def findings(outcome: DataFrame) -> DataFrame:
    """Return the VERDICT rows that are findings."""
    return outcome.where("finding IS NOT NULL").select("finding.*")


def observed(steps: DataFrame) -> DataFrame:
    """Return EXPECTED from the logs: each consumer that has received from a topic is
    expected to receive everything sent since the first message it received."""
    heard = steps.where(is_topic(sf.col("destination")) & (sf.col("pair") != ""))
    return heard.groupBy("destination", sf.col("pair").alias("consumer")).agg(
        sf.min("begun_at").alias("since")
    )


def _verdict(
    horizon: dt.datetime, late_after: dt.timedelta, external: Sequence[str]
) -> Column:
    limit = timestamp(horizon)
    took = sf.unix_micros("processed_at") - sf.unix_micros("sent_at")
    # A message that was sent again is in flight, however old it is.
    young = sf.coalesce("sent_again_at", "sent_at", "received_at") >= limit
    return (
        sf.when(sf.col("times_processed") > 1, "processed_twice")
        .when(~sf.col("was_sent") & young, "in_flight")
        .when(~sf.col("was_sent"), "unknown_sender")
        .when(
            sf.col("processed_at").isNotNull()
            & (took > int(late_after.total_seconds() * 1e6)),
            "late",
        )
        .when(
            sf.col("processed_at").isNotNull() & (sf.col("deliveries") > 1),
            "redelivered_deduplicated",
        )
        .when(sf.col("processed_at").isNotNull(), "ok")
        .when(
            sf.col("received_at").isNull()
            & sf.col("died_at").isNotNull()
            & sf.col("by_intent"),
            "cancelled",
        )
        .when(sf.col("buried_at").isNotNull() | sf.col("died_at").isNotNull(), "dead")
        .when(sf.col("received_at").isNotNull(), "in_flight")
        .when(sf.col("dispatched_at").isNull() | young, "in_flight")
        .when(sf.col("destination").isin(*external), "external")
        .when(sf.col("expires_at") < limit, "expired")
        .otherwise("never_received")
    )
