"""Runs a job from parsed options: its session, its run record and its summary."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from ..errors import UsageError, faults_told, from_spark
from ..runs import Run, recorded
from ..spec import JobSpec, digest, hidden, recordable
from .outcome import Outcome

#: Options of the command line and of Django itself, which do not belong to the job, and
#: options that must not be recorded: a header's token, a person's data.
_NOT_RECORDED = frozenset(
    [
        "spec", "json", "conf", "job", "service", "verbosity", "settings",
        "pythonpath", "traceback", "no_color", "force_color", "skip_checks",
        "database", "print_submit", "stdout", "stderr", "header", "template",
    ]
)  # fmt: skip

#: Jobs that share a module.
_MODULES = {"replay": "outgoing", "send": "outgoing"}

Job = Callable[[JobSpec, argparse.Namespace, Run], Outcome]


@faults_told()
def run_job(spec: JobSpec, given: argparse.Namespace) -> Outcome:
    """Run a job, record the run, and return its summary. Raises PipelineError."""
    for name, value in vars(given).items():
        try:
            json.dumps(value, default=str, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise UsageError(f"The value of {name!r} is not UTF-8.") from None
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
    if "where" in options:
        options["where"] = recordable(options["where"])
    if given.job == "follow":
        from .follow import follow_command

        return follow_command(spec, given, options)
    if given.job == "replay":
        from .outgoing import insist_on_the_request

        insist_on_the_request(given)
    request = None if given.dry_run else getattr(given, "request", None)
    record: AbstractContextManager[Run] = recorded(spec, given.job, options, request)
    looks = given.job in ("show", "views")
    if given.job == "listeners":
        looks = given.retire is None
    if given.job == "findings":
        looks = not given.reopen and given.acknowledge is None
    if looks:
        # A job that only reads leaves no trace.
        record = nullcontext(Run(given.job, options))
    with record as run:
        try:
            outcome = _command(given.job)(spec, given, run)
        except (PySparkException, Py4JError) as error:
            raise from_spark(error) from error
    outcome.exit_code = run.exit_code
    seconds = run.seconds
    if given.job != "views":  # whose lines are for a database to read
        outcome.lines.append(
            f"{given.job}: {run.rows:,} rows in {seconds:,.1f} s, {run.state}."
        )
    outcome.facts |= {
        "job": given.job, "run": run.id, "state": run.state, "rows": run.rows,
        "counts": run.counts, "seconds": round(seconds, 3), "exit_code": run.exit_code,
    }  # fmt: skip
    return outcome


def _command(job: str) -> Job:
    """Import the module of a job, and return the job's function."""
    module = import_module(f".{_MODULES.get(job, job)}", __package__)
    command: Job = getattr(module, f"{job}_command")
    return command
