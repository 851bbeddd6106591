"""Where a session's tasks run, and how many at once: the same of Spark Connect."""

from __future__ import annotations

from pyspark.sql import SparkSession
from pyspark.sql.functions import spark_partition_id


def is_remote(spark: SparkSession) -> bool:
    """Whether a session is one of a Spark Connect server."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def parallelism(spark: SparkSession) -> int:
    """Return how many tasks can work at once."""
    if is_remote(spark):
        places = spark.range(10_000).select(spark_partition_id().alias("place"))
        return int(places.distinct().count())
    return int(spark.sparkContext.defaultParallelism)


def on_one_machine(spark: SparkSession) -> bool:
    """Whether the tasks run in this process's machine. Nobody knows of a server."""
    if is_remote(spark):
        return False
    return (spark.sparkContext.master or "").startswith("local")
