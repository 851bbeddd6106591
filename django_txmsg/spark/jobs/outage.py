"""A database or a lake that is away: waits, reports once, and counts."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..spec import hidden

#: Seconds between the first tries, and between the last ones.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0


class Outage:
    """The outage of one resource. `count` is how often there was one."""

    def __init__(self, what: str, say: Callable[[str], None]) -> None:
        self.what, self._say = what, say
        self.count = self.tries = 0
        self.error = ""
        self._since = 0.0

    @property
    def seconds(self) -> float:
        """How long it has been away."""
        return time.monotonic() - self._since if self.tries else 0.0

    @property
    def pause(self) -> float:
        """Seconds until the next try: doubled each time."""
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(10, max(0, self.tries - 1)))

    def failed(self, error: Exception) -> None:
        """Record that a try has failed."""
        known = str(error) or type(error).__name__
        self.error = hidden(known)[:1000]
        if not self.tries:
            self._since = time.monotonic()
            self.count += 1
            self._say(f"{self.what} cannot be used; waiting for it: {self.error}")
        self.tries += 1

    def over(self) -> None:
        """Record that it is back."""
        if self.tries:
            self._say(
                f"{self.what} is back after {self.seconds:,.0f} s, {self.tries} tries."
            )
        self.tries, self.error = 0, ""
