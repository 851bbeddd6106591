"""What was sent against what was received, per message and consumer.

`reconcile()` judges every pair of a message and a consumer that should have it. A
message younger than the horizon is never called lost: its traces may not be loaded.
"""

from __future__ import annotations

import datetime as dt

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
        t.StructField("dispatched_at", t.TimestampType()),
        t.StructField("dead_at", t.TimestampType()),
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

#: What `expected` must have: who receives what is sent to a topic, and since when.
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
) -> DataFrame:
    """Return one VERDICT row for each message and each consumer of it.

    A queue's message has one consumer, whoever it was. A topic's has all those of
    `expected` that were there when it was sent.
    """
    senders = _senders(sent)
    receipts = _receipts(received)
    wanted = senders.join(
        sf.broadcast(expected),
        on=[
            senders.destination == expected.destination,
            senders.sent_at >= expected.since,
        ],
        how="left",
    ).select(
        senders["*"],
        sf.when(_is_topic(senders.destination), expected.consumer).alias("consumer"),
        sf.lit(True).alias("was_sent"),
    )
    # A queue matches by message and destination: its pair is empty on both sides.
    wanted = wanted.dropDuplicates(["message_id", "destination", "consumer"])
    keyed = wanted.withColumn("pair", sf.coalesce("consumer", sf.lit(""))).alias("w")
    pair = sf.when(_is_topic(sf.col("destination")), sf.col("consumer")).otherwise("")
    receipts = receipts.withColumn("pair", pair).alias("r")
    joined = keyed.join(
        receipts,
        on=[
            sf.col("w.message_id") == sf.col("r.message_id"),
            sf.col("w.destination") == sf.col("r.destination"),
            sf.col("w.pair") == sf.col("r.pair"),
        ],
        how="full",
    ).select(
        sf.coalesce("w.message_id", "r.message_id").alias("message_id"),
        sf.coalesce("w.destination", "r.destination").alias("destination"),
        sf.col("w.sender").alias("sender"),
        sf.coalesce("r.consumer", "w.consumer").alias("consumer"),
        sf.coalesce("w.sent_at", "r.sent_at").alias("sent_at"),
        sf.col("w.dispatched_at").alias("dispatched_at"),
        sf.col("w.died_at").alias("died_at"),
        sf.col("r.received_at").alias("received_at"),
        sf.col("r.processed_at").alias("processed_at"),
        sf.col("r.buried_at").alias("buried_at"),
        sf.coalesce("r.deliveries", sf.lit(0)).cast("long").alias("deliveries"),
        sf.coalesce("r.times_processed", sf.lit(0))
        .cast("long")
        .alias("times_processed"),
        sf.coalesce("w.was_sent", sf.lit(False)).alias("was_sent"),
    )
    # A message stored for a topic nobody listens to owes nothing to anybody.
    owed = joined.where(
        ~(
            _is_topic(sf.col("destination"))
            & sf.col("consumer").isNull()
            & sf.col("received_at").isNull()
            & sf.col("died_at").isNull()
        )
    )
    return owed.select(
        *[name for name in VERDICT.fieldNames() if name != "verdict"],
        _verdict(horizon, late_after).alias("verdict"),
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


def _senders(sent: DataFrame) -> DataFrame:
    """One row a message, whoever stored it again: a replay, a redelivery."""
    return sent.groupBy("message_id", "destination").agg(
        sf.min("service").alias("sender"),
        sf.min("created_at").alias("sent_at"),
        sf.min("dispatched_at").alias("dispatched_at"),
        # Dead only if no row of it has left or may still leave.
        sf.when(sf.count("*") == sf.count("dead_at"), sf.max("dead_at")).alias(
            "died_at"
        ),
    )


def _receipts(received: DataFrame) -> DataFrame:
    """One row for a message at a consumer. Two inbox rows of one pair mean that the
    first was deleted before the message came again: only the lake knows of both."""
    return received.groupBy(
        "message_id", "destination", _consumer().alias("consumer")
    ).agg(
        sf.min("created_at").alias("sent_at"),
        sf.min("first_received_at").alias("received_at"),
        sf.min("processed_at").alias("processed_at"),
        sf.max("dead_at").alias("buried_at"),
        sf.sum("deliveries").alias("deliveries"),
        sf.count("processed_at").alias("times_processed"),
    )


def _verdict(horizon: dt.datetime, late_after: dt.timedelta) -> Column:
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
        .when(sf.col("buried_at").isNotNull() | sf.col("died_at").isNotNull(), "dead")
        .when(sf.col("received_at").isNotNull(), "in_flight")
        .when(sf.col("dispatched_at").isNull() | young, "in_flight")
        .otherwise("never_received")
    )


def _consumer() -> Column:
    return sf.concat_ws("/", "service", "stage")


def _is_topic(destination: Column) -> Column:
    return destination.startswith(wire.TOPIC_PREFIX)
