"""Merges rows of the lake and of live databases into one log that has each row once.
Also converts Python's instants into Spark's expressions."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from functools import reduce

import pyspark.sql.functions as sf
from pyspark.sql import Column, DataFrame
from pyspark.sql import types as t


def timestamp(value: dt.datetime) -> Column:
    """Return the expression for an aware datetime, whatever the session's time zone."""
    return sf.timestamp_micros(sf.lit(int(value.timestamp() * 1_000_000)))


def whole_log(
    frames: Sequence[DataFrame], struct: t.StructType, *, twice: bool = True
) -> DataFrame:
    """Return the union of `frames` with the columns of `struct`, each row once.

    While a batch is committed and not yet purged, its rows are both in the lake and in
    the database. Such a pair has the same service, id and message id. (The row of a
    message that was processed again has another id.) A single frame is returned as it
    is, so that conditions on it reach its files. If `twice` is False, the frames have
    no common row, and are only appended to each other, for the same reason.
    """
    columns = struct.fieldNames()
    keys = ["service", "id", "message_id"] if twice and len(frames) > 1 else []
    if keys and "stage" in columns:
        # A topic's message may have the same id in two databases of a service.
        keys.append("stage")
    wanted = list(dict.fromkeys([*keys, *columns]))
    whole = reduce(
        lambda one, other: one.unionByName(other),
        [frame.select(*wanted) for frame in frames],
    )
    return (whole.dropDuplicates(keys) if keys else whole).select(*columns)


def with_cancelled(archived: DataFrame) -> DataFrame:
    """Return the lake's outbox rows with `cancelled_at`. In files that are older than
    this column, the beginning of the error shows which rows were cancelled."""
    by_intent = sf.col("last_error").startswith("cancelled: ")
    known = sf.when(by_intent, sf.col("dead_at"))
    return archived.withColumn("cancelled_at", sf.coalesce("cancelled_at", known))
