"""The archive as a job: its tables, ages and summary."""

from __future__ import annotations

import argparse
import datetime as dt
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pyspark.sql import SparkSession

from ..cores import on_one_machine
from ..errors import UsageError
from ..ledger import Ledger
from ..progress import Progress
from ..runs import Run
from ..schemas import TABLES, Table
from ..session import running
from ..spec import JobSpec, SourceSpec
from ..standstill import Held
from .archive import Archiver
from .archive_options import ArchiveOptions
from .outcome import Outcome, started

#: Rows that one process archives in the time that Spark needs to start.
FEW_ROWS = 200_000


def run_archive(spec: JobSpec, given: argparse.Namespace, run: Run) -> Outcome:
    """Archive the requested tables, or count what would be archived."""
    source, lake = spec.service(), spec.lake_spec()
    chosen = ages(spec, given)
    outcome = Outcome()
    if given.dry_run:
        for name, age in chosen.items():
            run.counts[name], held = waiting(source, TABLES[name], age)
            outcome.lines.append(f"{name}: {run.counts[name]:,} rows would move.")
            _tell_held(name, held, given.stuck_after, run, outcome)
        run.rows = sum(run.counts.values())
        return outcome
    refused: list[str] = []
    seconds: dict[str, dict[str, float]] = {}
    start = Progress.on_terminal("archive", quiet=given.json)
    with _engine(source, chosen, given, start) as spark:
        outcome.facts["engine"] = "local" if spark is None else "spark"
        for name, age in chosen.items():
            archiver = Archiver(
                spark,
                source,
                lake,
                TABLES[name],
                ArchiveOptions(
                    older_than=age,
                    batch_rows=given.batch_rows,
                    tasks=given.tasks,
                    purges=given.purges,
                    overlap=_overlaps(given, spark),
                    vacuum=not given.no_vacuum,
                    accept_loss=given.accept_loss,
                ),
                progress=Progress.on_terminal(f"archive {name}", quiet=given.json),
            )
            done = archiver.run()
            run.rows += done.rows
            run.counts[name] = done.rows
            refused += done.refused
            seconds[name] = {k: round(v, 2) for k, v in done.seconds.items()}
            outcome.lines.append(
                f"{name}: {done.rows:,} rows in {done.batches} batches are in the lake "
                "and out of the database."
            )
            outcome.lines += done.notes
            _tell_held(name, done.held, given.stuck_after, run, outcome)
    outcome.lines += refused
    outcome.facts |= {"refused": refused, "steps": seconds}
    if refused:
        run.refused, run.error = True, "\n".join(refused)
    return outcome


@contextmanager
def _engine(
    source: SourceSpec,
    chosen: Mapping[str, dt.timedelta],
    given: argparse.Namespace,
    bar: Progress,
) -> Iterator[SparkSession | None]:
    """Yield a Spark session or, for few rows on one machine, None: starting a JVM takes
    as long as archiving many rows."""
    engine = given.engine
    if engine == "auto" and not (given.conf or running()):
        rows = sum(
            waiting(source, TABLES[name], age)[0] for name, age in chosen.items()
        )
        engine = "local" if rows <= FEW_ROWS else "spark"
    if engine == "local":
        yield None
        return
    with started(given, bar) as spark:
        yield spark


def _overlaps(given: argparse.Namespace, spark: SparkSession | None) -> bool:
    """Return whether one wave is deleted while the next is written: by default if
    writing takes no processor from the database."""
    if given.overlap is not None:
        return bool(given.overlap)
    return spark is not None and not on_one_machine(spark)


def _tell_held(
    name: str, held: Held, stuck_after: dt.timedelta, run: Run, outcome: Outcome
) -> None:
    """Report rows that wait for an open transaction. A transaction that is open for too
    long is a finding: it blocks the archive, and vacuum."""
    if not held.rows:
        return
    outcome.lines.append(
        f"{name}: {held.rows:,} settled rows wait for {held.whom}: they changed after "
        "it had begun."
    )
    outcome.facts.setdefault("held", {})[name] = held.rows
    if held.seconds > stuck_after.total_seconds():
        run.findings = True


def waiting(
    source: SourceSpec, table: Table, older_than: dt.timedelta
) -> tuple[int, Held]:
    """Return how many rows an archive would take, and which wait: the dry run."""
    ledger = Ledger(source, table)
    try:
        now, horizon = ledger.clock()
        cutoff = now - older_than
        return ledger.waiting(cutoff, horizon), ledger.held(cutoff, horizon)
    finally:
        ledger.close()


def ages(spec: JobSpec, given: argparse.Namespace) -> dict[str, dt.timedelta]:
    """Return the age from which settled rows are archived, by table. Raises UsageError
    if there is no age for any."""
    found = {name: _age(name, spec, given) for name in given.table or TABLES}
    chosen = {name: age for name, age in found.items() if age is not None}
    if not chosen:
        raise UsageError("No age is given: give --older-than, or a retention.")
    return chosen


def _age(name: str, spec: JobSpec, given: argparse.Namespace) -> dt.timedelta | None:
    if given.older_than is not None:
        age: dt.timedelta = given.older_than
        return age
    days = spec.retention.get(name)
    return None if days is None else dt.timedelta(days=days)
