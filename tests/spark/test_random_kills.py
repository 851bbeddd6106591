"""Jobs are killed with SIGKILL at random instants, and then repeated until they
finish."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from deltalake import DeltaTable

from django_txmsg.spark.jobs.sweep import SweepOptions, run_sweep
from django_txmsg.spark.runs import Run
from django_txmsg.spark.schemas import INBOX, OUTBOX
from django_txmsg.spark.spec import JobSpec, LakeSpec
from tests.faults import wait_until
from tests.spark.archives import archive, hashes_in, hashes_of_lake, path_of
from tests.spark.log import Log
from tests.spark.running import end, start

#: Few kills show that the tests work, and many that the jobs do.
SOME = pytest.mark.parametrize(
    "kills",
    [
        pytest.param(3, marks=pytest.mark.matrix),
        pytest.param(100, marks=[pytest.mark.soak, pytest.mark.timeout(7_200)]),
    ],
)


def kill(
    process: subprocess.Popen[bytes], begun: Callable[[], bool], within: float
) -> bool:
    """Kill a job and its children, up to `within` seconds after it has begun. Return
    whether the job was still running."""
    wait_until(lambda: begun() or process.poll() is not None, deadline=250)
    try:
        process.wait(timeout=within)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return process.returncode == -signal.SIGKILL


@SOME
def test_killed_archive_and_sweep_leave_each_row_once(
    make_log, lake: LakeSpec, kills: int
) -> None:
    log: Log = make_log("sqlite")
    spec, dice, killed = JobSpec((log.spec,), lake), random.Random(35), 0
    known: dict[int, int] = {}
    lock = Path(f"{log.spec.path}.outbox-archive.lock")
    jobs = (
        ("archive", "--table", "outbox", "--older-than", "1d", "--engine", "local",
         "--batch-rows", "40"),
        ("sweep", "--orphans-older-than", "0s", "--replaced-older-than", "0s"),
    )  # fmt: skip
    while killed < kills:
        log.send_many(120, every=900.0)
        known |= hashes_in(log)
        for words in jobs:
            if words[0] == "sweep":
                archive(None, log, lake)
            lock.unlink(missing_ok=True)
            process = start(spec, *words)
            killed += kill(process, lock.exists, dice.uniform(0, 1.0))

    archive(None, log, lake)
    run_sweep(spec, SweepOptions(), Run("sweep", {}))
    there = hashes_of_lake(lake)
    assert len(there) == len(known)
    assert dict(there) == known
    assert hashes_in(log) == {}


@SOME
def test_killed_erase_removes_all_it_names_and_nothing_else(
    make_log, lake: LakeSpec, kills: int
) -> None:
    log: Log = make_log("sqlite")
    spec, dice, killed = JobSpec((log.spec,), lake), random.Random(36), 0
    ids = [str(uuid.UUID(int=number + 1)) for number in range(3 * kills)]
    log.send([{"message_id": uuid.UUID(one)} for one in ids])
    log.receive([{"message_id": uuid.UUID(one)} for one in ids])
    for table in (OUTBOX, INBOX):
        archive(None, log, lake, table=table)
    log.bury([{"message_id": uuid.UUID(one)} for one in ids])
    gone: list[str] = []
    lock = Path(f"{log.spec.path}.journeys.lock")
    while killed < kills:
        if len(gone) < len(ids) - 1:
            gone.append(ids[len(gone)])
        lock.unlink(missing_ok=True)
        process = start(spec, "erase", "--message-id", gone[-1])
        killed += kill(process, lock.exists, dice.uniform(0, 6.0))

    end(start(spec, "erase", *(word for one in gone for word in ("--message-id", one))))

    left = sorted(set(ids) - set(gone))
    for table in (OUTBOX, INBOX):
        rows = DeltaTable(path_of(lake, table)).to_pyarrow_table(columns=["message_id"])
        assert sorted(rows["message_id"].to_pylist()) == left
    letters = log.rows("SELECT message_id FROM django_txmsg_deadletter")
    assert sorted(str(uuid.UUID(str(one))) for (one,) in letters) == left


@SOME
def test_killed_replay_stores_each_message_once(
    make_log, lake: LakeSpec, kills: int
) -> None:
    log: Log = make_log("sqlite")
    spec, dice, killed = JobSpec((log.spec,), lake), random.Random(37), 0
    runs, messages = 0, 400
    log.send_many(messages)
    archive(None, log, lake)
    while killed < kills:
        name = f"again-{runs // 4}"  # four attempts at each, then to the end
        runs += 1
        words = ("replay", "--where", "key = ''", "--as", "copy", "--name", name)
        begun = log.count("django_txmsg_pipelinerun")
        process = start(spec, *words)
        killed += kill(
            process,
            lambda n=begun: log.count("django_txmsg_pipelinerun") > n,
            dice.uniform(0, 15.0),
        )
        if runs % 4 == 0 or killed == kills:
            end(start(spec, *words))
            stored = log.rows("SELECT message_id FROM django_txmsg_outboxmessage")
            assert len(stored) == len(set(stored)) == messages
            log.execute("DELETE FROM django_txmsg_outboxmessage")
