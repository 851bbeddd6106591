"""The loop that stores messages when they are due: recurring messages, and time-outs of
flows. Each kind has one thread in each `relay` process."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import ClassVar

from ..runtime import database_health, liveness
from ..runtime.connections import recycle
from ..runtime.thread_group import ThreadGroup

#: Seconds until the next check of a database that has refused a statement.
AFTER_REFUSAL = 1.0


class TimeLoop(ABC):
    """Stores due messages in the databases `using`, until stopped."""

    #: Longest time, in seconds, between two checks.
    longest_wait: ClassVar[float]
    #: How the log line about a refused statement begins.
    refused: ClassVar[str]

    def __init__(self, using: Sequence[str]) -> None:
        self._using = using
        self._stop = threading.Event()

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether this process has nothing to store in these databases, so that the
        loop needs no thread."""

    @abstractmethod
    def _keep(self, using: str) -> float:
        """Store the messages that are due in a database. Returns the seconds until the
        next check, or 0 if more messages are due. Raises database errors."""

    def stop(self) -> None:
        """Stop the loop after the current transaction. Any thread or signal handler may
        call this."""
        self._stop.set()

    def run(self) -> None:
        """Store due messages until stopped. If the database refuses a statement, try
        again later."""
        while not self._stop.is_set():
            wait = self.longest_wait
            for using in self._using:
                keeping = database_health.retry(using, self.refused)
                left = keeping.run(partial(self._keep, using))
                wait = min(wait, AFTER_REFUSAL if left is None else left)
                recycle()
            liveness.turned(wait)
            self._stop.wait(wait)

    def tick(self) -> None:
        """Store all messages that are due now. Raises database errors."""
        for using in self._using:
            while not self._stop.is_set() and self._keep(using) <= 0:
                pass

    def add_to(self, group: ThreadGroup) -> None:
        """Add a thread that runs this loop to the group, unless the loop is idle."""
        if not self.idle:
            group.add(f"txmsg-{type(self).__name__.lower()}", self.run)


@contextmanager
def keeping_time(loops: Sequence[TimeLoop], stop: Callable[[], None]) -> Iterator[None]:
    """Run the loops while the block runs. If a loop fails, call `stop`, and raise the
    error of the loop."""
    group = ThreadGroup(stop)
    for loop in loops:
        loop.add_to(group)
    group.start()
    try:
        yield
    finally:
        for loop in loops:
            loop.stop()
        group.join()
