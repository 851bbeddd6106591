"""The program that runs the parts of the suite side by side, two at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.faults import ROOT, wait_until

PROGRAM = [sys.executable, str(ROOT / "scripts" / "side_by_side.py")]


def test_each_output_is_in_one_piece_in_the_order_given(
    tmp_path: Path,
) -> None:
    os.mkfifo(tmp_path / "fifo")
    said = subprocess.run(
        # The first ends only after the second, so they run at one time.
        [
            *PROGRAM,
            "sh -c 'echo one; read line < fifo; echo $line'",
            "sh -c 'echo two > fifo; echo three'",
            "echo four",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )

    lines = [line for line in said.stdout.splitlines() if line and line[0] != "$"]
    assert lines == ["one", "two", "three", "four"]
    assert said.returncode == 0


def test_the_first_code_that_is_no_success_is_its_own(tmp_path: Path) -> None:
    last = tmp_path / "last"
    done = subprocess.run(
        [*PROGRAM, "true", "sh -c 'exit 3'", "sh -c 'kill -9 $$'", f"touch {last}"],
        capture_output=True,
        timeout=60,
    )

    assert done.returncode == 3
    assert last.exists()  # the others were run all the same


def test_a_stop_ends_what_it_has_started_and_starts_no_more(tmp_path: Path) -> None:
    first, last = tmp_path / "first", tmp_path / "last"
    hangs = f"sh -c 'echo $$ > {first}; exec sleep 600'"
    process = subprocess.Popen(
        [*PROGRAM, hangs, "sleep 601", f"touch {last}"], stdout=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: first.exists() and first.read_text())
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
    finally:
        process.kill()
    assert not psutil.pid_exists(int(first.read_text()))
    assert not last.exists()
