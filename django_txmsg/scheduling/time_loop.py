"""The loops that do periodic work in databases: they store recurring messages and the
time-outs of flows, raise alerts, count for the charts, execute bulk operations, and
prune. A process runs each of its loops in one thread for each database. So a database
that does not answer does not delay the other databases."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import ClassVar

from django.db import Error as AnyDatabaseError

from ..runtime import database_health, liveness
from ..runtime.connections import KEPT_WHILE_BUSY, recycle
from ..runtime.thread_group import ThreadGroup

#: Seconds until most loops check a database again that has refused a statement.
AFTER_REFUSAL = 1.0


class TimeLoop(ABC):
    """Does what is due in the databases `using`, until stopped."""

    #: How the log line about a refused statement begins.
    refused: ClassVar[str]
    #: The errors after which the loop tries again. Other errors end it.
    survives: ClassVar[type[Exception]] = AnyDatabaseError

    def __init__(self, using: Sequence[str]) -> None:
        self.using = using
        self._stop = threading.Event()

    def is_idle(self, using: str) -> bool:
        """Return whether this process never has anything to do in a database. The loop
        then needs no thread for the database."""
        return False

    def first(self) -> float:
        """Return the seconds until the first check. A loop that is in no hurry waits as
        long after a refused statement."""
        return 0.0

    @abstractmethod
    def _keep(self, using: str) -> float:
        """Do what is due in one database. Returns the seconds until the next check, or
        0 if more is due. Raises database errors."""

    def stop(self) -> None:
        """Stop the loop after the current transaction. Any thread or signal handler may
        call this."""
        self._stop.set()

    def run(self, using: str) -> None:
        """Do the work of one database when it is due, until `stop()` is called. If the
        database refuses a statement, try again after a pause."""
        keeping = database_health.retry(using, f"{self.refused} in database {using!r}")
        wait = self.first()
        liveness.turned(wait)
        while not self._stop.wait(wait):
            left = keeping.run(partial(self._keep, using), self.survives)
            wait = (self.first() or AFTER_REFUSAL) if left is None else left
            recycle(idle=wait > KEPT_WHILE_BUSY)
            liveness.turned(wait)

    def tick(self, *using: str) -> None:
        """Do everything that is due now in these databases, by default in all. Raises
        database errors."""
        for alias in using or self.using:
            while not self._stop.is_set() and self._keep(alias) <= 0:
                pass

    def add_to(self, group: ThreadGroup) -> None:
        """Add a thread for each database to the group, except for idle databases."""
        for using in self.using:
            if not self.is_idle(using):
                name = f"txmsg-{type(self).__name__.lower()}-{using}"
                group.add(name, partial(self.run, using))


@contextmanager
def ticked(loops: Sequence[TimeLoop]) -> Iterator[None]:
    """Call `tick()` for each database of each loop, and then run the block. If
    databases raise errors, still run the block, and then raise the first of these
    errors."""
    errors: list[AnyDatabaseError] = []
    for loop, using in [(one, using) for one in loops for using in one.using]:
        try:
            loop.tick(using)
        except AnyDatabaseError as error:
            errors.append(error)
    yield
    if errors:
        raise errors[0]


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
