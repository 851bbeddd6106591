"""Objects that belong to one process, and that a forked child does not inherit.

The parent's threads, sockets and locks do not work in a child, so the child creates new
objects.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

Made = TypeVar("Made")


class PerProcess(Generic[Made]):
    """The objects of this process, by key. `make(*key)` creates the object of a key at
    its first use."""

    def __init__(self, make: Callable[..., Made]) -> None:
        self._make = make
        self._made: dict[tuple[str, ...], Made] = {}
        self._lock = threading.Lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def __call__(self, *key: str) -> Made:
        """Return this process's object for a key."""
        with self._lock:
            if key not in self._made:
                self._made[key] = self._make(*key)
            return self._made[key]

    def all(self) -> list[Made]:
        """Return the existing objects."""
        with self._lock:
            return list(self._made.values())

    def clear(self) -> list[Made]:
        """Remove all objects, and return them."""
        with self._lock:
            cleared = list(self._made.values())
            self._made = {}
        return cleared

    def _forget(self) -> None:
        self._made, self._lock = {}, threading.Lock()


class Members(Generic[Made]):
    """A thread-safe set of weak references, which do not keep the objects alive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: weakref.WeakSet[Made] = weakref.WeakSet()

    def add(self, member: Made) -> None:
        """Add an object."""
        with self._lock:
            self._known.add(member)

    def discard(self, member: Made) -> None:
        """Remove an object."""
        with self._lock:
            self._known.discard(member)

    def all(self) -> list[Made]:
        """Return the objects that are still in use."""
        with self._lock:
            return list(self._known)


def at_childs_end(work: Callable[[], object], *, turn: int) -> None:
    """Run `work` at the end of this process if it is a child of `multiprocessing`,
    because such a child runs no `atexit` handlers. In other processes, do nothing.
    Functions with a higher `turn` run earlier.

    Call this in the child: the child does not run functions that its parent registered.
    """
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        from multiprocessing.util import Finalize

        Finalize(None, work, exitpriority=turn)
