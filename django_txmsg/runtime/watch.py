"""Threads that do something for objects when these are due: they renew leases, end
handlers that run too long, and send heartbeats."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from .thread_group import start_daemon

#: Seconds without an object after which a thread ends.
IDLE = 60.0


class Due(Protocol):
    """An object that is due at an instant of `time.monotonic()`."""

    due: float


Watched = TypeVar("Watched", bound=Due)


class Watch(Generic[Watched]):
    """A thread that calls `act` with the objects that are due.

    `act` must not raise, and must make each of the objects due later. The thread ends
    when there has been no object for a while. If it cannot be started, as at the end of
    a process, `refused` is called with the error. The objects are not kept alive.
    """

    def __init__(
        self,
        name: str,
        act: Callable[[list[Watched]], None],
        refused: Callable[[RuntimeError], None],
    ) -> None:
        self._name, self._act, self._refused = name, act, refused
        #: Held while an object is added or removed, or becomes due earlier.
        self.changed = threading.Condition()
        self.watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._wakes = math.inf
        self._running = False

    def add(self, one: Watched) -> None:
        """Watch an object."""
        with self.changed:
            running = self._running
            if not running:
                try:
                    start_daemon(self._name, self._run)
                except RuntimeError as error:
                    self._refused(error)
                else:
                    self._running = True
            self.watched.add(one)
            if running and one.due < self._wakes:
                self.changed.notify()

    def remove(self, one: Watched) -> None:
        """Stop watching an object."""
        with self.changed:
            self.watched.discard(one)

    def _run(self) -> None:
        while True:
            due = self._wait()
            if due is None:
                return
            self._act(due)
            # Otherwise, the objects would be kept alive until the next are due.
            del due

    def _wait(self) -> list[Watched] | None:
        """Return the objects that are due, or None if the thread must end."""
        with self.changed:
            now = time.monotonic()
            due = [one for one in self.watched if one.due <= now]
            if due:
                return due
            self._wakes = min((one.due for one in self.watched), default=now + IDLE)
            notified = self.changed.wait(self._wakes - now)
            if not notified and not self.watched:
                self._running = False
                return None
            return []
