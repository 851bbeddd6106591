"""Pure functions from DataFrames to DataFrames. Each module defines the schemas of its
results. The functions here merge rows from the lake and from databases into one log
that contains each row only once, and convert instants to Spark expressions."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Iterable, Sequence
from functools import reduce

import pyspark.sql.functions as sf
from pyspark.sql import Column, DataFrame
from pyspark.sql import types as t

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
MICROSECOND = dt.timedelta(microseconds=1)


def instant(micros: int) -> dt.datetime:
    """Convert microseconds since 1970 to an instant."""
    return EPOCH + micros * MICROSECOND


def micros(instant: dt.datetime) -> int:
    """Convert an aware datetime to microseconds since 1970."""
    return (instant - EPOCH) // MICROSECOND


def timestamp(value: dt.datetime) -> Column:
    """Return an expression for an aware datetime. It does not depend on the session's
    time zone."""
    return sf.timestamp_micros(sf.lit(micros(value)))


def among(messages: Iterable[str]) -> Column:
    """Return the condition that a row is about one of these messages. The condition is
    one text: Spark would need a call, and so a millisecond, for each id."""
    ids = "".join(f", '{uuid.UUID(one)}'" for one in messages)
    return sf.expr(f"message_id IN (''{ids})")


def whole_log(
    frames: Sequence[DataFrame], struct: t.StructType, *, twice: bool = True
) -> DataFrame:
    """Return the union of `frames` with the columns of `struct`, each row only once.

    Between the commit and the purge of a batch, its rows are both in the lake and in
    the database. Two such rows have the same service, id and message id. (If a message
    is processed again, its new row has another id.) If they differ, the row of the
    earlier frame is returned: give the database first.

    Pass twice=False if no row is in two frames. Then, and for a single frame,
    duplicates are not removed, so that filters can be pushed down to the files.
    """
    columns = struct.fieldNames()
    keys = ["service", "id", "message_id"] if twice and len(frames) > 1 else []
    if keys and "stage" in columns:
        # A topic's message may have the same id in two databases of a service.
        keys.append("stage")
    wanted = list(dict.fromkeys([*keys, *columns]))
    whole = reduce(
        DataFrame.unionByName,
        [
            frame.select(*wanted, sf.lit(number).alias("_place"))
            for number, frame in enumerate(frames)
        ],
    )
    if keys:
        rest = [
            sf.min_by(one, "_place").alias(one) for one in wanted if one not in keys
        ]
        whole = whole.groupBy(*keys).agg(*rest)
    return whole.select(*columns)


def with_cancelled(archived: DataFrame) -> DataFrame:
    """Return the lake's outbox rows with the column `cancelled_at`. In files that are
    older than this column, cancelled rows are recognised by their error text."""
    by_intent = sf.col("last_error").startswith("cancelled: ")
    known = sf.when(by_intent, sf.col("dead_at"))
    return archived.withColumn("cancelled_at", sf.coalesce("cancelled_at", known))
