"""How long messages take: one sketch of every stage's times for each hour.

Sketches can be merged over hours, days and destinations; percentiles cannot.
"""

from __future__ import annotations

import pyspark.sql.functions as sf
from pyspark.sql import Column, DataFrame
from pyspark.sql import types as t

from .journeys import due_at

LATENCY = t.StructType(
    [
        t.StructField("receiver", t.StringType()),
        t.StructField("stage", t.StringType()),
        t.StructField("destination", t.StringType()),
        t.StructField("hour", t.TimestampType()),
        t.StructField("measure", t.StringType()),
        t.StructField("messages", t.LongType()),
        t.StructField("negative", t.LongType()),
        t.StructField("longest", t.DoubleType()),
        t.StructField("sketch", t.BinaryType()),
    ]
)

PERCENTILES = t.StructType(
    [
        t.StructField("messages", t.LongType()),
        t.StructField("negative", t.LongType()),
        t.StructField("p50", t.DoubleType()),
        t.StructField("p95", t.DoubleType()),
        t.StructField("p99", t.DoubleType()),
        t.StructField("longest", t.DoubleType()),
    ]
)

#: Each measure, and the instants it lies between, all from the receiver's row.
MEASURES = {
    "critical": ("created_at", "processed_at"),
    "transit": ("created_at", "first_received_at"),
    "processing": ("started_at", "processed_at"),
}


def from_due(received: DataFrame, sent: DataFrame) -> DataFrame:
    """Return inbox rows in which `created_at` of a delayed message is the instant at
    which it was due, because an intended delay does not count as latency."""
    delayed = sent.where(due_at() > sf.col("created_at"))
    due = delayed.groupBy("message_id").agg(sf.min(due_at()).alias("wanted_at"))
    wanted = sf.coalesce("wanted_at", "created_at")
    return (
        received.join(due, "message_id", "left")
        .withColumn("created_at", wanted)
        .select(*received.columns)
    )


def stage_latencies(received: DataFrame) -> DataFrame:
    """Return LATENCY for processed inbox rows, in seconds.

    Two clocks may disagree: negative times are kept in the sketch unchanged, and
    counted, so that they are not mistaken for speed.
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
    return (
        each.groupBy("receiver", "stage", "destination", "hour", "measure")
        .agg(
            sf.count("*").alias("messages"),
            sf.count_if(sf.col("seconds") < 0).alias("negative"),
            sf.max("seconds").alias("longest"),
            sf.kll_sketch_agg_double("seconds").alias("sketch"),
        )
        .select(*LATENCY.fieldNames())
    )


def percentiles(latencies: DataFrame, *by: str) -> DataFrame:
    """Merge the sketches of LATENCY rows `by` columns and return PERCENTILES."""
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
