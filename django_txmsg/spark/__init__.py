"""The data pipeline on Spark. It archives, reconciles, analyses and replays the message
log.

It reads the tables of the outbox, the inbox and the dead letters, and needs no Django.
A `JobSpec` describes a job. Spark executors import modules of this package. Importing
the package itself loads neither Django nor PySpark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Register `format("txmsg")` with a Spark session. It can then be used for reads,
    streams and writes."""
    from .source.datasource import TxmsgDataSource

    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.dataSource.register(TxmsgDataSource)
