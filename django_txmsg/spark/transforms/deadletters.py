"""Dead letters grouped by error: first and last seen, and their growth."""

from __future__ import annotations

import pyspark.sql.functions as sf
from pyspark.sql import Column, DataFrame
from pyspark.sql import types as t

#: The version of the fingerprint's definition: groups of different versions do not mix.
RECIPE = "s1"

GROUPS = t.StructType(
    [
        t.StructField("group", t.StringType()),
        t.StructField("receiver", t.StringType()),
        t.StructField("stage", t.StringType()),
        t.StructField("reason", t.StringType()),
        t.StructField("exception", t.StringType()),
        t.StructField("letters", t.LongType()),
        t.StructField("open", t.LongType()),
        t.StructField("first_seen", t.TimestampType()),
        t.StructField("last_seen", t.TimestampType()),
        t.StructField("growth", t.ArrayType(t.LongType())),
    ]
)

_UUID = r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"


def with_fingerprint(letters: DataFrame) -> DataFrame:
    """Add `group`: the fingerprint stored by the service or, if there is none, one made
    of the exception's class and its message without ids and numbers."""
    told = sf.regexp_replace("exception", _UUID, "#")
    told = sf.regexp_replace(told, r"0x[0-9a-fA-F]+|\d+", "#")
    made = sf.concat(
        sf.lit(f"{RECIPE}-"),
        sf.substring(sf.sha2(sf.concat_ws("|", "reason", "stage", told), 256), 1, 16),
    )
    stored = sf.col("fingerprint")
    return letters.withColumn("group", sf.when(stored != "", stored).otherwise(made))


def groups(letters: DataFrame, *, buckets: int = 24) -> DataFrame:
    """Return GROUPS; `growth` counts letters in equal parts of the period."""
    marked = with_fingerprint(letters)
    # Over all groups, so that their small charts share an axis.
    ends = marked.agg(
        sf.unix_micros(sf.min("created_at")).alias("low"),
        sf.unix_micros(sf.max("created_at")).alias("high"),
    )
    placed = marked.crossJoin(sf.broadcast(ends)).withColumn("bucket", _bucket(buckets))
    counts = [sf.count_if(sf.col("bucket") == number) for number in range(buckets)]
    grouped = placed.groupBy(
        "group", sf.col("service").alias("receiver"), "stage", "reason"
    ).agg(
        sf.max_by("exception", "created_at").alias("exception"),
        sf.count("*").alias("letters"),
        sf.count_if(sf.col("resolution") == "open").alias("open"),
        sf.min("created_at").alias("first_seen"),
        sf.max("created_at").alias("last_seen"),
        sf.array(*counts).alias("growth"),
    )
    return grouped.select(*GROUPS.fieldNames())


def _bucket(buckets: int) -> Column:
    width = sf.greatest(sf.col("high") - sf.col("low"), sf.lit(1))
    place = (sf.unix_micros("created_at") - sf.col("low")) * buckets / width
    return sf.least(sf.floor(place), sf.lit(buckets - 1))
