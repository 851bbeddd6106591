"""From parsed options to a finished job: session, run record, summary."""

from __future__ import annotations

import argparse
import datetime as dt
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from ..errors import UsageError, told_by_spark
from ..ledger import Held
from ..progress import Progress
from ..runs import Run, recorded
from ..schemas import TABLES
from ..session import session
from ..spec import JobSpec


@dataclass
class Outcome:
    """What a job says when it is done: lines for people, facts for tools."""

    lines: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    exit_code: int = 0


#: Where a job is told of things, and Django's own options: no part of what it does.
_NOT_RECORDED = frozenset(
    [
        "spec", "json", "conf", "job", "service", "verbosity", "settings",
        "pythonpath", "traceback", "no_color", "force_color", "skip_checks",
        "database", "print_submit", "stdout", "stderr",
    ]
)  # fmt: skip

Job = Callable[[JobSpec, argparse.Namespace, Run], Outcome]


def run_job(spec: JobSpec, given: argparse.Namespace) -> Outcome:
    """Run a job under a record of it. Raises PipelineError."""
    options = {
        name: str(value)
        for name, value in vars(given).items()
        if name not in _NOT_RECORDED and value not in (None, "", [], False)
    }
    with recorded(spec, given.job, options) as run:
        try:
            outcome = _JOBS[given.job](spec, given, run)
        except (PySparkException, Py4JError) as error:
            raise told_by_spark(error) from error
    outcome.exit_code = run.exit_code
    seconds = run.seconds
    outcome.lines.append(
        f"{given.job}: {run.rows:,} rows in {seconds:,.1f} s, {run.state}."
    )
    outcome.facts |= {
        "job": given.job, "run": run.id, "state": run.state, "rows": run.rows,
        "counts": run.counts, "seconds": round(seconds, 3), "exit_code": run.exit_code,
    }  # fmt: skip
    return outcome


def _archive(spec: JobSpec, given: argparse.Namespace, run: Run) -> Outcome:
    from .archive import ArchiveOptions, Archiver, waiting

    source, lake = spec.service(), spec.lake_spec()
    ages = {name: _age(name, spec, given) for name in given.table or TABLES}
    chosen = {name: age for name, age in ages.items() if age is not None}
    if not chosen:
        raise UsageError(
            "Nothing says how old a row must be: give --older-than, or a retention."
        )
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
    with _started(given, start) as spark:
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


def _tell_held(
    name: str, held: Held, stuck_after: dt.timedelta, run: Run, outcome: Outcome
) -> None:
    """Say which rows wait for a transaction. One that is open for too long is a
    finding: the archive stands still, and so does vacuum."""
    if not held.rows:
        return
    whose = held.holder or "a transaction that this role may not see"
    since = f", open since {held.since:%Y-%m-%d %H:%M:%S} UTC" if held.since else ""
    outcome.lines.append(
        f"{name}: {held.rows:,} settled rows wait for {whose}{since}: they changed "
        "after it had begun."
    )
    outcome.facts.setdefault("held", {})[name] = held.rows
    now = dt.datetime.now(dt.timezone.utc)
    if held.since is None or now - held.since > stuck_after:
        run.findings = True


@contextmanager
def _session(given: argparse.Namespace) -> Iterator[SparkSession]:
    """Yield a session whose tasks are shown to whoever is looking."""
    bar = Progress.on_terminal(given.job, quiet=given.json, unit="tasks")
    with _started(given, bar) as spark, bar.following(spark):
        yield spark


@contextmanager
def _started(given: argparse.Namespace, bar: Progress) -> Iterator[SparkSession]:
    """Yield a session, and say what takes so long before it is there."""
    bar.say("starting Spark")
    try:
        with session(given.job, dict(given.conf)) as spark:
            yield spark
    finally:
        bar.stop()


def _age(name: str, spec: JobSpec, given: argparse.Namespace) -> dt.timedelta | None:
    if given.older_than is not None:
        age: dt.timedelta = given.older_than
        return age
    days = spec.retention.get(name)
    return None if days is None else dt.timedelta(days=days)


def _reconcile(spec: JobSpec, given: argparse.Namespace, run: Run) -> Outcome:
    from .reconcile import ReconcileOptions, run_reconcile

    options = ReconcileOptions(
        since=given.since,
        grace=given.grace,
        late_after=given.late_after,
        fail_on=given.fail_on,
        keep=not given.dry_run,
    )
    with _session(given) as spark:
        found = run_reconcile(spark, spec, options, run)
    lines = [f"Judged: messages sent before {found.horizon:%Y-%m-%d %H:%M:%S} UTC."]
    for name, verdicts in sorted(found.destinations.items()):
        said = ", ".join(f"{n:,} {kind}" for kind, n in sorted(verdicts.items()))
        lines.append(f"  {name}: {said}")
    for one in found.examples:
        lines.append(
            f"  {one['verdict']}: {one['message_id']} to {one['destination']}"
            f" from {one['sender'] or 'nobody known'} at {one['consumer'] or 'nobody'},"
            f" sent {one['sent_at']}"
        )
    for name in found.unheard:
        lines.append(
            f"  None of these services has ever received from {name}. If another one "
            "does, name it: --service NAME=URL."
        )
    facts = {
        "horizon": found.horizon, "destinations": found.destinations,
        "examples": found.examples, "unheard": found.unheard,
    }  # fmt: skip
    return Outcome(lines, facts)


def _analyze(spec: JobSpec, given: argparse.Namespace, run: Run) -> Outcome:
    from .analyze import AnalyzeOptions, run_analyze

    options = AnalyzeOptions(
        since=given.since,
        html="" if given.dry_run else given.html,
        keep=not given.dry_run,
    )
    with _session(given) as spark:
        found = run_analyze(spark, spec, options, run)
    lines = [
        f"  {row['receiver']}/{row['stage']}: {row['messages']:,} messages, 95 % "
        f"within {row['p95']:.3f} s, {row['redelivered']:,} redelivered"
        for row in found.stages
    ]
    lines += [
        f"  {row['letters']:,} dead letters ({row['open']:,} open): "
        f"{row['exception'].partition(chr(10))[0][:100] or row['reason']}"
        for row in found.groups
    ]
    if options.html:
        lines.append(f"The report is in {options.html}.")
    facts = {"stages": found.stages, "groups": found.groups, "html": options.html}
    return Outcome(lines, facts)


def _replay(spec: JobSpec, given: argparse.Namespace, run: Run) -> Outcome:
    from .outgoing import ReplayOptions, run_replay

    options = ReplayOptions(
        where=given.where,
        table=given.table,
        mode=given.mode,
        rate=given.rate,
        limit=given.limit,
        name=given.name,
        replayed=given.replayed,
        dry_run=given.dry_run,
    )
    return _outgoing(lambda spark: run_replay(spark, spec, options, run), given)


def _send(spec: JobSpec, given: argparse.Namespace, run: Run) -> Outcome:
    from ..cli import read_template
    from .outgoing import SendOptions, run_send

    options = SendOptions(
        path=given.path,
        destination=given.destination,
        template=read_template(given.template),
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


def _outgoing(
    work: Callable[[SparkSession], Any], given: argparse.Namespace
) -> Outcome:
    with _session(given) as spark:
        done = work(spark)
    facts: dict[str, Any] = {"name": done.name, "chosen": done.chosen}
    if done.merged is None:
        lines = [f"{done.chosen:,} messages would be stored under {done.name}."]
        lines += [f"  {name}: {n:,}" for name, n in sorted(done.destinations.items())]
        lines += [f"  {one}" for one in done.sample]
        facts |= {"destinations": done.destinations, "sample": done.sample}
        return Outcome(lines, facts)
    merged = done.merged
    lines = [f"{merged.stored:,} of {merged.staged:,} messages stored as {done.name}."]
    if merged.known:
        lines.append(
            f"{merged.known:,} were stored by {done.name} before. Give another --name "
            "to store them once more."
        )
    if merged.skipped:
        lines.append(
            f"{merged.skipped:,} dead letters skipped: seen to, or processed meanwhile."
        )
    return Outcome(lines, facts)


def _sweep(spec: JobSpec, given: argparse.Namespace, run: Run) -> Outcome:
    from .sweep import SweepOptions, run_sweep

    options = SweepOptions(
        orphans_older_than=given.orphans_older_than,
        replaced_older_than=given.replaced_older_than,
        keep=given.keep,
        compact=not given.no_compact,
        dry_run=given.dry_run,
    )
    would = "would be " if given.dry_run else ""
    bar = Progress.on_terminal("sweep", quiet=given.json, unit="tables")
    swept = run_sweep(spec, options, run, bar)
    return Outcome(
        [
            f"{name}: {one.orphans} orphaned and {one.replaced} replaced files "
            f"{would}removed, {one.compacted} joined, {one.dropped_days} days dropped."
            for name, one in swept.items()
        ]
    )


_JOBS: dict[str, Job] = {
    "archive": _archive,
    "reconcile": _reconcile,
    "analyze": _analyze,
    "replay": _replay,
    "send": _send,
    "sweep": _sweep,
}
