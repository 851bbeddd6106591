"""When a process last did anything: `--once` knows by it that all is done, and one that
hears of its work looks for it less often."""

from __future__ import annotations

import time

#: Seconds without work after which a process that listens looks only so often for
#: redeliveries that are due, and for what an operator asks for, of which it hears.
CALM, SELDOM, RARELY = 60.0, 10.0, 30.0


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

    @property
    def calm(self) -> bool:
        """Whether there has been no work for long enough to look for it less often."""
        return self.idle > CALM
