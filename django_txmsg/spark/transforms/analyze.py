"""The data of the report: latencies, throughput, backlog, redeliveries and dead
letters.

Latencies are stored as one sketch for each stage and hour. Unlike percentiles, sketches
can be merged over hours, days and destinations.
"""

from __future__ import annotations

import datetime as dt
from functools import reduce

import pyspark.sql.functions as sf
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import types as t

from ..schemas import struct_of
from . import timestamp
from .journeys import due_at

LATENCY = struct_of(
    "receiver string, stage string, destination string, hour timestamp, "
    "measure string, messages long, negative long, longest double, sketch binary"
)

#: Each measure, and the instants it lies between, all from the receiver's row.
MEASURES = {
    "critical": ("created_at", "processed_at"),
    "transit": ("created_at", "first_received_at"),
    "processing": ("started_at", "processed_at"),
}


def from_due(received: DataFrame, sent: DataFrame) -> DataFrame:
    """Return the inbox rows. For a delayed message, `created_at` is its due time,
    because an intended delay is not latency."""
    delayed = sent.where(due_at() > sf.col("created_at"))
    due = delayed.groupBy("message_id").agg(sf.min(due_at()).alias("wanted_at"))
    wanted = sf.coalesce("wanted_at", "created_at")
    return (
        received.join(due, "message_id", "left")
        .withColumn("created_at", wanted)
        .select(*received.columns)
    )


def stage_latencies(received: DataFrame) -> DataFrame:
    """Return LATENCY rows for the processed inbox rows, in seconds.

    A latency is negative if two clocks differ. Negative values stay in the sketch. They
    are also counted separately, so that nobody mistakes them for speed.
    """
    processed = received.where("processed_at IS NOT NULL")
    times = sf.array(
        *[
            sf.struct(sf.lit(name).alias("measure"), _seconds(*ends).alias("seconds"))
            for name, ends in MEASURES.items()
        ]
    )
    each = processed.select(
        sf.col("service").alias("receiver"),
        "stage",
        "destination",
        sf.date_trunc("hour", "processed_at").alias("hour"),
        sf.inline(times),
    ).where("seconds IS NOT NULL")
    return each.groupBy("receiver", "stage", "destination", "hour", "measure").agg(
        sf.count("*").alias("messages"),
        sf.count_if(sf.col("seconds") < 0).alias("negative"),
        sf.max("seconds").alias("longest"),
        sf.kll_sketch_agg_double("seconds").alias("sketch"),
    )


def percentiles(latencies: DataFrame, *by: str) -> DataFrame:
    """Return the percentiles for each combination of values in the columns `by`,
    computed from the sketches of LATENCY rows."""
    merged = latencies.groupBy(*by).agg(
        sf.sum("messages").alias("messages"),
        sf.sum("negative").alias("negative"),
        sf.max("longest").alias("longest"),
        sf.kll_merge_agg_double("sketch").alias("sketch"),
    )
    return merged.select(
        *by,
        "messages",
        "negative",
        *[_quantile(rank).alias(f"p{rank}") for rank in (50, 95, 99)],
        "longest",
    )


def _quantile(rank: int) -> Column:
    # Without any message there is no percentile, and no sketch to query.
    found = sf.kll_sketch_get_quantile_double("sketch", sf.lit(rank / 100))
    return sf.when(sf.col("messages") > 0, found)


def _seconds(start: str, end: str) -> Column:
    return (sf.unix_micros(end) - sf.unix_micros(start)) / 1e6


THROUGHPUT = struct_of(
    "hour timestamp, stored long, dispatched long, processed long, buried long"
)

BACKLOG = struct_of("hour timestamp, backlog long")

REDELIVERIES = struct_of(
    "receiver string, stage string, messages long, redelivered long, "
    "deliveries long, attempts long, dead long"
)

SENDERS = struct_of("sender string, destination string, messages long, dead long")


def throughput(sent: DataFrame, received: DataFrame) -> DataFrame:
    """Return THROUGHPUT rows: for each hour, the number of messages that reached each
    state."""
    events = [
        frame.select(
            sf.date_trunc("hour", instant).alias("hour"), sf.lit(kind).alias("kind")
        )
        for frame, kind, instant in (
            (sent, "stored", "created_at"),
            (sent, "dispatched", "dispatched_at"),
            (received, "processed", "processed_at"),
            (received, "buried", "dead_at"),
        )
    ]
    whole = reduce(DataFrame.unionByName, events).where("hour IS NOT NULL")
    by_kind = whole.groupBy("hour").pivot("kind", [*THROUGHPUT.fieldNames()[1:]])
    return by_kind.count().fillna(0)


def backlog(sent: DataFrame, since: dt.datetime, until: dt.datetime) -> DataFrame:
    """Return BACKLOG rows: for the end of each hour, the number of messages that were
    due, but not dispatched. Messages that were already waiting at `since` are included.
    Messages that are due after `until` are left out."""
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
    """Return REDELIVERIES rows: for each stage, the number of messages that were
    delivered more than once, tried again, or given up."""
    again = (sf.col("deliveries") > 1) | (sf.col("attempts") > 1)
    return received.groupBy(sf.col("service").alias("receiver"), "stage").agg(
        sf.count("*").alias("messages"),
        sf.count_if(again).alias("redelivered"),
        sf.sum("deliveries").cast("long").alias("deliveries"),
        sf.sum("attempts").cast("long").alias("attempts"),
        sf.count("dead_at").alias("dead"),
    )


def senders(sent: DataFrame) -> DataFrame:
    """Return SENDERS rows: the number of messages from each sender to each destination.
    Cancelled messages do not count as failed."""
    failed = sf.col("cancelled_at").isNull()
    return sent.groupBy(sf.col("service").alias("sender"), "destination").agg(
        sf.count("*").alias("messages"),
        sf.count(sf.when(failed, sf.col("dead_at"))).alias("dead"),
    )


#: The version of the fingerprint's definition: groups of different versions do not mix.
RECIPE = "s1"
#: Parts of the period for which a group's dead letters are counted.
BUCKETS = 24

GROUPS = struct_of(
    "group string, receiver string, stage string, reason string, exception string, "
    "letters long, open long, first_seen timestamp, last_seen timestamp"
).add("growth", t.ArrayType(t.LongType()))

_UUID = r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"


def with_fingerprint(letters: DataFrame) -> DataFrame:
    """Add the column `group`. It contains the fingerprint that the service has stored.
    If the service has stored none, the fingerprint is computed from the reason, the
    stage and the exception's text without ids and numbers."""
    masked = sf.regexp_replace("exception", _UUID, "#")
    masked = sf.regexp_replace(masked, r"0x[0-9a-fA-F]+|\d+", "#")
    made = sf.concat(
        sf.lit(f"{RECIPE}-"),
        sf.substring(sf.sha2(sf.concat_ws("|", "reason", "stage", masked), 256), 1, 16),
    )
    stored = sf.col("fingerprint")
    return letters.withColumn("group", sf.when(stored != "", stored).otherwise(made))


def groups(letters: DataFrame) -> DataFrame:
    """Return GROUPS rows: the dead letters by fingerprint, service, stage and reason.
    The column `growth` has the number of dead letters in each of BUCKETS equal parts
    of the period."""
    marked = with_fingerprint(letters)
    # Over all groups, so that their small charts share an axis.
    ends = marked.agg(
        sf.unix_micros(sf.min("created_at")).alias("low"),
        sf.unix_micros(sf.max("created_at")).alias("high"),
    )
    width = sf.greatest(sf.col("high") - sf.col("low"), sf.lit(1))
    place = (sf.unix_micros("created_at") - sf.col("low")) * BUCKETS / width
    bucket = sf.least(sf.floor(place), sf.lit(BUCKETS - 1))
    placed = marked.crossJoin(sf.broadcast(ends)).withColumn("bucket", bucket)
    counts = [sf.count_if(sf.col("bucket") == number) for number in range(BUCKETS)]
    return placed.groupBy(
        "group", sf.col("service").alias("receiver"), "stage", "reason"
    ).agg(
        sf.max_by("exception", "created_at").alias("exception"),
        sf.count("*").alias("letters"),
        sf.count_if(sf.col("resolution") == "open").alias("open"),
        sf.min("created_at").alias("first_seen"),
        sf.max("created_at").alias("last_seen"),
        sf.array(*counts).alias("growth"),
    )
