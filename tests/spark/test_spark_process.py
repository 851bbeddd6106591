"""The process in which `follow` runs the jobs that need Spark."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import psutil
import pytest

from django_txmsg.spark import session
from django_txmsg.spark.session import SparkProcess
from django_txmsg.spark.spec import JobSpec, LakeSpec
from tests.faults import wait_until
from tests.spark.log import Log

pytestmark = pytest.mark.timeout(300)

OLD = timedelta(hours=2)


@pytest.fixture
def beside(log: Log, lake: LakeSpec) -> Iterator[Callable[..., SparkProcess]]:
    """Return a function that creates processes for jobs on the log. They end with the
    test."""
    made = []

    def make(*settings: tuple[str, str], url: str = log.spec.url) -> SparkProcess:
        spec = JobSpec((replace(log.spec, url=url),), lake)
        made.append(SparkProcess(spec, settings))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def run(one: SparkProcess, job: str = "reconcile", *words: str) -> dict[str, Any]:
    one.start(job, *words)
    return answer(one)


def answer(one: SparkProcess) -> dict[str, Any]:
    """Wait until the job has ended, and return its facts."""
    facts: list[dict[str, Any] | None] = []

    def ended() -> bool:
        facts.append(one.poll())
        return facts[-1] is not None

    wait_until(ended, deadline=120)
    assert facts[-1] is not None
    assert not one.job
    return facts[-1]


def children() -> set[int]:
    """Return the ids of the running Spark processes of `follow`."""
    found = set()
    for one in psutil.Process().children():
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if "django_txmsg.spark.worker" in one.cmdline():
                found.add(one.pid)
    return found


# In `make test`, `test_follow.py` runs a job in such a process.
@pytest.mark.matrix
def test_runs_share_a_session(log: Log, beside: Callable[..., SparkProcess]) -> None:
    one = beside()
    log.send_many(3, created_at=datetime.now(timezone.utc) - OLD)
    first = run(one, "reconcile", "--since", "3d")
    assert first["new"] == {"never_received": 3}
    process = children()
    assert len(process) == 1

    log.send_many(2, created_at=datetime.now(timezone.utc) - OLD)
    second = run(one, "reconcile", "--since", "3d")
    assert second["new"] == {"never_received": 2}
    assert second["run"] != first["run"]
    # There is no lake yet. Another job runs in the same session.
    third = run(one, "views")
    assert third["job"] == "views"
    assert children() == process


@pytest.mark.matrix
def test_a_killed_process_is_replaced(beside: Callable[..., SparkProcess]) -> None:
    one = beside()
    assert run(one)["state"] == "clean"
    [process] = children()
    os.kill(process, signal.SIGKILL)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    assert run(one)["state"] == "clean"
    [successor] = children()
    assert successor != process

    one.start("reconcile")
    os.kill(successor, signal.SIGKILL)
    assert answer(one)["state"] == "clean"
    assert children().isdisjoint({process, successor})

    # In a new process, a run is not tried again.
    one.stop()
    one.start("reconcile")
    [newest] = children()
    os.kill(newest, signal.SIGKILL)
    assert "ended with exit code -9" in answer(one)["error"]
    assert not children()


@pytest.mark.matrix
def test_a_failed_run_ends_the_process(beside: Callable[..., SparkProcess]) -> None:
    one = beside(url="sqlite:////nowhere/at/all.sqlite3")
    assert "There is no SQLite database at /nowhere" in run(one)["error"]
    assert not children()


def test_an_error_says_why_spark_does_not_start(
    beside: Callable[..., SparkProcess],
) -> None:
    one = beside(("spark.master", "nonsense"))
    assert "Spark does not start" in run(one)["error"]
    assert not children()


def test_without_a_file_for_its_output_no_process_starts(
    beside: Callable[..., SparkProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of open files can be reached at any of its files."""

    def full(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    one = beside()
    with monkeypatch.context() as patch:
        patch.setattr(session, "open", full, raising=False)
        one.start("reconcile")
    assert not children()
    facts = one.poll()
    assert facts is not None
    assert "cannot be started: [Errno 24]" in facts["error"]


def test_a_suspended_process_is_ended(beside: Callable[..., SparkProcess]) -> None:
    one = beside()
    one.start("verify")
    [process] = children()
    os.kill(process, signal.SIGSTOP)
    os.waitid(os.P_PID, process, os.WSTOPPED | os.WNOWAIT)
    stopping = threading.Thread(target=one.stop)
    stopping.start()
    stopping.join(20)
    left = children()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    stopping.join()
    assert not left


@pytest.mark.parametrize("reused", [False, True])
def test_a_run_that_never_ends_is_killed_and_reported(
    beside: Callable[..., SparkProcess], monkeypatch, reused: bool
) -> None:
    one = beside()
    if reused:
        assert run(one, "views")["state"] == "clean"
    one.start("verify")
    [process] = children()
    os.kill(process, signal.SIGSTOP)
    assert one.poll() is None
    monkeypatch.setattr(session, "LONGEST_RUN", timedelta(0))
    facts = one.poll()
    assert facts is not None
    assert "had not ended after a day" in facts["error"]
    assert not children()
