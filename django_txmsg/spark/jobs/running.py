"""Runs a job from parsed options: its session, its run record and its summary. Also
runs `follow` until a signal stops it, even if a server does not answer."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from ..errors import UsageError, faults_told, from_spark
from ..progress import progress_bar
from ..runs import Run, recorded
from ..session import session
from ..spec import JobSpec, digest, hidden, recordable

#: Options of the command line and of Django itself, which do not belong to the job, and
#: options that must not be recorded: a header's token, a person's data.
_NOT_RECORDED = frozenset(
    [
        "spec", "json", "conf", "job", "service", "verbosity", "settings",
        "pythonpath", "traceback", "no_color", "force_color", "skip_checks",
        "database", "print_submit", "stdout", "stderr", "header", "template",
    ]
)  # fmt: skip

#: Seconds that a stopped job waits for servers that do not answer.
PATIENCE = 20.0

#: Jobs that share a module.
_MODULES = {"replay": "outgoing", "send": "outgoing"}

Job = Callable[[JobSpec, argparse.Namespace, Run], None]


@faults_told()
def run_job(spec: JobSpec, given: argparse.Namespace) -> Run:
    """Run a job, record the run, and return it with its summary. Raises
    PipelineError."""
    for name, value in vars(given).items():
        try:
            json.dumps(value, default=str, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise UsageError(f"The value of {name!r} is not UTF-8.") from None
    if getattr(given, "request", None):
        _insist_on_the_request(given)
    record: AbstractContextManager[Run]
    if _leaves_no_record(given):
        record = nullcontext(Run(given.job, recordable_options(given), id=""))
    else:
        request = None if given.dry_run else getattr(given, "request", None)
        record = recorded(spec, given.job, recordable_options(given), request)
    module = import_module(f".{_MODULES.get(given.job, given.job)}", __package__)
    command: Job = getattr(module, f"{given.job}_command")
    with record as run:
        try:
            command(spec, given, run)
        except (PySparkException, Py4JError) as error:
            raise from_spark(error) from error
    seconds = run.seconds
    if given.job != "views":  # whose lines are for a database to read
        run.lines.append(
            f"{given.job}: {run.rows:,} rows in {seconds:,.1f} s, {run.state}."
        )
    run.facts |= {
        "job": given.job, "run": run.id or None, "state": run.state, "rows": run.rows,
        "counts": run.counts, "seconds": round(seconds, 3), "exit_code": run.exit_code,
    }  # fmt: skip
    return run


def _insist_on_the_request(given: argparse.Namespace) -> None:
    """Raise UsageError for options that would change a requested replay."""
    selecting = ("where", "verdict", "run", "name", "limit", "replayed")
    others = any(getattr(given, name) for name in selecting)
    if others or (given.table, given.mode) != ("outbox", "same"):
        raise UsageError(
            "The request names the messages: with --request, give only --rate and "
            "--dry-run."
        )


def _leaves_no_record(given: argparse.Namespace) -> bool:
    """Return whether the job only reads, or records its runs itself, like `follow`."""
    if given.job == "listeners":
        return given.retire is None
    if given.job == "findings":
        return not given.reopen and given.acknowledge is None
    return given.job in ("show", "views", "follow")


def recordable_options(given: argparse.Namespace) -> dict[str, Any]:
    """Return the options as they may be stored in a run record."""
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
    return options


@contextmanager
def job_session(given: argparse.Namespace) -> Iterator[SparkSession]:
    """Yield a Spark session. If the error stream is a terminal, the start of Spark is
    shown there. Then Spark shows the progress of its stages."""
    bar = progress_bar(given.job, quiet=given.json, unit="tasks")
    bar.set_postfix_str("starting Spark")
    short = given.job == "reconcile" and given.since is not None
    settings = dict(given.conf)
    started = session(given.job, settings, short=short, progress=not given.json)
    with bar, started as spark:
        bar.close()  # the line is Spark's now
        yield spark


def run_until_stopped(
    work: Callable[[], None], stop: threading.Event, last: Callable[[], None]
) -> None:
    """Run `work` until it returns. The first SIGTERM or SIGINT sets `stop`, the second
    ends the process. If a server does not answer within PATIENCE seconds after `stop`,
    `last` is called, and the process exits with code 0.

    `work` runs in a separate thread, so that signals are handled while it waits for a
    server. Outside the main thread, this function handles no signals: the caller must
    set `stop`.
    """
    if threading.current_thread() is not threading.main_thread():
        work()
        return

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    before = {
        one: signal.signal(one, handle) for one in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="txmsg-follow")
        done = pool.submit(work)
        while not done.done() and not stop.is_set():
            wait([done], timeout=0.2)
        wait([done], timeout=PATIENCE)
        if not done.done():
            last()
            sys.stderr.write(
                f"follow: stopped without an answer after {PATIENCE:g} s.\n"
            )
            os._exit(0)
        pool.shutdown()
        done.result()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
