"""A process that uses an SQLite database is killed. If it was in a transaction, the
database can still be read, without the changes of that transaction. If it had made a
copy of the database, the next run removes the copy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from django_txmsg.spark.databases import open_database
from django_txmsg.spark.lock import alive
from django_txmsg.spark.schemas import OUTBOX
from django_txmsg.spark.source.snapshot import snapshot
from django_txmsg.spark.spec import JobSpec, LakeSpec, SourceSpec
from tests.spark.conftest import ROOT
from tests.spark.log import Log
from tests.spark.running import run

#: Dies inside a transaction that has changed the database file.
WRITER = """
import os, signal, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA journal_mode = " + sys.argv[2])
connection.execute("PRAGMA cache_size = 1")
connection.execute("BEGIN IMMEDIATE")
connection.execute("UPDATE django_txmsg_outboxmessage SET body = zeroblob(9000)")
os.kill(os.getpid(), signal.SIGKILL)
"""
COPIER = """
import sys
from django_txmsg.spark.source.snapshot import snapshot
from django_txmsg.spark.spec import SourceSpec
with snapshot(SourceSpec("shop", sys.argv[1])) as options:
    print(options["url"], flush=True)
    sys.stdin.read()
"""


def shown(spec: SourceSpec, spark: Any) -> int:
    return len(run(JobSpec((spec,)), "show", "a-key")["steps"]) // 2


def read_by_spark(spec: SourceSpec, spark: Any) -> int:
    options = {"url": spec.url, "service": spec.service, "table": "outbox"}
    return int(spark.read.format("txmsg").options(**options).load().count())


def read_in_a_snapshot(spec: SourceSpec, spark: Any) -> int:
    with snapshot(spec) as options:
        copy = open_database(SourceSpec("shop", options["url"]))
        return sum(one.num_rows for one in copy.read(OUTBOX, OUTBOX.columns, ""))


@pytest.mark.parametrize("journal", ["DELETE", "WAL"])
@pytest.mark.parametrize("read", [shown, read_by_spark, read_in_a_snapshot])
def test_a_database_is_read_after_a_writer_was_killed_in_a_transaction(
    spark: Any, make_log, read: Callable[[SourceSpec, Any], int], journal: str
) -> None:
    log: Log = make_log("sqlite")
    log.send_many(50, key="a-key")
    path = log.spec.path
    killed = subprocess.run([sys.executable, "-c", WRITER, path, journal], check=False)
    assert killed.returncode == -signal.SIGKILL
    left = Path(f"{path}-journal" if journal == "DELETE" else f"{path}-wal")
    assert left.stat().st_size > 9000

    assert read(log.spec, spark) == 50

    bodies = log.rows("SELECT DISTINCT body FROM django_txmsg_outboxmessage")
    assert len(bodies) == 50


def test_a_reader_creates_no_database(tmp_path: Path) -> None:
    missing = SourceSpec("shop", f"sqlite:///{tmp_path}/missing.sqlite3")
    with pytest.raises(Exception, match="There is no SQLite database"):
        list(open_database(missing).read(OUTBOX, OUTBOX.columns, ""))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("job", ["snapshot", "erase"])
def test_the_copy_of_a_killed_process_is_removed_by_the_next_run(
    spark: Any, make_log, lake: LakeSpec, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, job: str,
) -> None:  # fmt: skip
    log: Log = make_log("sqlite")
    log.send_many(3)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    copiers = [
        subprocess.Popen(
            [sys.executable, "-c", COPIER, log.spec.url],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    urls = [process.stdout.readline().strip() for process in copiers]  # type: ignore[union-attr]
    copies = [Path(SourceSpec("shop", url).path) for url in urls]
    copiers[0].kill()
    copiers[0].communicate()
    assert all(one.is_file() for one in copies)

    if job == "erase":
        run(JobSpec((log.spec,), lake), "erase", "--key", "a")
    else:
        with snapshot(log.spec):
            pass

    # The other process still lives, and reads its copy.
    assert [one.parent.exists() for one in copies] == [False, True]
    copiers[1].communicate("")
    assert list(tmp_path.glob("txmsg-snapshot-*")) == []


def test_old_lock_files_of_killed_runs_are_removed_by_the_next_run(make_log) -> None:
    log: Log = make_log("sqlite")
    before_yesterday = time.time() - 2 * 86_400

    def lock(name: str) -> Path:
        return Path(f"{log.spec.path}.run-{name}.lock")

    lock("killed").touch()
    lock("young").touch()
    with alive(log.spec, "long"):
        for name in ("killed", "long"):
            os.utime(lock(name), (before_yesterday, before_yesterday))

        with alive(log.spec, "next"):
            names = ("killed", "young", "long", "next")
            assert [lock(one).exists() for one in names] == [False, True, True, True]
