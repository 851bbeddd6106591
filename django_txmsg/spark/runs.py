"""The record of a pipeline run, with the run's user, options and result.

The record is stored in the database, so that the admin can show it. If there is a lake,
the record is stored in the lake, too.
"""

from __future__ import annotations

import datetime as dt
import getpass
import json
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from .batchlog import LostBatches, is_mounted
from .connection import Connection, connect_plain, read_instant, read_json
from .errors import (
    EnvironmentFault,
    PipelineError,
    UsageError,
    VerificationRefused,
)
from .lock import Taken, alive
from .results import Results
from .schemas import struct_of
from .spec import JobSpec, LakeSpec, SourceSpec, hidden

RUN = struct_of(
    "id string, job string, state string, run_by string, options string, rows long, "
    "counts string, error string, started_at timestamp, finished_at timestamp"
)

#: Jobs that would be wrong without the lake's rows. `archive` checks more closely
#: itself.
_OF_THE_LAKE = frozenset(["reconcile", "analyze", "replay", "erase", "verify", "sweep"])
_RUNS = "django_txmsg_pipelinerun"
#: The option with the ids of the messages that a run is about.
_FOUND = "message_ids"
#: How long `follow` tries to run what was requested.
REQUEST_EXPIRES = dt.timedelta(days=1)


def run_by() -> str:
    """Return the user and the host of this process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = "?"
    return f"{user}@{socket.gethostname()}"[:255]


@dataclass
class Run:
    """A run in progress. The job sets its results."""

    job: str
    options: dict[str, Any]
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    #: By the database's clock, if the run is recorded there.
    started_at: dt.datetime = field(
        default_factory=lambda: dt.datetime.now(dt.timezone.utc)
    )
    rows: int = 0
    counts: dict[str, Any] = field(default_factory=dict)
    findings: bool = False
    refused: bool = False
    #: Whether another job's lock stopped a requested run, so that it must run later.
    put_off: bool = False
    error: str = ""
    #: Whether its results create a lake if there is none.
    makes_lake: bool = True
    lines: list[str] = field(default_factory=list)
    #: The summary, for people and for programs.
    facts: dict[str, Any] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """How long the run has taken so far."""
        return time.monotonic() - self._began

    @property
    def now(self) -> dt.datetime:
        """The present time, by the clock of `started_at`."""
        return self.started_at + dt.timedelta(seconds=self.seconds)

    def start(self, connection: Connection) -> None:
        """Take the start time from the database's clock."""
        # In this order: `now` must not be early. A check that ran in between would miss
        # the run's findings.
        self._began, self.started_at = time.monotonic(), connection.clock()

    @property
    def state(self) -> str:
        """The state that would be recorded if the run ended now."""
        if self.refused:
            return "refused"
        if self.put_off:
            return "requested"
        if self.error:
            return "failed"
        return "findings" if self.findings else "clean"

    @property
    def exit_code(self) -> int:
        """The exit code of the process."""
        codes = {"clean": 0, "findings": 1, "requested": 3, "failed": 3, "refused": 4}
        return codes[self.state]

    def row(self, state: str, finished_at: dt.datetime | None = None) -> dict[str, Any]:
        """Return the record of this run, by column."""
        return {
            "id": self.id, "job": self.job, "state": state, "run_by": run_by(),
            "options": json.dumps(self.options, default=str), "rows": self.rows,
            "counts": json.dumps(self.counts, default=str), "error": self.error,
            "started_at": self.started_at, "finished_at": finished_at,
        }  # fmt: skip

    def results(self, lake: LakeSpec, service: str) -> Results:
        """Return a writer for the results of this run."""
        return Results(lake, service, self.id, self.started_at, self.makes_lake)


@contextmanager
def recorded(
    spec: JobSpec, job: str, options: dict[str, Any], request: uuid.UUID | None = None
) -> Iterator[Run]:
    """Record a run from its beginning to its end, even if it fails. `request` is the id
    of the request that this run carries out."""
    source = spec.service()
    run = Run(job, options)
    if request is not None:
        run.id = str(request)
    with alive(source, run.id):
        _begin(source, run, hidden(spec.lake.uri) if spec.lake else "", request)
        try:
            if spec.lake is not None and job in _OF_THE_LAKE:
                run.makes_lake = not is_mounted(spec, insist=job == "erase")
            yield run
        except BaseException as error:
            told = str(error)
            if not isinstance(error, PipelineError):
                told = f"{type(error).__name__}: {error}"[:8000]
            run.error = hidden(told)
            run.refused |= isinstance(error, VerificationRefused)
            run.put_off = request is not None and isinstance(error, Taken)
            raise
        finally:
            try:
                progressed(source, run, run.state, run.now)
                if spec.lake is not None:
                    _keep(run, spec, spec.lake)
            except Exception:
                # The first error is the one to report.
                if not run.error:
                    raise


def _begin(source: SourceSpec, run: Run, lake: str, request: uuid.UUID | None) -> None:
    """Store the beginning of a run. A requested run begins even if an earlier try has
    failed or was killed."""
    with connect_plain(source) as connection:
        run.start(connection)
        if request is None:
            row = run.row("running") | {"service": source.service, "lake": lake}
            row["id"] = uuid.UUID(run.id)
            marks = ", ".join(["%s"] * len(row))
            connection.execute(
                f"INSERT INTO {_RUNS} ({', '.join(row)}) VALUES ({marks})",
                *row.values(),
            )
            return
        taken = connection.execute(
            f"UPDATE {_RUNS} SET state = 'running', lake = %s, started_at = %s,"
            " finished_at = NULL WHERE id = %s AND service = %s AND job = %s"
            " AND state <> 'clean'",
            lake, run.started_at, request, source.service, run.job,
        )  # fmt: skip
    if not taken:
        raise UsageError(f"There is no open request {run.id} for a {run.job}.")


def requested_ids(source: SourceSpec, request: uuid.UUID) -> list[str]:
    """Return the ids of the messages whose replay was requested. Raises UsageError for
    an unknown request."""
    with connect_plain(source) as connection:
        found = connection.value(f"SELECT options FROM {_RUNS} WHERE id = %s", request)
    ids = None if found is None else _options_of(request, found).get(_FOUND)
    if not ids:
        raise UsageError(f"There is no request {request}.")
    return list(ids)


def next_request(connection: Connection, source: SourceSpec) -> str:
    """Return the id of the oldest open replay request of the last day. A request is
    open if it has not begun, or if its run was killed. Returns "" if there is none."""
    rows = connection.rows(
        f"SELECT id, options FROM {_RUNS} WHERE service = %s AND job = 'replay'"
        " AND state IN ('requested', 'running') ORDER BY started_at",
        source.service,
    )
    now = connection.clock()
    for found, options in rows:
        at = read_instant((read_json(options) or {}).get("requested_at"))
        if at is not None and now - at < REQUEST_EXPIRES:
            return str(uuid.UUID(str(found)))
    return ""


@contextmanager
def erasing(
    services: Sequence[SourceSpec], run: Run, found: set[str]
) -> Iterator[set[str]]:
    """Yield the ids of the messages that this run must erase: the ids in `found`, and
    ids from the records of earlier runs that selected messages by the same options.

    Before the block begins, these ids are stored in the record of this run. After the
    block has succeeded, the ids are removed from the records of this run and of the
    earlier runs. So a record contains ids only if its run has failed or was killed.
    That run may have deleted the rows that contain the key of a message. Then the
    message can no longer be found by its key, but its id is still known. A dry run
    stores and removes no ids.
    """
    with ExitStack() as stack:
        databases = [stack.enter_context(connect_plain(source)) for source in services]
        same = [
            (database, key, options)
            for database in databases
            for key, text in database.rows(
                f"SELECT id, options FROM {_RUNS} WHERE job = 'erase'"
            )
            if _select_the_same(options := _options_of(key, text), run.options)
        ]
        found = found.union(*(options.pop(_FOUND, ()) for *_, options in same))
        if "dry_run" in run.options:
            yield found
            return
        own = uuid.UUID(run.id)
        _describe(databases[0], own, run.options | {_FOUND: sorted(found)})
        yield found
        for database, key, options in same:
            _describe(database, key, options)


def _options_of(run: Any, text: Any) -> dict[str, Any]:
    """Return the options of a recorded run, from a query result. Raises
    EnvironmentFault if they are no longer as they were recorded."""
    with suppress(ValueError, TypeError, AttributeError):
        options: dict[str, Any] = read_json(text)
        for one in options.get(_FOUND, ()):
            uuid.UUID(one)
        return options
    raise EnvironmentFault(
        f"The options of the run {uuid.UUID(str(run))} in the table {_RUNS} were "
        "changed, and cannot be read. If it is a killed `erase`, erase its messages by "
        "--message-id. Then delete this row."
    )


def _select_the_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    names = ("message_id", "key", "correlation_id")
    return all(one.get(name) == other.get(name) for name in names)


def describe(source: SourceSpec, run: Run) -> None:
    """Record the options of a run again, after the job has added some."""
    with connect_plain(source) as connection:
        _describe(connection, uuid.UUID(run.id), run.options)


def _describe(connection: Connection, key: Any, options: dict[str, Any]) -> None:
    _change(connection, key, {"options": json.dumps(options, default=str)})


def _change(connection: Connection, key: Any, values: dict[str, Any]) -> None:
    changes = ", ".join(f"{name} = %s" for name in values)
    connection.execute(
        f"UPDATE {_RUNS} SET {changes} WHERE id = %s", *values.values(), key
    )


def progressed(
    source: SourceSpec,
    run: Run,
    state: str = "running",
    finished_at: dt.datetime | None = None,
) -> None:
    """Record the progress of a run, by default of one that has not ended yet."""
    row = run.row(state, finished_at)
    names = ("state", "rows", "counts", "error", "finished_at")
    with connect_plain(source) as connection:
        _change(connection, uuid.UUID(run.id), {name: row[name] for name in names})


def _keep(run: Run, spec: JobSpec, lake: LakeSpec) -> None:
    """Store the record in the lake, and create the lake if there is none. A dry run or
    a failed run does not create the lake: if there is no lake, its record is not
    stored. Nor is a record stored if archived batches are missing from the lake. If the
    job only reads the lake, a lake that is full or read-only is no error."""
    dry = "dry_run" in run.options
    changes = not dry and not run.error
    try:
        run.makes_lake = not is_mounted(spec)
    except LostBatches:
        return
    except PipelineError:
        if changes:
            raise
        return
    if run.makes_lake and not changes:
        return
    row = run.row(run.state, run.now)
    with suppress(Exception) if dry or run.job == "verify" else nullcontext():
        run.results(lake, spec.service().service).save_rows("runs", RUN, [row])
