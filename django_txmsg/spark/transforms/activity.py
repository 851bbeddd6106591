"""What happened per hour: throughput, backlog, redeliveries, senders."""

from __future__ import annotations

import datetime as dt

import pyspark.sql.functions as sf
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import types as t

from .instants import timestamp
from .journeys import due_at

THROUGHPUT = t.StructType(
    [
        t.StructField("hour", t.TimestampType()),
        t.StructField("stored", t.LongType()),
        t.StructField("dispatched", t.LongType()),
        t.StructField("processed", t.LongType()),
        t.StructField("buried", t.LongType()),
    ]
)

BACKLOG = t.StructType(
    [t.StructField("hour", t.TimestampType()), t.StructField("backlog", t.LongType())]
)

REDELIVERIES = t.StructType(
    [
        t.StructField("receiver", t.StringType()),
        t.StructField("stage", t.StringType()),
        t.StructField("messages", t.LongType()),
        t.StructField("redelivered", t.LongType()),
        t.StructField("deliveries", t.LongType()),
        t.StructField("attempts", t.LongType()),
        t.StructField("dead", t.LongType()),
    ]
)

SENDERS = t.StructType(
    [
        t.StructField("sender", t.StringType()),
        t.StructField("destination", t.StringType()),
        t.StructField("messages", t.LongType()),
        t.StructField("dead", t.LongType()),
    ]
)


def throughput(sent: DataFrame, received: DataFrame) -> DataFrame:
    """Return THROUGHPUT: how many messages reached each state in each hour."""
    events = _events(sent, "stored", "created_at")
    for frame, kind, instant in (
        (sent, "dispatched", "dispatched_at"),
        (received, "processed", "processed_at"),
        (received, "buried", "dead_at"),
    ):
        events = events.unionByName(_events(frame, kind, instant))
    kinds = [f.name for f in THROUGHPUT.fields if f.name != "hour"]
    return events.groupBy("hour").agg(
        *[sf.count_if(sf.col("kind") == kind).alias(kind) for kind in kinds]
    )


def backlog(sent: DataFrame, since: dt.datetime, until: dt.datetime) -> DataFrame:
    """Return BACKLOG: messages that are due and not dispatched at the end of each hour.
    Messages that were waiting at `since` count from that hour on. Messages that are due
    after `until` are left out."""
    left = sf.coalesce("dispatched_at", "dead_at")
    start = timestamp(since)
    stored, gone, dead = (sf.col(n) for n in ("created_at", "dispatched_at", "dead_at"))
    # In a form by which Spark skips the parts of the lake's files that ended before.
    sent = sent.where(
        (stored >= start)
        | (gone >= start)
        | (gone.isNull() & ((dead >= start) | dead.isNull()))
    )
    sent = sent.withColumn("wanted_at", due_at()).where(
        (sf.col("wanted_at") <= timestamp(until))
        & (left.isNull() | (left >= sf.col("wanted_at")))
    )
    came = sf.date_trunc("hour", sf.greatest("wanted_at", start)).alias("hour")
    changes = sent.select(came, sf.lit(1).alias("change")).unionByName(
        sent.where(left.isNotNull()).select(
            sf.date_trunc("hour", left).alias("hour"), sf.lit(-1).alias("change")
        )
    )
    hours = changes.groupBy("hour").agg(sf.sum("change").alias("change"))
    # As many rows as there are hours: one partition is enough for years.
    so_far = Window.orderBy("hour").rowsBetween(Window.unboundedPreceding, 0)
    return hours.select("hour", sf.sum("change").over(so_far).alias("backlog"))


def redeliveries(received: DataFrame) -> DataFrame:
    """Return REDELIVERIES: what each stage received more than once, retried, and gave
    up."""
    again = (sf.col("deliveries") > 1) | (sf.col("attempts") > 1)
    return received.groupBy(sf.col("service").alias("receiver"), "stage").agg(
        sf.count("*").alias("messages"),
        sf.count_if(again).alias("redelivered"),
        sf.sum("deliveries").cast("long").alias("deliveries"),
        sf.sum("attempts").cast("long").alias("attempts"),
        sf.count("dead_at").alias("dead"),
    )


def senders(sent: DataFrame) -> DataFrame:
    """Return SENDERS: who sends how much to where. Cancelled messages are no
    failures."""
    failed = sf.col("cancelled_at").isNull()
    return sent.groupBy(sf.col("service").alias("sender"), "destination").agg(
        sf.count("*").alias("messages"),
        sf.count(sf.when(failed, sf.col("dead_at"))).alias("dead"),
    )


def _events(frame: DataFrame, kind: str, instant: str) -> DataFrame:
    return frame.where(sf.col(instant).isNotNull()).select(
        _hour(instant), sf.lit(kind).alias("kind")
    )


def _hour(instant: str) -> Column:
    return sf.date_trunc("hour", instant).alias("hour")
