"""What was sent against what was received, per message and consumer.

`reconcile()` judges every pair of a message and a consumer that should have it. A
message younger than the horizon is never called lost: its traces may not be loaded.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

import pyspark.sql.functions as sf
from pyspark.sql import Column, DataFrame
from pyspark.sql import types as t

from ... import wire

#: What `sent` must have: outbox rows of all services.
SENT = t.StructType(
    [
        t.StructField("service", t.StringType()),
        t.StructField("message_id", t.StringType()),
        t.StructField("destination", t.StringType()),
        t.StructField("created_at", t.TimestampType()),
        t.StructField("expires_at", t.TimestampType()),
        t.StructField("dispatched_at", t.TimestampType()),
        t.StructField("dead_at", t.TimestampType()),
        t.StructField("last_error", t.StringType()),
    ]
)

#: What `received` must have: inbox rows of all services, each row once.
RECEIVED = t.StructType(
    [
        t.StructField("service", t.StringType()),
        t.StructField("stage", t.StringType()),
        t.StructField("message_id", t.StringType()),
        t.StructField("destination", t.StringType()),
        t.StructField("created_at", t.TimestampType()),
        t.StructField("first_received_at", t.TimestampType()),
        t.StructField("processed_at", t.TimestampType()),
        t.StructField("dead_at", t.TimestampType()),
        t.StructField("deliveries", t.IntegerType()),
    ]
)

#: What `expected` must have: who receives what is sent to a topic, and since when;
#: each pair once.
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

#: A verdict that is worth a look, and when a run has first come to it.
FINDING = t.StructType(
    [
        *VERDICT.fields,
        t.StructField("found_at", t.TimestampType()),
        t.StructField("acknowledged_at", t.TimestampType()),
    ]
)

#: What is known of findings already. No consumer is an empty one.
KNOWN = t.StructType(
    [
        *[
            VERDICT[name]
            for name in ("message_id", "destination", "consumer", "verdict")
        ],
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

#: How the last error begins of an outbox row that was cancelled, and not given up on.
CANCELLED = "cancelled: "

#: Verdicts that end a run with exit code 1, and those that are worth a look.
LOST = ("never_received", "processed_twice")
FINDINGS = (*LOST, "dead", "late", "unknown_sender")


def reconcile(
    sent: DataFrame,
    received: DataFrame,
    expected: DataFrame,
    *,
    horizon: dt.datetime,
    late_after: dt.timedelta,
    external: Sequence[str] = (),
) -> DataFrame:
    """Return one VERDICT row for each message and each consumer of it.

    A queue's message has one consumer: if two have processed it, it was processed
    twice. A topic's has all those of `expected` that were there when it was sent.
    Destinations in `external` are consumed by what keeps no log here.

    What was sent and what was received are one frame, and meet in one exchange of it.
    """
    pairs = _owed(sent, expected).unionByName(_receipts(received))
    stored = sf.count("stored_at")
    first, last = sf.min("consumer"), sf.max("consumer")
    judged = pairs.groupBy("message_id", "destination", "pair").agg(
        sf.min("sender").alias("sender"),
        sf.when(first == last, first)
        .when(first.isNotNull(), sf.concat_ws(", ", first, last))
        .when(sf.col("pair") != "", sf.col("pair"))
        .alias("consumer"),
        sf.coalesce(sf.min("stored_at"), sf.min("told_at")).alias("sent_at"),
        sf.min("dispatched_at").alias("dispatched_at"),
        # Dead, or expired, only if no row of it has left or may still leave.
        sf.when(stored == sf.count("died_at"), sf.max("died_at")).alias("died_at"),
        sf.when(stored == sf.count("expires_at"), sf.max("expires_at")).alias(
            "expires_at"
        ),
        sf.min("received_at").alias("received_at"),
        sf.min("processed_at").alias("processed_at"),
        sf.max("buried_at").alias("buried_at"),
        sf.coalesce(sf.sum("deliveries"), sf.lit(0)).cast("long").alias("deliveries"),
        sf.count("processed_at").alias("times_processed"),
        (stored > 0).alias("was_sent"),
        (sf.count("cancelled_at") == sf.count("died_at")).alias("by_intent"),
    )
    # A message stored for a topic nobody listens to owes nothing to anybody.
    owed = judged.where(
        ~(
            _is_topic(sf.col("destination"))
            & (sf.col("pair") == "")
            & sf.col("died_at").isNull()
        )
    )
    return owed.select(
        *[name for name in VERDICT.fieldNames() if name != "verdict"],
        _verdict(horizon, late_after, external).alias("verdict"),
    )


def aged(verdicts: DataFrame, known: DataFrame, now: dt.datetime) -> DataFrame:
    """Return the FINDING rows among verdicts, each with the instant of the first run
    that found it: by KNOWN rows, several of a finding maybe, or else `now`."""
    names = KNOWN.fieldNames()[:4]
    first = known.groupBy(
        *[sf.coalesce(name, sf.lit("")).alias(f"known_{name}") for name in names]
    ).agg(
        sf.min("found_at").alias("first_at"),
        sf.max("acknowledged_at").alias("acknowledged_at"),
    )
    same = [sf.coalesce(name, sf.lit("")) == sf.col(f"known_{name}") for name in names]
    present = sf.timestamp_micros(sf.lit(int(now.timestamp() * 1_000_000)))
    return (
        verdicts.where(sf.col("verdict").isin(*FINDINGS))
        .join(first, same, "left")
        .withColumn("found_at", sf.coalesce("first_at", present))
        .select(*FINDING.fieldNames())
    )


def summarise(verdicts: DataFrame) -> DataFrame:
    """Return SUMMARY: verdicts counted per day, destination and kind."""
    return verdicts.groupBy(
        sf.to_date("sent_at").alias("sent_on"), "destination", "verdict"
    ).agg(
        sf.count("*").alias("messages"),
        sf.min("sent_at").alias("first_sent_at"),
        sf.max("sent_at").alias("last_sent_at"),
    )


def observed(received: DataFrame) -> DataFrame:
    """Return EXPECTED as the logs have it: whoever has received from a topic is
    expected to receive what was sent since the first message it got."""
    topics = received.where(_is_topic(sf.col("destination")))
    return topics.groupBy("destination", _consumer().alias("consumer")).agg(
        sf.min(sf.coalesce("created_at", "first_received_at")).alias("since")
    )


def _owed(sent: DataFrame, expected: DataFrame) -> DataFrame:
    """Return a row for each outbox row and each consumer that should have it: whoever
    listened when it was stored, by the message's sender or by a replay."""
    wanted = expected.select(
        sf.col("destination").alias("topic"),
        sf.col("consumer").alias("listener"),
        "since",
    )
    listens = (sf.col("destination") == sf.col("topic")) & (
        sf.col("created_at") >= sf.col("since")
    )
    return _complete(
        sent.join(sf.broadcast(wanted), listens, "left"),
        pair=sf.coalesce("listener", sf.lit("")),
        sender=sf.col("service"),
        stored_at=sf.col("created_at"),
        dispatched_at=sf.col("dispatched_at"),
        died_at=sf.col("dead_at"),
        cancelled_at=sf.when(
            sf.col("last_error").startswith(CANCELLED), sf.col("dead_at")
        ),
        expires_at=sf.col("expires_at"),
    )


def _receipts(received: DataFrame) -> DataFrame:
    """Return inbox rows. Two of one message at one consumer mean that the first was
    deleted before the message came again: only the lake knows of both."""
    topic = _is_topic(sf.col("destination"))
    return _complete(
        received,
        pair=sf.when(topic, _consumer()).otherwise(""),
        consumer=_consumer(),
        told_at=sf.col("created_at"),
        received_at=sf.col("first_received_at"),
        processed_at=sf.col("processed_at"),
        buried_at=sf.col("dead_at"),
        deliveries=sf.col("deliveries"),
    )


_TEXTS = ("pair", "consumer", "sender")
_INSTANTS = (
    "stored_at", "told_at", "dispatched_at", "expires_at", "died_at", "cancelled_at",
    "received_at", "processed_at", "buried_at",
)  # fmt: skip


def _complete(frame: DataFrame, **known: Column) -> DataFrame:
    """Return the columns that both sides have, null where this side knows nothing."""
    types = dict.fromkeys(_TEXTS, "string") | dict.fromkeys(_INSTANTS, "timestamp")
    types["deliveries"] = "int"
    return frame.select(
        "message_id",
        "destination",
        *[
            known.get(name, sf.lit(None)).cast(kind).alias(name)
            for name, kind in types.items()
        ],
    )


def _verdict(
    horizon: dt.datetime, late_after: dt.timedelta, external: Sequence[str]
) -> Column:
    limit = sf.timestamp_micros(sf.lit(int(horizon.timestamp() * 1_000_000)))
    took = sf.unix_micros("processed_at") - sf.unix_micros("sent_at")
    young = sf.coalesce("sent_at", "received_at") >= limit
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


def _consumer() -> Column:
    return sf.concat_ws("/", "service", "stage")


def _is_topic(destination: Column) -> Column:
    return destination.startswith(wire.TOPIC_PREFIX)
