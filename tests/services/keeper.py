"""Cleans up after a test process that was killed.

The keeper is a separate process that reads from a pipe. The pipe closes when the test
process ends, even by SIGKILL. Then the keeper kills all process groups and removes all
directories that the test process has registered.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

GRACE = 10.0


class Keeper:
    """The test process's side of the pipe. The first command starts the keeper."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def watch(self, group: int, stop_signal: int) -> None:
        """Name a process group that the keeper must end when the test process has
        ended."""
        self._tell(f"watch {group} {stop_signal}")

    def forget(self, group: int) -> None:
        """Tell the keeper that this process group has ended. Otherwise the keeper could
        kill another group that gets the same id later."""
        self._tell(f"forget {group} 0")

    def remove(self, directory: Path) -> None:
        """Name a directory that the keeper must remove when the test process has
        ended."""
        self._tell(f"remove 0 {directory}")

    def _tell(self, line: str) -> None:
        if self._process is None:
            # A session of its own: Ctrl-C and a dying terminal do not reach it.
            self._process = subprocess.Popen(
                [sys.executable, "-I", __file__],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
            atexit.register(self._close)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()

    def _close(self) -> None:
        """Close the pipe, and wait until the keeper has cleaned up."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


KEEPER = Keeper()


def keep(lines: list[str]) -> None:
    """Read commands, each with the name of a process group or a directory. At the end,
    kill these process groups and remove these directories."""
    groups: dict[int, int] = {}
    directories: list[str] = []
    for line in lines:
        verb, group, rest = line.rstrip("\n").split(" ", 2)
        if verb == "watch":
            groups[int(group)] = int(rest)
        elif verb == "forget":
            groups.pop(int(group), None)
        else:
            directories.append(rest)
    for group, stop_signal in groups.items():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, stop_signal)
    pause = threading.Event()
    for _ in range(int(GRACE / 0.1)):
        if not any(_alive(group) for group in groups):
            break
        pause.wait(0.1)
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    for directory in directories:
        if os.path.ismount(directory):
            subprocess.run(["umount", "--lazy", directory], check=False)
        shutil.rmtree(directory, ignore_errors=True)


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    keep(sys.stdin.readlines())
