"""Real faults (killed processes and cut connections), and waiting without sleep.

`manage()` starts `manage.py` commands as processes on the test's database. A test stops
these processes with SIGTERM or kills them with SIGKILL. To be killed at an exact step,
a process can have a hook that makes it wait at that step.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from . import starter
from .proxy import ANSWERS, BOTH, REQUESTS, Proxy
from .services.keeper import KEEPER

__all__ = [
    "ANSWERS",
    "BOTH",
    "REQUESTS",
    "ManageProcess",
    "Proxy",
    "broken_log",
    "hang_here",
    "wait_until",
]

ROOT = Path(__file__).resolve().parent.parent

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T],
    *,
    deadline: float = 30.0,
    interval: float = 0.05,
    message: str | Callable[[], str] = "",
) -> T:
    """Call `condition` until it returns a true value, and return that value. Fail the
    test at the deadline.

    `message` describes the condition. If `message` is a function, it is called only at
    the deadline.
    """
    end = time.monotonic() + deadline
    pause = threading.Event()
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            said = message() if callable(message) else message
            raise AssertionError(f"not within {deadline:g} s: {said or condition}")
        pause.wait(interval)


@contextlib.contextmanager
def broken_log(name: str) -> Iterator[None]:
    """While the block runs, each line of this logger raises: the log's file cannot be
    opened, as after a logrotate that has changed its owner."""
    handler = logging.FileHandler("/no such directory/log", delay=True)
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel("INFO")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def hang_here(line: str) -> NoReturn:
    """Print `line` and wait for ever. The test waits for the line, and then kills this
    process."""
    print(line, flush=True)  # noqa: T201 - the test reads it from our standard output
    while True:
        threading.Event().wait()


class ManageProcess:
    """A running `manage.py` command. At the end of the `with` block it is killed."""

    def __init__(
        self,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        txmsg: Mapping[str, Any] | None = None,
        hook: str | None = None,
    ) -> None:
        """Start the command.

        `txmsg` is merged over the process's `settings.TXMSG`. `hook` is the dotted path
        of a function that the process calls when its apps are ready. The hook may
        connect receivers to signals, or replace a function by one that calls
        `hang_here`.
        """
        self.arguments = arguments
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        self.process = starter.start(
            arguments,
            {
                **os.environ,
                "TXMSG_TEST_HOOK": hook or "",
                "TXMSG_TEST_SETTINGS": json.dumps(txmsg or {}),
                **(env or {}),
            },
        )
        KEEPER.watch(self.process.pid, signal.SIGKILL)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> ManageProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    @property
    def running(self) -> bool:
        """Whether the process exists."""
        return self.process.poll() is None

    @property
    def output(self) -> str:
        """Everything that the process has written so far, to stdout and stderr."""
        with self._changed:
            return "\n".join(self._lines)

    def wait_for_line(self, pattern: str, *, deadline: float = 60.0) -> str:
        """Wait for a line that matches `pattern`, and return the first one. Raises
        AssertionError at the deadline, or if the process ends before."""
        regex = re.compile(pattern)

        def found() -> str | None:
            return next((line for line in self._lines if regex.search(line)), None)

        with self._changed:
            self._changed.wait_for(lambda: found() or self._ended, timeout=deadline)
            line = found()
            if line is not None:
                return line
            why = "it ended" if self._ended else f"not within {deadline:g} s"
        raise AssertionError(f"{self}: no line like {pattern!r}, {why}:\n{self.output}")

    def wait(self, *, deadline: float = 60.0) -> int:
        """Wait for the process to exit, and return its exit code."""
        try:
            code = self.process.wait(deadline)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self}: still running after {deadline:g} s:\n{self.output}"
            ) from None
        self._reader.join(10)
        return code

    def succeed(self, *, deadline: float = 60.0) -> str:
        """Wait until the process exits, check that its exit code is 0, and return its
        output."""
        code = self.wait(deadline=deadline)
        if code != 0:
            raise AssertionError(f"{self}: exit code {code}:\n{self.output}")
        return self.output

    def terminate(self) -> None:
        """Send SIGTERM. The process then drains and exits."""
        self.process.send_signal(signal.SIGTERM)

    def interrupt(self) -> None:
        """Send SIGINT, like Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process has ended."""
        self.process.kill()
        self.process.wait(30)

    def pause(self) -> None:
        """Suspend the process with SIGSTOP. Its leases run out meanwhile."""
        self.process.pause()

    def resume(self) -> None:
        """Send SIGCONT, after `pause()`."""
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill the process and its children, if they are running."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait(30)
        KEEPER.forget(self.pid)
        self._reader.join(10)

    def _read(self) -> None:
        with self.process.stdout as stream:
            for line in stream:
                with self._changed:
                    self._lines.append(line.rstrip("\n"))
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def __str__(self) -> str:
        return f"manage.py {' '.join(self.arguments)} (process {self.pid})"
