"""`replay` and `send`, from parsed options to their summary."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from ..errors import UsageError
from ..runs import Run
from ..spec import JobSpec
from .outcome import Outcome, job_session
from .outgoing import Stored, run_replay, run_send
from .outgoing_options import ReplayOptions, SendOptions


def replay(spec: JobSpec, given: argparse.Namespace, run: Run) -> Outcome:
    """Replay, and report what was stored. Raises PipelineError."""
    options = ReplayOptions(
        where=given.where,
        table=given.table,
        mode=given.mode,
        rate=given.rate,
        limit=given.limit,
        name=given.name,
        replayed=given.replayed,
        verdict=given.verdict,
        found_by=given.run,
        dry_run=given.dry_run,
    )
    return _outgoing(lambda spark: run_replay(spark, spec, options, run), given)


def send(spec: JobSpec, given: argparse.Namespace, run: Run) -> Outcome:
    """Send a dataset, and report what was stored. Raises PipelineError."""
    options = SendOptions(
        path=given.path,
        destination=given.destination,
        template=_template(given.template),
        format=given.format,
        key=given.key,
        headers=dict(given.header),
        identity=given.identity,
        rate=given.rate,
        name=given.name,
        broker=given.broker,
        dry_run=given.dry_run,
    )
    return _outgoing(lambda spark: run_send(spark, spec, options, run), given)


def _template(text: str) -> str:
    """Return a template given as JSON, or as the name of a file that contains it."""
    if text.lstrip().startswith(("{", "[")):
        return text
    try:
        return Path(text).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"The template {text!r} cannot be read: {error}") from error


def _outgoing(
    work: Callable[[SparkSession], Any], given: argparse.Namespace
) -> Outcome:
    with job_session(given) as spark:
        done = work(spark)
    facts: dict[str, Any] = {"name": done.name, "chosen": done.chosen}
    if given.dry_run:
        lines = [f"{done.chosen:,} messages would be stored under {done.name}."]
        lines += [f"  {name}: {n:,}" for name, n in sorted(done.destinations.items())]
        lines += [f"  {one}" for one in done.sample]
        facts |= {"destinations": done.destinations, "sample": done.sample}
        return Outcome(lines, facts)
    if done.merged is None:
        facts["operation"] = done.operation
        return Outcome([_asked(done)], facts)
    merged = done.merged
    lines = [f"{merged.stored:,} of {merged.staged:,} messages stored as {done.name}."]
    if merged.known:
        lines.append(
            f"{merged.known:,} were stored by {done.name} before. Give another --name "
            "to store them once more."
        )
    return Outcome(lines, facts)


def _asked(done: Stored) -> str:
    letters = f"{done.chosen:,} dead letter{'s' * (done.chosen != 1)}"
    if done.operation is None and done.chosen:
        return (
            f"{letters}: {done.name} has requested them before. Give another --name "
            "to request them again."
        )
    if done.operation is None:
        return "No open dead letter was selected."
    return (
        f"{letters}: bulk operation {done.operation} redelivers them, as {done.name}. "
        "The service's manage.py consume works it off."
    )
