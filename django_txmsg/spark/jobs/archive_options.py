"""The options of an archive: ages, sizes, and the number of parallel tasks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

from pyspark.sql import SparkSession

from ..cores import on_one_machine, parallelism

#: Most connections that tasks open to a database at the same time, by default.
MAX_TASKS = 16


@dataclass(frozen=True)
class ArchiveOptions:
    """The options of an archive. Every parallel task occupies a server process, and
    takes processor time from the application."""

    older_than: timedelta
    batch_rows: int = 100_000
    batches: int = 0
    """Batches that one Spark job writes; 0 is four for each core."""
    tasks: int = 0
    """Number of parallel writers; 0 leaves it to `tasks_on()`."""
    purges: int = 1
    """Number of parallel deleting transactions, on PostgreSQL."""
    overlap: bool = False
    """Delete one wave of batches while the next is written, on PostgreSQL."""
    vacuum: bool = True
    accept_loss: bool = False
    """Go on if the lake has lost batches that this database has deleted."""


def cores_of(spark: SparkSession | None) -> int:
    """Return how many tasks can run at once."""
    if spark is None:
        return os.cpu_count() or 1
    return parallelism(spark)


def tasks_on(spark: SparkSession | None) -> int:
    """Return the number of parallel writers, including those that wait for a core: two
    for each core, and no more than a database has connections to spare. On one machine
    it is half its cores, because the database that is read needs the others."""
    cores = cores_of(spark)
    if spark is None or on_one_machine(spark):
        return max(1, cores // 2)
    return min(MAX_TASKS, 2 * cores)
