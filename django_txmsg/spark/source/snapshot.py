"""Lets many tasks read the same state of a database. On PostgreSQL, this process holds
a transaction open and exports its snapshot. SQLite cannot export a snapshot, so the
tasks read a copy of the file."""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from ..spec import SourceSpec


@contextmanager
def snapshot(spec: SourceSpec) -> Iterator[dict[str, str]]:
    """Hold a snapshot of a service's database while the block runs. Yield the options
    that read it.

    Pass the options to `spark.read.format("txmsg").options(**options)`, for as many
    tables as you like. Run Spark's actions inside the block. On PostgreSQL, vacuum
    cannot remove dead rows while the block runs.
    """
    from ..connection import connect  # needs pyarrow

    options = {"service": spec.service, "url": spec.url}
    if spec.password_env:
        options["passwordEnv"] = spec.password_env
    if spec.vendor == "postgresql":
        import psycopg

        # Closed without a commit, which would fail if the server has died meanwhile.
        # What reads or writes next reports that, with the database's address.
        with closing(connect(spec)) as connection:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            connection.read_only = True
            connection.autocommit = False
            row = connection.execute("SELECT pg_export_snapshot()").fetchone()
            assert row is not None
            yield options | {"snapshot": row[0]}
        return
    remove_left_copies()
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as directory, _locked(directory):
        copy = Path(directory) / _COPY
        with closing(connect(spec)) as live, closing(sqlite3.connect(copy)) as copied:
            live.backup(copied)
        yield options | {"url": f"sqlite:///{copy}", "snapshot": "copy"}


_PREFIX, _COPY = "txmsg-snapshot-", "snapshot.sqlite3"


def remove_left_copies() -> None:
    """Remove the copies of databases that processes of this user left behind when they
    were killed. (A process that makes a copy first locks the directory of the copy.)"""
    for copy in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_COPY}"):
        with suppress(OSError), _locked(copy.parent):
            shutil.rmtree(copy.parent)


@contextmanager
def _locked(directory: str | Path) -> Iterator[None]:
    held = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(held)
