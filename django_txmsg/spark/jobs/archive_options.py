"""How an archive works: how old, how much at once, and how many tasks side by side."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

from pyspark.sql import SparkSession

from ..cores import on_one_machine, parallelism

#: Connections that tasks open to a database side by side, unless told otherwise.
MAX_TASKS = 16


@dataclass(frozen=True)
class ArchiveOptions:
    """How an archive works. What works side by side has a server process beside it,
    and takes the processors from whoever sends a message meanwhile."""

    older_than: timedelta
    batch_rows: int = 100_000
    batches: int = 0
    """Batches that one Spark job writes; 0 is four for each core."""
    tasks: int = 0
    """Tasks that write side by side; 0 leaves it to `tasks_on()`."""
    purges: int = 1
    """Transactions that delete side by side, on PostgreSQL."""
    overlap: bool = False
    """Delete one wave of batches while the next is written, on PostgreSQL."""
    vacuum: bool = True
    accept_loss: bool = False
    """Go on where the lake has lost batches that this database has deleted."""


def cores_of(spark: SparkSession | None) -> int:
    """Return how many tasks can work at once."""
    if spark is None:
        return os.cpu_count() or 1
    return parallelism(spark)


def tasks_on(spark: SparkSession | None) -> int:
    """Return how many tasks write side by side, or wait for a core: two for each, and
    no more than a database has connections to spare. On one machine it is half its
    cores, since the database that is read needs the others.
    """
    cores = cores_of(spark)
    if spark is None or on_one_machine(spark):
        return max(1, cores // 2)
    return min(MAX_TASKS, 2 * cores)
