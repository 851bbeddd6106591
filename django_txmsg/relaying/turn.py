"""Between hops 3 and 4: lanes of one process take turns at their database.

Without turns they fall into step, all at the database and then all at the broker, and
each of the two is idle while the lanes use the other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: Seconds that a lane waits for its turn: a statement that waits for another session's
#: lock must not hold up the other lanes.
LONGEST = 0.1


class Turn:
    """Shared by lanes: that many claim or mark a batch at a time, and twice as many
    while the broker is idle."""

    def __init__(self, places: int = 1) -> None:
        self._places = places
        self._at_database = self._at_broker = 0
        self._changed = threading.Condition()

    @contextmanager
    def at_database(self) -> Iterator[None]:
        """Wait for a turn, for at most LONGEST seconds; then go on without it."""
        with self._changed:
            self._changed.wait_for(self._is_free, LONGEST)
            self._at_database += 1
        try:
            yield
        finally:
            with self._changed:
                self._at_database -= 1
                self._changed.notify()

    @contextmanager
    def at_broker(self) -> Iterator[None]:
        """Record that the broker has something to do."""
        with self._changed:
            self._at_broker += 1
        try:
            yield
        finally:
            with self._changed:
                self._at_broker -= 1
                self._changed.notify_all()

    def _is_free(self) -> bool:
        places = self._places if self._at_broker else 2 * self._places
        return self._at_database < places
