"""Returns the version of the installed Spark, and runs functions in the tasks of a
session.

The pipeline needs PySpark 4.0, and some features need a newer one. All functions work
with Spark Connect, too.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
import pyspark
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as t
from pyspark.sql.functions import spark_partition_id

from .errors import EnvironmentFault

Work = TypeVar("Work")


def installed() -> tuple[int, ...]:
    """Return the PySpark version as a tuple of numbers."""
    return _parsed(pyspark.__version__)


def insist_on(since: str, what: str) -> None:
    """Raise EnvironmentFault if the installed PySpark is older than `since`, the first
    version with the feature `what`."""
    if installed() < _parsed(since):
        raise EnvironmentFault(
            f"{what} needs PySpark {since} or newer, and {pyspark.__version__} is "
            f"installed: pip install 'pyspark[sql]>={since}'."
        )


def _parsed(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def is_remote(spark: SparkSession) -> bool:
    """Return whether a session belongs to a Spark Connect server."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def parallelism(spark: SparkSession | None) -> int:
    """Return how many tasks can run at the same time, by default in this process."""
    if spark is None:
        return os.cpu_count() or 1
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


def spread(
    spark: SparkSession,
    do: Callable[[Iterator[Work]], Iterator[pa.RecordBatch]],
    work: Sequence[Work],
    struct: t.StructType,
    parts: int = 0,
) -> DataFrame:
    """Return the rows that `do` yields for `work`. Spark divides `work` into `parts`
    tasks, by default two for each core. Executors call `do` once for each task."""
    parts = parts or min(len(work), 2 * parallelism(spark))

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        numbers = (one for batch in batches for one in batch.column(0).to_pylist())
        return do(work[one] for one in numbers)

    return spark.range(0, len(work), 1, parts).mapInArrow(task, struct)


def gather(
    spark: SparkSession,
    do: Callable[[Iterator[Work]], Iterable[Any]],
    work: Sequence[Work],
    parts: int = 0,
) -> list[Any]:
    """Return the JSON values that `do` yields for `work`, in any order. The tasks are
    those of `spread()`."""
    return _loaded(spread(spark, partial(_dumped, do), work, _JSON, parts))


def gather_from(
    rows: DataFrame, do: Callable[[Iterator[pa.RecordBatch]], Iterable[Any]]
) -> list[Any]:
    """Return the JSON values that `do` yields for the rows of a DataFrame, in any
    order. Executors call `do` once for each task."""
    return _loaded(rows.mapInArrow(partial(_dumped, do), _JSON))


# No pickle: a server of Spark Connect could run its code in the driver.
_JSON = t.StructType([t.StructField("json", t.StringType())])


def _dumped(
    do: Callable[[Iterator[Any]], Iterable[Any]], given: Iterator[Any]
) -> Iterator[pa.RecordBatch]:
    found = [json.dumps(one) for one in do(given)]
    yield pa.RecordBatch.from_pydict({"json": pa.array(found, pa.string())})


def _loaded(rows: DataFrame) -> list[Any]:
    return [json.loads(row.json) for row in rows.collect()]


def attempt_key() -> str:
    """Return a unique key for this attempt of a Spark task, or for this call in a
    process without tasks."""
    context = TaskContext.get()
    place = f"{context.partitionId()}-{context.taskAttemptId()}" if context else "0"
    return f"{place}-{uuid.uuid4().hex[:12]}"
