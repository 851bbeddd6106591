"""Real faults: processes killed, connections cut; and waiting without sleep.

`manage()` starts `manage.py` commands as processes on the test's database. A test stops
them with SIGTERM or kills them with SIGKILL. A hook in the process can stop it at the
exact step at which it is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
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
    """Return the condition's first true value; fail the test at the deadline.

    `message` describes the condition; if it is a function, it is called only at the
    deadline.
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


def hang_here(line: str) -> NoReturn:
    """Print `line` and wait for ever. The test waits for the line, and then kills this
    process."""
    print(line, flush=True)  # noqa: T201 - the test reads it from our standard output
    while True:
        threading.Event().wait()


class ManageProcess:
    """A running `manage.py` command. When the `with` block is left, it is killed."""

    def __init__(
        self,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        txmsg: Mapping[str, Any] | None = None,
        hook: str | None = None,
    ) -> None:
        """Start the command.

        `txmsg` is merged over `settings.TXMSG` of the process. `hook` is the dotted
        path of a function called there when the apps are ready: it may connect
        receivers to signals, or replace a function by another one that calls
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
        """Everything it has written so far, on both streams."""
        with self._changed:
            return "\n".join(self._lines)

    def wait_for_line(self, pattern: str, *, deadline: float = 60.0) -> str:
        """Return the first line in which `pattern` is found."""
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
        """Wait for the end, check that the exit code is 0, and return the output."""
        code = self.wait(deadline=deadline)
        if code != 0:
            raise AssertionError(f"{self}: exit code {code}:\n{self.output}")
        return self.output

    def terminate(self) -> None:
        """Send SIGTERM, after which the process drains and exits."""
        self.process.send_signal(signal.SIGTERM)

    def interrupt(self) -> None:
        """Send SIGINT, like Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process has ended."""
        self.process.kill()
        self.process.wait(30)

    def pause(self) -> None:
        """Send SIGSTOP, which stops the process, while its lease goes on."""
        self.process.pause()

    def resume(self) -> None:
        """Send SIGCONT, after `pause()`."""
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill the process, if it runs, and its children."""
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
