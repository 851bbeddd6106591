"""Finds out where the tasks of a Spark session run, and how many of them at the same
time. Works with Spark Connect, too."""

from __future__ import annotations

from pyspark.sql import SparkSession
from pyspark.sql.functions import spark_partition_id


def is_remote(spark: SparkSession) -> bool:
    """Return whether a session belongs to a Spark Connect server."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def parallelism(spark: SparkSession) -> int:
    """Return how many tasks can run at the same time."""
    if is_remote(spark):
        places = spark.range(10_000).select(spark_partition_id().alias("place"))
        return int(places.distinct().count())
    return int(spark.sparkContext.defaultParallelism)


def on_one_machine(spark: SparkSession) -> bool:
    """Return whether the tasks run on the same machine as this process. Returns False
    for Spark Connect, because the server's machine is unknown."""
    if is_remote(spark):
        return False
    return (spark.sparkContext.master or "").startswith("local")
