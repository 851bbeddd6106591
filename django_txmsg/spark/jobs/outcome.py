"""A job's summary, and the Spark session that it runs in."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import SparkSession

from ..progress import Progress
from ..session import session


@dataclass
class Outcome:
    """The summary of a finished job: lines for people, facts for tools."""

    lines: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    exit_code: int = 0


@contextmanager
def job_session(given: argparse.Namespace) -> Iterator[SparkSession]:
    """Yield a session, with a progress bar for its tasks if a person is watching."""
    bar = Progress.on_terminal(given.job, quiet=given.json, unit="tasks")
    with started(given, bar) as spark, bar.following(spark):
        yield spark


@contextmanager
def started(given: argparse.Namespace, bar: Progress) -> Iterator[SparkSession]:
    """Yield a session, and report what takes so long before it has started."""
    bar.say("starting Spark")
    try:
        with session(given.job, dict(given.conf)) as spark:
            yield spark
    finally:
        bar.stop()
