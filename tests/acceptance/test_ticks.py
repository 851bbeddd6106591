"""Processes that store a recurring message are killed at random. The message is still
stored exactly once per tick."""

from __future__ import annotations

import datetime as dt
import random
import subprocess
import sys

import pytest

from django_txmsg.models import OutboxMessage, Schedule
from tests.acceptance.ticking import NOON
from tests.faults import ROOT
from tests.running import committing


@committing
@pytest.mark.parametrize(
    ("processes", "ticks"),
    [
        (4, 30),
        pytest.param(
            10, 1000, marks=[pytest.mark.soak, pytest.mark.timeout(900)], id="soak"
        ),
    ],
)
def test_each_tick_is_stored_once_despite_kills(processes: int, ticks: int) -> None:
    seed = random.randrange(1_000_000)
    play = [sys.executable, "-m", "tests.acceptance.ticking"]
    arguments = [str(number) for number in (processes, ticks, seed)]
    done = subprocess.run(
        [*play, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    killed, until = done.stdout.split()[-2:]

    passed = dt.datetime.fromisoformat(until) - NOON
    due = [
        (NOON + dt.timedelta(minutes=number + 1)).isoformat()
        for number in range(passed // dt.timedelta(minutes=1))
    ]
    rows = OutboxMessage.objects.order_by("id")
    stored = [row.headers["scheduled-for"] for row in rows]
    assert len(due) >= ticks
    assert int(killed) >= processes
    assert stored == due, f"seed {seed}"
    assert Schedule.objects.get().last_tick.isoformat() == due[-1]
