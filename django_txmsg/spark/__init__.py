"""The data pipeline on Spark: the message log archived, reconciled, analysed, replayed.

It reads the tables that hops 2 and 7 write, and needs no Django. A `JobSpec` describes
a job. Executors import only this package. The package itself imports nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Register `format("txmsg")` with a session, for reads, streams and writes."""
    from .source.datasource import TxmsgDataSource

    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.dataSource.register(TxmsgDataSource)
