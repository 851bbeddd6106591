"""Locks that are released when the process that holds them ends, even if it is killed.

On PostgreSQL they are advisory locks of the session. For SQLite, they are locks on a
file beside the database.
"""

from __future__ import annotations

import fcntl
import glob
import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from .connection import Connection, connect_plain
from .errors import EnvironmentFault
from .spec import SourceSpec


class Archiving(EnvironmentFault):
    """Another archive or an erasure is running."""


class Taken(EnvironmentFault):
    """Another process holds the lock."""


def archiving(
    connection: Connection, spec: SourceSpec, table: str
) -> AbstractContextManager[None]:
    """Hold the archive lock of a table while the block runs. Raises Archiving, without
    waiting, if another archiver holds the lock."""
    what = f"Another archive, sweep or erasure of {table}"
    return _alone(connection, spec, f"archive/{table}", what, Archiving)


def following(connection: Connection, spec: SourceSpec) -> AbstractContextManager[None]:
    """Hold the lock of `follow` for a database while the block runs. Raises Taken,
    without waiting, if another process holds the lock."""
    return _alone(connection, spec, "follow", "Another `follow`")


def keeping(connection: Connection, spec: SourceSpec) -> AbstractContextManager[None]:
    """Hold the lock on a service's journeys while the block runs. Raises Taken, without
    waiting, if another process holds the lock."""
    return _alone(connection, spec, "journeys", "An update of the journeys")


def storing(connection: Connection, spec: SourceSpec) -> AbstractContextManager[None]:
    """Prevent erasures while the block reads messages and stores what it has found,
    such as the messages themselves. Raises Taken, without waiting, if an erasure is
    running."""
    what = "An erasure of messages"
    return _alone(connection, spec, "erase", what, shared=True)


def erasure(connection: Connection, spec: SourceSpec) -> AbstractContextManager[None]:
    """Prevent replays and reconciliations while the block erases messages. Raises
    Taken, without waiting, if one of them is running."""
    return _alone(connection, spec, "erase", "A replay or a `reconcile`")


@contextmanager
def _alone(
    connection: Connection,
    spec: SourceSpec,
    name: str,
    what: str,
    refusal: type[EnvironmentFault] = Taken,
    *,
    shared: bool = False,
) -> Iterator[None]:
    """Hold a lock while the block runs. Raises `refusal`, without waiting, if another
    process holds the lock, because it does `what`. With `shared`, any number of
    processes may hold the lock together."""
    refused = refusal(
        f"{what} of {spec.service!r} is running: wait for its end. The admin's list of "
        "pipeline runs shows who has started it. (A transaction-pooling proxy breaks "
        "this lock: give the pipeline a direct connection.)"
    )
    if spec.vendor == "sqlite":
        suffix = "-".join(reversed(name.split("/")))  # outbox-archive
        path = f"{os.path.realpath(spec.path)}.{suffix}.lock"
        try:
            # For reading: another user may own the file.
            lock = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
        except OSError as error:
            raise EnvironmentFault(
                f"The lock file {path} cannot be opened ({error.strerror}): let this "
                "user create and read it."
            ) from error
        with open(lock):
            try:
                kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
                fcntl.flock(lock, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                raise refused from None
            yield
        return
    suffix = "_shared" if shared else ""
    # Of these tables: another schema of the database may have those of a service, too.
    number = "hashtextextended(%s, 'django_txmsg_outboxmessage'::regclass::bigint)"
    key = f"django_txmsg/{name}"
    if not connection.value(f"SELECT pg_try_advisory_lock{suffix}({number})", key):
        raise refused
    try:
        yield
    finally:
        connection.forget(f"SELECT pg_advisory_unlock{suffix}({number})", key)


@contextmanager
def alive(spec: SourceSpec, run_id: str) -> Iterator[None]:
    """Hold a lock while a run is in progress. `PipelineRun.interrupted` checks this
    lock. If another process holds it, say so, and wait for its end."""
    with connect_plain(spec) as connection:
        if spec.vendor == "postgresql":
            number, key = "hashtextextended(%s, 0)", f"django_txmsg/run/{run_id}"
            if not connection.value(f"SELECT pg_try_advisory_lock({number})", key):
                _tell_wait(run_id)
                connection.rows(f"SELECT pg_advisory_lock({number})", key)
            yield
            return
        [[path]] = connection.rows(
            "SELECT file FROM pragma_database_list WHERE name = 'main'"
        )
        lock = Path(f"{path}.run-{run_id}.lock")
        # Killed runs have left theirs. A young one may not be locked yet.
        for old in lock.parent.glob(f"{glob.escape(Path(path).name)}.run-*.lock"):
            with suppress(OSError), old.open() as file:
                if old.stat().st_mtime < time.time() - 86_400:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    old.unlink()
        with lock.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _tell_wait(run_id)
                fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)


def _tell_wait(run_id: str) -> None:
    # The admin holds the lock, too, for a moment.
    sys.stderr.write(
        f"Waiting for the lock of run {run_id}: another process holds it, for example "
        "`follow`, which carries out the same request.\n"
    )
