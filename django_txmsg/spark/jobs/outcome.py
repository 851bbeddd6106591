"""The summary of a job, and its Spark session."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.sql import SparkSession

from ..progress import following, progress_bar
from ..session import session

if TYPE_CHECKING:
    from tqdm import tqdm


@dataclass
class Outcome:
    """The summary of a finished job. `lines` are for people, `facts` for programs."""

    lines: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    exit_code: int = 0


Options = TypeVar("Options")


def options_of(kind: type[Options], given: argparse.Namespace, **other: Any) -> Options:
    """Create a job's options from the command line's options with the same names, and
    from `other`."""
    names = [one.name for one in dataclasses.fields(kind) if one.name in given]  # type: ignore[arg-type]
    return kind(**{name: getattr(given, name) for name in names} | other)


@contextmanager
def job_session(given: argparse.Namespace) -> Iterator[SparkSession]:
    """Yield a Spark session. If the error stream is a terminal, show a progress bar of
    its tasks."""
    bar = progress_bar(given.job, quiet=given.json, unit="tasks")
    with started(given, bar) as spark, following(bar, spark):
        yield spark


@contextmanager
def started(given: argparse.Namespace, bar: tqdm[Any]) -> Iterator[SparkSession]:
    """Yield a Spark session. While Spark starts, show a note that this takes some
    time."""
    bar.set_postfix_str("starting Spark")
    short = given.job == "reconcile" and given.since is not None
    try:
        with session(given.job, dict(given.conf), short=short) as spark:
            yield spark
    finally:
        bar.clear()
