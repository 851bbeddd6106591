"""`make demo` shows every step, ends, and leaves no process behind."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.acceptance.shop import PROJECT, environment
from tests.faults import wait_until

# Several processes on slow cores, one after another.
pytestmark = pytest.mark.timeout(300)

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts the demo program with a new database file."""
    started: list[subprocess.Popen[str]] = []

    def start(database: Path = tmp_path / "demo.sqlite3") -> subprocess.Popen[str]:
        with (tmp_path / "said").open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-u", PROJECT / "demo.py", database],
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )
        started.append(process)
        return process

    yield start
    for process in started:
        process.terminate()
        process.wait(60)


def pids(said: str) -> list[int]:
    return [int(one) for one in re.findall(r"process (\d+), alive", said)]


def test_orders_travel_and_one_ends_in_the_dead_letters(
    demo: Start, tmp_path: Path
) -> None:
    code = demo().wait(280)
    said = (tmp_path / "said").read_text()

    assert code == 0, said
    assert len(re.findall(r"Order \w{8}, .*: arrived", said)) == 2
    (dead,) = re.findall(r"Order (\w{8}), .*: in the dead letters", said)
    assert (
        f"dead letter after 3 attempts: payments.stages.GatewayDown: the bank does "
        f"not answer for order {dead}" in said
    )
    hop = r"{}\s+[\d:.]+\s+\+[\d.]+ s\s+\+[\d.]+ s\s+\+[\d.]+ s\s+{}"
    for destination, following in (
        ("payments.charge", "shipping.ship"),
        ("shipping.ship", "orders.shipped"),
        ("orders.shipped", "none"),
    ):
        pattern = hop.format(re.escape(destination), re.escape(following))
        assert len(re.findall(pattern, said)) == 2, pattern
    assert len(re.findall(r"order \w{8}   answered: ", said)) == 2
    assert len(re.findall(r"order \w{8}   failed: .*nobody has approved it", said)) == 1
    undos = re.findall(r"undo \d (\S+): confirmed", said)
    assert undos == ["payments.refund", "shipping.release"]
    assert "payments.charge: 1 dead" in said
    assert "/admin/django_txmsg/" in said
    assert len(pids(said)) == 3
    assert not [pid for pid in pids(said) if psutil.pid_exists(pid)]


def test_a_failed_demo_prints_its_error(demo: Start, tmp_path: Path) -> None:
    code = demo(tmp_path / "no" / "such" / "directory" / "demo.sqlite3").wait(60)
    said = (tmp_path / "said").read_text()

    assert code == 1
    assert "The demonstration failed: manage.py migrate" in said
    assert "unable to open database file" in said


@pytest.mark.matrix
def test_stopped_half_way_it_leaves_no_process_behind(
    demo: Start, tmp_path: Path
) -> None:
    process = demo()
    said = tmp_path / "said"
    wait_until(
        lambda: len(pids(said.read_text())) == 3, deadline=90, message=said.read_text
    )

    process.terminate()

    assert process.wait(60) == 1
    assert "it was asked to stop" in said.read_text()
    assert not [pid for pid in pids(said.read_text()) if psutil.pid_exists(pid)]
