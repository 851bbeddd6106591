"""The command line of all jobs. It parses the options, runs the job, prints a summary
and returns the exit code.

`python -m django_txmsg.spark JOB --spec job.json` and `manage.py pipeline JOB` share
this module. Exit codes: 0 clean, 1 findings, 2 usage, 3 environment, 4 verification
refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import json
import os
import re
import sys
import traceback
import uuid
from collections.abc import Sequence
from itertools import chain
from typing import Any

from ..lazy_imports import needs
from ..rules import dead_letters
from ..webhook import VARIABLE as WEBHOOK_URL
from .errors import EnvironmentFault, PipelineError, UsageError
from .spec import JobSpec, LakeSpec, SourceSpec, hidden, password_variable

#: The tables of the log, in the order in which they are archived.
ARCHIVED = (
    "outbox", "inbox", "attempts", "dead_letters", "flow_steps", "flow_undos",
    "flow_runs",
)  # fmt: skip


#: The packages of the extra `[spark]`, and their dependencies that jobs import.
_EXTRA = frozenset(
    [
        "adbc_driver_postgresql", "deltalake", "jinja2", "markupsafe", "numpy",
        "pandas", "psycopg", "psycopg_pool", "py4j", "pyarrow", "pyspark", "tqdm",
    ]
)  # fmt: skip
#: The longest duration of an option: every time that a job computes from it exists.
LONGEST = dt.timedelta(days=36_525)
#: The largest number of an option: a JVM's largest integer.
MOST = 2**31 - 1


def duration(text: str) -> dt.timedelta:
    """Parse a duration such as 30d, 12h, 15m or 45s."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([dhms])", text.strip())
    if not found:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a duration: write 30d, 12h, 15m or 45s"
        )
    seconds = float(found[1]) * {"d": 86_400, "h": 3_600, "m": 60, "s": 1}[found[2]]
    if seconds > LONGEST.total_seconds():
        raise argparse.ArgumentTypeError(f"{text!r} is longer than a hundred years")
    return dt.timedelta(seconds=seconds)


def whole(text: str) -> int:
    """Parse a whole number."""
    if not text.strip().isdecimal() or int(text) > MOST:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number between 0 and {MOST:,}"
        )
    return int(text)


def positive(text: str) -> int:
    """Parse a whole number that is at least 1."""
    if not (found := whole(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return found


def rate(text: str) -> float:
    """Parse a number of messages per second. 0 stands for no limit."""
    found = float(text)
    if wrong := dead_letters.wrong_rate(found or None):
        raise argparse.ArgumentTypeError(wrong)
    return found


def pause(text: str) -> dt.timedelta:
    """Parse a duration above zero."""
    if not (found := duration(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration above zero")
    return found


def instant(text: str) -> dt.datetime:
    """Parse an instant: either ISO 8601, in UTC by default, or a duration before
    now."""
    if re.fullmatch(r"\d+(?:\.\d+)?[dhms]", text.strip()):
        return dt.datetime.now(dt.timezone.utc) - duration(text)
    try:
        # Before Python 3.11, Z is an error.
        given = dt.datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither 2026-01-31T12:00 nor a duration such as 7d"
        ) from error
    if not 1900 < given.year < 9000:
        raise argparse.ArgumentTypeError(f"the year of {text!r} is out of range")
    return given if given.tzinfo else given.replace(tzinfo=dt.timezone.utc)


def pair(text: str) -> tuple[str, str]:
    """Split "NAME=VALUE" into name and value."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def add_jobs(
    parser: argparse.ArgumentParser,
    kind: type[argparse.ArgumentParser] = argparse.ArgumentParser,
) -> None:
    """Add a subparser for each job to `parser`. `kind` is the class of the
    subparsers."""
    jobs = parser.add_subparsers(
        dest="job", metavar="JOB", required=True, parser_class=kind
    )
    switch: dict[str, Any] = {"action": "store_true"}
    several: dict[str, Any] = {"action": "append", "default": []}
    common, rows, external = (argparse.ArgumentParser(add_help=False) for _ in range(3))
    common.add_argument("--spec", help="the job specification: a JSON file, or JSON")
    common.add_argument("--lake", help="the lake's URI")
    common.add_argument(
        "--service", **several, type=pair, metavar="NAME=URL",
        help="add a service, or say where its database is; may be repeated, also for "
        "a service that has several databases",
    )  # fmt: skip
    common.add_argument("--dry-run", **switch, help="change nothing")
    common.add_argument("--json", **switch, help="one JSON object, for tools")
    common.add_argument(
        "--conf", **several, type=pair, metavar="KEY=VALUE",
        help="a Spark setting; may be repeated",
    )  # fmt: skip
    rows.add_argument("--table", action="append", choices=ARCHIVED)
    rows.add_argument("--older-than", type=duration, help="default: the retention")
    rows.add_argument("--batch-rows", type=positive, default=100_000)
    external.add_argument(
        "--external", **several, metavar="PATTERN",
        help="a destination (or broker:ALIAS) consumed by something that keeps no "
        "inbox; * stands for any characters; may be repeated",
    )  # fmt: skip
    external.add_argument(
        "--external-sender", **several, metavar="PATTERN",
        help="a sender that keeps no outbox; may be repeated",
    )  # fmt: skip

    def add(
        name: str, text: str, *more: argparse.ArgumentParser
    ) -> argparse.ArgumentParser:
        return jobs.add_parser(name, parents=[common, *more], help=text)

    archive = add("archive", "move settled rows to the lake", rows)
    archive.add_argument(
        "--tasks", type=whole, default=0,
        help="tasks that write in parallel; default: half the cores of one machine, "
             "twice those of a cluster",
    )  # fmt: skip
    archive.add_argument(
        "--engine", choices=("auto", "spark", "local"), default="auto",
        help="local: in this process, without a JVM; auto: local if the rows are few",
    )  # fmt: skip
    archive.add_argument("--purges", type=positive, default=1, help="parallel deletes")
    archive.add_argument(
        "--overlap", action=argparse.BooleanOptionalAction,
        help="delete one wave of batches while the next is written; default: where "
        "Spark runs on other machines",
    )  # fmt: skip
    archive.add_argument("--no-vacuum", **switch)
    archive.add_argument(
        "--stuck-after", type=duration, default="6h",
        help="a transaction that is open for longer and holds rows back is a finding",
    )  # fmt: skip
    archive.add_argument(
        "--accept-loss", **switch,
        help="continue although the lake has lost batches for good",
    )  # fmt: skip

    text = "archive batch by batch and raise alerts, until stopped"
    follow = add("follow", text, rows, external)
    follow.add_argument(
        "--every", type=pause, default="5m", help="time between two rounds"
    )
    follow.add_argument(
        "--once", **switch, help="one round; exit code 1 if an alert fires"
    )
    for name, default, text in (
        ("lag", "15m", "a message that has been due for longer is an alert"),
        ("window", "1h", "the period in which dead letters are counted"),
        ("away", "5m", "a database or a lake that is away for longer is an alert"),
        ("stuck-after", "6h", "a transaction that holds rows for longer is an alert"),
        ("reconcile-every", "1h", "0s: never"),
        ("since", "24h", "how far back `reconcile` judges"),
        ("grace", "1h", "of `reconcile`"),
        ("sweep-every", "1d", "0s: never"),
        ("verify-every", "7d", "0s: never"),
    ):
        follow.add_argument(f"--{name}", type=duration, default=default, help=text)
    follow.add_argument(
        "--dead-letters", type=int, default=10,
        help="more dead letters than this are an alert",
    )  # fmt: skip
    follow.add_argument(
        "--webhook-env", default=WEBHOOK_URL, metavar="NAME",
        help="the environment variable that holds the webhook's address",
    )  # fmt: skip

    reconcile = add("reconcile", "compare what was sent and received", external)
    reconcile.add_argument(
        "--since", type=instant, help="judge only messages sent since then"
    )
    reconcile.add_argument("--grace", type=duration, default="1h")
    reconcile.add_argument(
        "--late-after", type=duration,
        help="time after which a message is late; default: 1h",
    )  # fmt: skip
    reconcile.add_argument(
        "--stuck-after", type=duration,
        help="a message that waits for longer to leave or to be processed is a "
             "finding; default: 6h",
    )  # fmt: skip
    reconcile.add_argument(
        "--fail-on", choices=("lost", "new", "findings", "never"), default="lost",
        help="unacknowledged findings that make the exit code 1; new: lost messages "
             "that no earlier run has found",
    )  # fmt: skip
    reconcile.add_argument("--known", **switch, help="count acknowledged findings too")

    findings = add("findings", "list and acknowledge what reconcile has found")
    findings.add_argument("--verdict", default="")
    findings.add_argument("--destination", default="")
    findings.add_argument("--message-id", **several, type=uuid.UUID)
    findings.add_argument(
        "--all", **switch,
        help="list acknowledged findings too; or change all of them",
    )  # fmt: skip
    change = findings.add_mutually_exclusive_group()
    change.add_argument(
        "--acknowledge", metavar="WHY", help="acknowledge them, for this reason"
    )
    change.add_argument("--reopen", **switch, help="remove their acknowledgement")

    listening = add("listeners", "list stages expected to receive from topics")
    listening.add_argument(
        "--retire", nargs=2, metavar=("TOPIC", "SERVICE/STAGE"),
        help="expect this stage to receive nothing more",
    )  # fmt: skip
    listening.add_argument(
        "--at", type=instant, help="when it stopped listening; default: now"
    )

    show = add("show", "find a message in databases and lake")
    show.add_argument("term", metavar="ID", help="message id, key or correlation id")

    views = add("views", "print SQL views of messages and findings")
    views.add_argument(
        "--of", choices=("database", "lake", "duckdb"), default="database",
        help="the database's, or those over the lake: of a Spark session, or of DuckDB",
    )  # fmt: skip

    analyze = add("analyze", "times, flow, failures")
    analyze.add_argument("--since", type=instant, default="7d")
    analyze.add_argument(
        "--html", default="txmsg-report.html", help="the report's file"
    )

    replay = add("replay", "put messages back into the outbox")
    replay.add_argument("--where", default="", help="a Spark SQL condition")
    replay.add_argument(
        "--verdict", default="", help="only messages with this verdict of reconcile"
    )
    replay.add_argument(
        "--run", default="", metavar="ID",
        help="the run that found it; default: the last one",
    )  # fmt: skip
    replay.add_argument(
        "--request", type=uuid.UUID, metavar="ID",
        help="the findings whose replay was requested in the admin",
    )  # fmt: skip
    replay.add_argument(
        "--from", dest="table", choices=("outbox", "dead_letters"), default="outbox",
        help="the outbox in database and lake, or the open dead letters",
    )  # fmt: skip
    replay.add_argument("--as", dest="mode", choices=("same", "copy"), default="same")
    replay.add_argument("--rate", type=rate, default=0, help="messages a second")
    replay.add_argument("--limit", type=whole, default=0)
    replay.add_argument("--name", default="", help="the same name stores nothing twice")
    replay.add_argument(
        "--replayed", **switch,
        help="select also messages that were replayed or redelivered before",
    )  # fmt: skip

    send = add("send", "send a message for each row")
    send.add_argument("--from", dest="path", required=True, help="the dataset")
    send.add_argument("--format", choices=("parquet", "csv", "json"), default="")
    send.add_argument("--destination", required=True)
    send.add_argument(
        "--template", required=True, help="the body as JSON, or a file with it"
    )
    send.add_argument("--key", default="")
    send.add_argument("--header", **several, type=pair)
    send.add_argument(
        "--id", dest="identity", default="", help="columns, comma-separated"
    )
    send.add_argument("--rate", type=rate, default=0)
    send.add_argument(
        "--name", required=True, help="a name; the same name stores nothing twice"
    )
    send.add_argument("--broker", default="default")

    erase = add("erase", "remove messages from database and lake")
    erase.add_argument("--message-id", **several, type=uuid.UUID)
    erase.add_argument("--key", **several)
    erase.add_argument("--correlation-id", **several)

    add("verify", "read the lake and compare it with its log")

    sweep = add("sweep", "tidy the lake")
    sweep.add_argument("--orphans-older-than", type=duration, default="1d")
    sweep.add_argument("--replaced-older-than", type=duration, default="7d")
    sweep.add_argument("--keep", type=duration, help="drop days older than this")
    sweep.add_argument("--no-compact", **switch)


def complete(spec: JobSpec, given: argparse.Namespace) -> JobSpec:
    """Return the job's specification, with the command line's options applied."""
    services: dict[str, list[SourceSpec]] = {}
    for one in spec.services:
        services.setdefault(one.service, []).append(one)
    services |= {name: [] for name, _ in given.service}
    for name, url in given.service:
        variable = password_variable(name)
        password_env = variable if variable in os.environ else ""
        services[name].append(SourceSpec(name, url, password_env))
    lake = spec.lake
    if given.lake:
        lake = dataclasses.replace(lake or LakeSpec(""), uri=given.lake)
    whole = tuple(chain.from_iterable(services.values()))
    return dataclasses.replace(spec, services=whole, lake=lake)


def execute(spec: JobSpec, given: argparse.Namespace) -> int:
    """Run one job, print its summary, and return the exit code."""
    try:
        with needs("The pipeline", "spark", *_EXTRA, error=EnvironmentFault):
            from .jobs.running import run_job

            outcome = run_job(complete(spec, given), given)
    except Exception as error:
        fault = error
        if not isinstance(fault, PipelineError):
            # A bug. Python would exit with 1, which means findings.
            traceback.print_exc()
            fault = EnvironmentFault(f"{type(error).__name__}: {error}")
        facts = {
            "job": given.job, "error": hidden(str(fault)),
            "exit_code": fault.exit_code,
        }  # fmt: skip
        if given.json:
            _say(json.dumps(facts))
        return _fail(given.job, fault)
    if given.json:
        _say(json.dumps(outcome.facts, default=str))
    else:
        _say("\n".join(outcome.lines))
    return outcome.exit_code


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _fail(job: str, error: PipelineError) -> int:
    sys.stderr.write(f"{job}: {hidden(str(error))}\n")
    return error.exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a job with the arguments of `python -m django_txmsg.spark`."""
    parser = argparse.ArgumentParser(
        prog="python -m django_txmsg.spark",
        description="The data pipeline of django_txmsg on Spark.",
    )
    add_jobs(parser)
    given = parser.parse_args(arguments)
    try:
        spec = JobSpec.load(given.spec) if given.spec else JobSpec()
    except UsageError as error:
        return _fail(given.job, error)
    return execute(spec, given)
