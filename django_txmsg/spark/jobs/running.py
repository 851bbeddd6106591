"""From parsed options to a finished job: session, run record, summary."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from ..errors import told_by_spark
from ..mounted import is_mounted
from ..progress import Progress
from ..runs import Run, recorded
from ..spec import JobSpec, digest, hidden
from ..versions import insist_on
from .outcome import Outcome, job_session

#: Options of the command line and of Django itself, which do not belong to the job, and
#: options that must not be recorded: a header's token, a person's data.
_NOT_RECORDED = frozenset(
    [
        "spec", "json", "conf", "job", "service", "verbosity", "settings",
        "pythonpath", "traceback", "no_color", "force_color", "skip_checks",
        "database", "print_submit", "stdout", "stderr", "header", "template",
    ]
)  # fmt: skip

#: Jobs that would be wrong without the lake's rows. `archive` checks more closely
#: itself.
_OF_THE_LAKE = frozenset(["reconcile", "analyze", "replay", "erase", "verify", "sweep"])

Job = Callable[[JobSpec, argparse.Namespace, Run], Outcome]


def run_job(spec: JobSpec, given: argparse.Namespace) -> Outcome:
    """Run a job under a record of it. Raises PipelineError."""
    options = {
        name: hidden(str(value))
        for name, value in vars(given).items()
        if name not in _NOT_RECORDED and value not in (None, "", [], False)
    }
    if given.job == "erase":
        # Values that identify a person must not stay in the record of the erasure.
        for name in ("key", "correlation_id"):
            if name in options:
                options[name] = ", ".join(map(digest, getattr(given, name)))
    if given.job == "follow":
        from .follow_command import run_follow

        return run_follow(spec, given, options)
    record: AbstractContextManager[Run] = recorded(spec, given.job, options)
    looks = given.job == "show"
    if given.job == "listeners":
        looks = given.retire is None
    if given.job == "findings":
        looks = not given.reopen and given.acknowledge is None
    if looks:
        # A job that only reads leaves no trace.
        record = nullcontext(Run(given.job, options))
    with record as run:
        if spec.lake is not None and given.job in _OF_THE_LAKE:
            run.makes_lake = not is_mounted(spec)
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
    from .archive_command import run_archive

    return run_archive(spec, given, run)


def _reconcile(spec: JobSpec, given: argparse.Namespace, run: Run) -> Outcome:
    from .reconcile import ReconcileOptions, run_reconcile

    options = ReconcileOptions(
        since=given.since,
        grace=given.grace,
        late_after=given.late_after,
        stuck_after=given.stuck_after,
        fail_on=given.fail_on,
        known=given.known,
        external=tuple(given.external),
        external_senders=tuple(given.external_sender),
        keep=not given.dry_run,
    )
    with job_session(given) as spark:
        found = run_reconcile(spark, spec, options, run)
    lines = [f"Judged: messages sent before {found.horizon:%Y-%m-%d %H:%M:%S} UTC."]
    for name, verdicts in sorted(found.destinations.items()):
        said = ", ".join(f"{n:,} {kind}" for kind, n in sorted(verdicts.items()))
        lines.append(f"  {name}: {said}")
    if new := sum(found.fresh.values()):
        lines.append(f"  {new:,} findings are new.")
    if unseen := sum(found.unseen.values()):
        lines.append(f"  {unseen:,} findings not acknowledged: `pipeline findings`.")
    for one in found.examples:
        lines.append(
            f"  {one['verdict']}: {one['message_id']} to {one['destination']}"
            f" from {one['sender'] or 'an unknown sender'} at "
            f"{one['consumer'] or 'no consumer'}, sent {one['sent_at']}"
            + f", known since {one['known_since']}"
            * bool(one["known_since"])
        )
    lines += [f"  {one.describe()}" for one in found.clocks]
    lines += [
        f"  {one.consumer} is expected to receive from {one.destination} what was sent"
        f" before {one.until:%Y-%m-%d %H:%M:%S} UTC."
        for one in found.retired
    ]
    for name in found.unheard:
        lines.append(
            f"  None of these services has ever received from {name}. If another "
            "service does, add it: --service NAME=URL. If something else does: "
            f"--external {name}."
        )
    facts = {
        "horizon": found.horizon, "destinations": found.destinations,
        "examples": found.examples, "unheard": found.unheard, "new": found.fresh,
        "unacknowledged": found.unseen,
        "clocks": [dataclasses.asdict(one) for one in found.clocks],
        "retired": [dataclasses.asdict(one) for one in found.retired],
    }  # fmt: skip
    return Outcome(lines, facts)


def _findings(spec: JobSpec, given: argparse.Namespace, run: Run) -> Outcome:
    from .acknowledge import run_findings

    return run_findings(spec, given, run)


def _listeners(spec: JobSpec, given: argparse.Namespace, run: Run) -> Outcome:
    from .retire import run_listeners

    return run_listeners(spec, given, run)


def _show(spec: JobSpec, given: argparse.Namespace, run: Run) -> Outcome:
    from .show import run_show

    return run_show(spec, given, run)


def _analyze(spec: JobSpec, given: argparse.Namespace, run: Run) -> Outcome:
    from .analyze import AnalyzeOptions, run_analyze

    insist_on("4.1.2", "analyze")  # its sketches of latencies
    options = AnalyzeOptions(
        since=given.since,
        html="" if given.dry_run else given.html,
        keep=not given.dry_run,
    )
    with job_session(given) as spark:
        found = run_analyze(spark, spec, options, run)
    lines = [
        f"  {row['receiver']}/{row['stage']}: {row['messages']:,} messages, 95 % "
        f"within {row['p95']:.3f} s, {row['redelivered']:,} of {row['received']:,} "
        "redelivered"
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
    from .outgoing_command import replay

    return replay(spec, given, run)


def _send(spec: JobSpec, given: argparse.Namespace, run: Run) -> Outcome:
    from .outgoing_command import send

    return send(spec, given, run)


def _erase(spec: JobSpec, given: argparse.Namespace, run: Run) -> Outcome:
    from .erase import EraseOptions, run_erase

    options = EraseOptions(
        message_ids=tuple(map(str, given.message_id)),
        keys=tuple(given.key),
        correlation_ids=tuple(given.correlation_id),
        dry_run=given.dry_run,
    )
    with job_session(given) as spark:
        done = run_erase(spark, spec, options, run)
    would = "would be " if given.dry_run else ""
    lines = [f"{done.messages:,} messages are selected."]
    for where, counts in (("database", done.database), ("lake", done.lake)):
        lines += [
            f"  {where}: {count:,} rows of {name} {would}erased."
            for name, count in counts.items()
            if count
        ]
    return Outcome(lines, dict(done.__dict__))


def _verify(spec: JobSpec, given: argparse.Namespace, run: Run) -> Outcome:
    from .verify import run_verify

    with job_session(given) as spark:
        found = run_verify(spark, spec, run)
    lines = [
        f"{name}: {one.files:,} files and {one.batches:,} batches are as the log says"
        + (
            f", {one.unproven:,} batches have no sum to compare with"
            * bool(one.unproven)
        )
        + "."
        for name, one in found.items()
        if not one.problems
    ]
    problems = [problem for one in found.values() for problem in one.problems]
    return Outcome(lines + problems, {"problems": problems})


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
    "findings": _findings,
    "listeners": _listeners,
    "show": _show,
    "analyze": _analyze,
    "replay": _replay,
    "send": _send,
    "sweep": _sweep,
    "erase": _erase,
    "verify": _verify,
}
