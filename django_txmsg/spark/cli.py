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
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from ..lazy_imports import needs
from ..monitoring.lengths import positive, printable, printable_lines
from ..monitoring.lengths import read_age as duration
from ..rules import dead_letters
from ..rules.outbox import wrong_run
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


def run_name(text: str) -> str:
    """Return the name of a replay or a send."""
    if wrong := wrong_run(text):
        raise argparse.ArgumentTypeError(wrong)
    return text


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
    if re.fullmatch(r"\d+(?:\.\d+)?[smhdw]", text.strip()):
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


class Filled(argparse.Action):
    """Stores the value of an option that selects messages. Refuses a blank value, which
    would select more: it may be an unset variable of a shell."""

    def __call__(self, parser: Any, namespace: Any, values: Any, _: Any = None) -> None:
        if not values.strip():
            raise argparse.ArgumentError(self, "is blank")
        setattr(namespace, self.dest, values)


def _adding_to(parser: argparse._ActionsContainer) -> Callable[..., None]:
    """Return a function that adds an option, with its help text, to `parser`."""

    def option(name: str, text: str = "", **how: Any) -> None:
        if how.get("action") == "append":
            text = f"{text}; may be repeated".removeprefix("; ")
        parser.add_argument(name, help=text, **how)

    return option


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
    selector: dict[str, Any] = {"action": Filled, "default": ""}
    several: dict[str, Any] = {"action": "append", "default": []}
    pairs, patterns = several | {"type": pair}, several | {"metavar": "PATTERN"}
    common, rows, external = (argparse.ArgumentParser(add_help=False) for _ in range(3))
    option = _adding_to(common)
    option("--spec", "the job specification: a JSON file, or JSON")
    option("--lake", "the lake's URI")
    option("--service", "a service, and its database", **pairs, metavar="NAME=URL")
    option("--former", "a former name of a service", **pairs, metavar="NAME=OLD")
    option("--dry-run", "change nothing", **switch)
    option("--json", "one JSON object, for tools", **switch)
    option("--conf", "a Spark setting", **pairs, metavar="KEY=VALUE")
    option = _adding_to(rows)
    option("--table", action="append", choices=ARCHIVED)
    option("--older-than", "default: the retention", type=duration)
    option("--batch-rows", type=positive, default=100_000)
    option = _adding_to(external)
    option("--external", "a destination or broker:ALIAS without an inbox", **patterns)
    option("--external-sender", "a sender that keeps no outbox", **patterns)

    def add(
        name: str, text: str, *more: argparse.ArgumentParser
    ) -> Callable[..., None]:
        return _adding_to(jobs.add_parser(name, parents=[common, *more], help=text))

    option = add("archive", "move settled rows to the lake", rows)
    text = "parallel writers; default: half the cores of one machine, twice a cluster's"
    option("--tasks", text, type=positive, default=0)
    text = "local: in this process, without a JVM; auto: local if the rows are few"
    option("--engine", text, choices=("auto", "spark", "local"), default="auto")
    option("--purges", "parallel deletes", type=positive, default=1)
    text = "delete a wave of batches while the next is written; default: on a cluster"
    option("--overlap", text, action=argparse.BooleanOptionalAction)
    option("--no-vacuum", **switch)
    text = "a transaction that holds rows back for longer is a finding"
    option("--stuck-after", text, type=duration, default="6h")
    text = "continue although the lake has lost batches for good"
    option("--accept-loss", text, **switch)

    text = "archive batch by batch and raise alerts, until stopped"
    option = add("follow", text, rows, external)
    option("--every", "time between two rounds", type=pause, default="5m")
    option("--once", "one round; exit code 1 if an alert fires", **switch)
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
        option(f"--{name}", text, type=duration, default=default)
    text = "more dead letters than this are an alert"
    option("--dead-letters", text, type=int, default=10)
    text = "the environment variable that holds the webhook's address"
    option("--webhook-env", text, default=WEBHOOK_URL, metavar="NAME")

    option = add("reconcile", "compare what was sent and received", external)
    option("--since", "judge only messages sent since then", type=instant)
    option("--grace", type=duration, default="1h")
    text = "a message that takes longer is late; default: 1h"
    option("--late-after", text, type=duration)
    text = "a message that waits for longer is a finding; default: 6h"
    option("--stuck-after", text, type=duration)
    text = "findings that set exit code 1; new: those that no earlier run has found"
    kinds = ("lost", "new", "findings", "never")
    option("--fail-on", text, choices=kinds, default="lost")

    text = "list and acknowledge what reconcile has found"
    findings = jobs.add_parser("findings", parents=[common], help=text)
    option = _adding_to(findings)
    option("--verdict", **selector)
    option("--destination", **selector)
    option("--message-id", **several, type=uuid.UUID)
    option("--all", "list acknowledged findings too; or change all of them", **switch)
    option = _adding_to(findings.add_mutually_exclusive_group())
    option("--acknowledge", "acknowledge them, for this reason", metavar="WHY")
    option("--reopen", "remove their acknowledgement", **switch)

    option = add("listeners", "list stages expected to receive from topics")
    text = "expect this stage to receive nothing more"
    option("--retire", text, nargs=2, metavar=("TOPIC", "SERVICE/STAGE"))
    option("--at", "when it stopped listening; default: now", type=instant)

    option = add("show", "find a message in databases and lake")
    text = "message id, key or correlation id"
    option("term", text, action=Filled, metavar="ID")

    option = add("views", "print SQL views of messages and findings")
    text = "the database's, or those over the lake: for Spark, or for DuckDB"
    option("--of", text, choices=("database", "lake", "duckdb"), default="database")

    option = add("analyze", "times, flow, failures")
    option("--since", type=instant, default="7d")
    option("--html", "the report's file", default="txmsg-report.html")

    option = add("replay", "put messages back into the outbox")
    option("--where", "a Spark SQL condition", **selector)
    option("--verdict", "only messages with this verdict of reconcile", **selector)
    text = "the run that found it; default: the last one"
    option("--run", text, **selector, metavar="ID")
    text = "the findings whose replay was requested in the admin"
    option("--request", text, type=uuid.UUID, metavar="ID")
    tables = ("outbox", "dead_letters")
    option("--from", dest="table", choices=tables, default="outbox")
    option("--as", dest="mode", choices=("same", "copy"), default="same")
    option("--rate", "messages a second", type=rate, default=0)
    option("--limit", type=positive, default=0)
    option("--name", "the same name stores nothing twice", type=run_name)
    text = "select also messages that were replayed or redelivered before"
    option("--replayed", text, **switch)

    option = add("send", "send a message for each row")
    option("--from", "the dataset", dest="path", required=True)
    option("--format", choices=("parquet", "csv", "json"), default="")
    option("--destination", required=True)
    option("--template", "the body as JSON, or a file with it", required=True)
    option("--key", default="")
    option("--header", **pairs)
    option("--id", "columns, comma-separated", dest="identity", default="")
    option("--rate", type=rate, default=0)
    text = "a name; the same name stores nothing twice"
    option("--name", text, type=run_name, required=True)
    option("--broker", default="default")

    option = add("erase", "remove messages from database and lake")
    option("--message-id", **several, type=uuid.UUID)
    option("--key", **several)
    option("--correlation-id", **several)

    add("verify", "read the lake and compare it with its log")

    option = add("sweep", "tidy the lake")
    option("--orphans-older-than", type=duration, default="1d")
    option("--replaced-older-than", type=duration, default="7d")
    option("--keep", "drop days older than this", type=duration)


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options in `words`, by default those of this process."""
    parser = argparse.ArgumentParser(
        prog="python -m django_txmsg.spark",
        description="The data pipeline of django_txmsg on Spark.",
    )
    add_jobs(parser)
    return parser.parse_args(words)


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
    if given.former and lake:
        former = {old: present for present, old in given.former}
        lake = dataclasses.replace(lake, former={**lake.former, **former})
    whole = tuple(chain.from_iterable(services.values()))
    return dataclasses.replace(spec, services=whole, lake=lake)


def execute(spec: JobSpec, given: argparse.Namespace) -> int:
    """Run one job, print its summary, and return the exit code."""
    try:
        with needs("The pipeline", "spark", *_EXTRA, error=EnvironmentFault):
            from .jobs.running import run_job

            run = run_job(complete(spec, given), given)
    except Exception as error:
        fault = error
        if not isinstance(fault, PipelineError):
            # A bug. Python would exit with 1, which means findings.
            traceback.print_exc()
            fault = EnvironmentFault(f"{type(error).__name__}: {error}")
        if given.json:
            facts = {"job": given.job, "error": hidden(str(fault))}
            _say(json.dumps(facts | {"exit_code": fault.exit_code}))
        return _fail(given.job, fault)
    # The statements of `views` are for a database to read.
    shown = run.lines if given.job == "views" else map(printable, run.lines)
    _say(json.dumps(run.facts, default=str) if given.json else "\n".join(shown))
    return run.exit_code


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _fail(job: str, error: PipelineError) -> int:
    sys.stderr.write(printable_lines(f"{job}: {hidden(str(error))}\n"))
    return error.exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a job with the arguments of `python -m django_txmsg.spark`."""
    given = parsed(arguments)
    try:
        spec = JobSpec.load(given.spec) if given.spec else JobSpec()
    except UsageError as error:
        return _fail(given.job, error)
    return execute(spec, given)
