"""Runs commands two at a time and prints what each says in one piece.

    scripts/side_by_side.py "COMMAND" "COMMAND" ...

The suite waits more than it computes: two parts of it share two cores well. They are
started, and printed, in the order given, so that the last lines are the last
command's own. Exits with the first code that is not 0.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import BinaryIO

AT_A_TIME = 2


class Job:
    """One command, its output in a file."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the job
        self._process: subprocess.Popen[bytes] | None = None
        self._started = threading.Lock()
        self._given_up = False
        self.ended = threading.Event()

    def run(self) -> int:
        """Run the command to its end."""
        try:
            with self._started:
                if self._given_up:
                    return 1
                self._process = subprocess.Popen(
                    self._command,
                    env=_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=subprocess.STDOUT,
                )
            # Killed by a signal is as a shell tells it.
            code = self._process.wait()
            return 128 - code if code < 0 else code
        finally:
            self.ended.set()

    def follow(self, out: BinaryIO) -> None:
        """Write what it says, as it says it, until it has ended."""
        out.write(f"\n$ {shlex.join(self._command)}\n".encode())
        done, read = False, 0
        while not done:
            done = self.ended.wait(0.5)
            # By position: the file's own is the writing process's.
            while piece := os.pread(self._output.fileno(), 65536, read):
                read += len(piece)
                out.write(piece)
            out.flush()

    def give_up(self) -> None:
        """End it, or never start it."""
        with self._started:
            self._given_up = True
            if self._process is not None:
                self._process.terminate()


def run(commands: Sequence[Sequence[str]]) -> list[int]:
    """Run the commands and return their exit codes."""
    jobs = [Job(command) for command in commands]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        codes = [pool.submit(job.run) for job in jobs]
        try:
            for job in jobs:
                job.follow(sys.stdout.buffer)
        finally:
            for job in jobs:
                job.give_up()
    return [code.result() for code in codes]


def _environment() -> dict[str, str]:
    colours = {"PY_COLORS": "1"} if sys.stdout.isatty() else {}
    return {"PYTHONUNBUFFERED": "1", **os.environ, **colours}


def _stop(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def main(commands: list[str]) -> int:
    """Run shell-like commands side by side."""
    signal.signal(signal.SIGTERM, _stop)
    codes = run([shlex.split(command) for command in commands])
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
