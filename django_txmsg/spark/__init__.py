"""The data pipeline on Spark: the message log archived, reconciled, analysed, replayed.

It reads the tables that hops 2 and 7 write and needs no Django: a job is described by
a `JobSpec`, and executors import this package alone. Importing it imports nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Make `format("txmsg")` known to a session, for reads, streams and writes."""
    from .source.datasource import TxmsgDataSource

    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.dataSource.register(TxmsgDataSource)
