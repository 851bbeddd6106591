"""When a process last did anything. `--once` ends by it, and a process that receives
notifications polls less often."""

from __future__ import annotations

import time

#: Seconds without work after which a listening process polls only this often for due
#: redeliveries and operators' requests, since it is notified of them.
CALM, SELDOM, RARELY = 60.0, 10.0, 30.0


class Activity:
    """The time since the last piece of work. Shared by all threads of a process."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def note(self) -> None:
        """Record that something was done."""
        self._last = time.monotonic()

    @property
    def idle(self) -> float:
        """Seconds since the last work."""
        return time.monotonic() - self._last

    @property
    def calm(self) -> bool:
        """Whether there has been no work for long enough to poll less often."""
        return self.idle > CALM
