"""When a process last did anything, so that `--once` knows when all is done."""

from __future__ import annotations

import time


class Activity:
    """The time since the last piece of work. Shared by all threads of a process."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def note(self) -> None:
        """Say that something was done."""
        self._last = time.monotonic()

    @property
    def idle(self) -> float:
        """Seconds since."""
        return time.monotonic() - self._last
