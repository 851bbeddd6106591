"""`archive` is killed with SIGKILL at every step, with its JVM and its Spark
workers."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from django_txmsg.spark.spec import LakeSpec
from tests.faults import wait_until
from tests.spark.archives import archive, assert_moved_once, hashes_in, path_of
from tests.spark.conftest import ROOT
from tests.spark.kill_archive import DIFFERING
from tests.spark.log import Log

STEPS = [
    "planned", "written", "committing", "committed", "purging", "purged", "settled",
    "amending", "amended",
]  # fmt: skip

#: Where the next wave's files may be there already.
OVERLAPPED = ["ahead", "purging", "purged", "amended"]

#: Where every batch is settled in slices.
SLICED = ["committed", "settled", "amending"]


def start(plan: list[dict[str, object]]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.spark.kill_archive", json.dumps(plan)],
        cwd=ROOT,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def died_by_kill(process: subprocess.Popen[bytes]) -> bool:
    _, errors = process.communicate(timeout=290)
    assert process.returncode == -signal.SIGKILL, errors.decode()[-3000:]
    return True


# Killed with Spark; who runs again may have the other engine.
@pytest.mark.parametrize(
    "again", [None, pytest.param("spark", marks=pytest.mark.matrix)]
)
def test_killed_at_every_step_and_run_again_each_row_is_in_the_lake_once(
    request: pytest.FixtureRequest,
    make_log: Callable[..., Log],
    tmp_path: Path,
    again: str | None,
) -> None:
    engine = None if again is None else request.getfixturevalue(again)
    plan, logs = [], []
    for vendor, steps in (
        ("postgresql", STEPS),
        ("sqlite", ["committed", "settled", "amending"]),
        ("postgresql", OVERLAPPED),
    ):
        for step in steps:
            overlap = steps is OVERLAPPED
            name = f"{vendor}-{step}" + "-overlap" * overlap
            log = make_log(vendor, name)
            log.send_many(250, every=900.0)
            log.send([{"dispatched_at": None}] * 3)
            lake = LakeSpec(f"file://{tmp_path}/{name}")
            logs.append((step, log, lake, hashes_in(log)))
            # The second time where there is one: batches before and after it.
            nth = 2 if step in ("written", "committed", "purging") else 1
            plan.append({"service": log.spec.service, "url": log.spec.url,
                         "lake": lake.uri, "step": step, "nth": nth,
                         "overlap": overlap})  # fmt: skip

    died_by_kill(start(plan))

    for step, log, lake, before in logs:
        expected = set(range(1, 251))
        if step in DIFFERING and 7 in hashes_in(log):
            # Row 7 was made live again while its batch was on the way.
            expected.remove(7)
            before[7] = hashes_in(log)[7]
        archive(engine, log, lake)
        assert_moved_once(before, log, lake, expected)
        idle = archive(engine, log, lake)
        assert (idle.rows, idle.refused) == (0, [])
        assert_moved_once(before, log, lake, expected)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_killed_at_random_many_times_nothing_is_lost_and_nothing_doubled(
    spark, pg_log: Log, tmp_path: Path
) -> None:
    lake = LakeSpec(f"file://{tmp_path}/lake")
    pg_log.send_many(20_000, every=30.0)
    before = hashes_in(pg_log)
    dice = random.Random(20260301)
    kills = 0

    plan = [{"service": "shop", "url": pg_log.spec.url, "lake": lake.uri, "step": "-"}]
    while pg_log.count() and kills < 40:
        process = start(plan)  # type: ignore[arg-type]
        rows = pg_log.count()
        wait_until(
            lambda p=process, r=rows: pg_log.count() < r or p.poll() is not None,
            deadline=120,
        )
        # Within a batch's time: anywhere in the protocol.
        try:
            process.wait(timeout=dice.uniform(0, 1.5))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
        process.communicate()

    archive(spark, pg_log, lake)
    assert kills >= 10
    assert_moved_once(before, pg_log, lake, set(before))
    assert path_of(lake).is_dir()
