"""The threads of a process: groups that end together, and threads that watch objects.

If a thread of a group fails, the process stops as after a signal, and ends with the
thread's error. Otherwise the process would go on sending heartbeats without this
thread, and no supervisor would restart the process.

A `Watch` does something for objects when these are due: it renews leases, ends handlers
that run too long, sends heartbeats and notifications, or dispatches messages after
their commit.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from django.db import connections

from ..errors import WorkerFailed
from . import liveness

log = logging.getLogger("django_txmsg.threads")


def start_daemon(
    name: str, work: Callable[..., object], *args: object
) -> threading.Thread:
    """Start a daemon thread that runs `work(*args)`, and return it. Raises RuntimeError
    if no thread can be started, for example because the process is exiting."""
    thread = threading.Thread(target=work, args=args, name=name, daemon=True)
    thread.start()
    return thread


class ThreadGroup:
    """Threads that start together, and end together when `stop` is called."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._threads: list[threading.Thread] = []
        self._errors: list[tuple[str, BaseException]] = []

    def add(self, name: str, work: Callable[[], None]) -> threading.Thread:
        """Add a thread of this name that runs `work`. Returns the thread; `start()`
        starts it."""
        thread = threading.Thread(
            target=self._run, args=(name, work), name=name, daemon=True
        )
        self._threads.append(thread)
        return thread

    def start(self) -> None:
        """Start all threads that were added."""
        for thread in self._threads:
            thread.start()

    def join(self, between: Callable[[], object] = lambda: None) -> None:
        """Wait until all threads have ended, and call `between` several times a second
        meanwhile. If threads failed, raises the error of the thread that failed
        first."""
        for thread in self._threads:
            # With a timed join the main thread can handle its signals.
            while thread.is_alive():
                liveness.turned()
                between()
                thread.join(0.2)
        if self._errors:
            name, error = self._errors[0]
            if isinstance(error, Exception):
                raise error
            raise WorkerFailed(f"Thread {name} ended by {error!r}.") from error

    def _run(self, name: str, work: Callable[[], None]) -> None:
        liveness.begin(name)
        try:
            work()
        except BaseException as error:
            self._errors.append((name, error))
            # First, because the log may fail too: logrotate may have left a file that
            # cannot be opened.
            self._stop()
            log.error("thread %s ended, and its process with it: %r", name, error)
        finally:
            liveness.ended()
            connections.close_all()


#: Seconds without an object after which a thread ends.
IDLE = 60.0


class Due(Protocol):
    """An object that is due at an instant of `time.monotonic()`."""

    due: float


Watched = TypeVar("Watched", bound=Due)


class Watch(Generic[Watched]):
    """A thread that calls `act` with the objects that are due.

    `act` must not raise, and must make each of the objects due later, or remove it. The
    thread ends, with its connections, when there has been no object for a while. If it
    cannot be started, as at the end of a process, `refused` is called with the error.
    The objects are not kept alive.
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
        self._thread: threading.Thread | None = None
        self._ending = False

    def add(self, one: Watched) -> None:
        """Watch an object."""
        with self.changed:
            running = self._thread is not None
            if not running:
                try:
                    self._thread = start_daemon(self._name, self._run)
                except RuntimeError as error:
                    self._refused(error)
            self.watched.add(one)
            if running and one.due < self._wakes:
                self.changed.notify()

    def remove(self, one: Watched) -> None:
        """Stop watching an object."""
        with self.changed:
            self.watched.discard(one)

    def stop(self, timeout: float) -> None:
        """End the thread when no object is left. Waits for at most `timeout`
        seconds."""
        with self.changed:
            thread = self._thread
            if thread is None:
                return
            self._ending = True
            self.changed.notify()
        thread.join(timeout)

    def _run(self) -> None:
        with self.changed:
            if self._thread not in (None, threading.current_thread()):
                return
            # A signal handler that raises may have interrupted `add()`.
            self._thread = threading.current_thread()
        try:
            while (due := self._wait()) is not None:
                self._act(due)
                # Otherwise, the objects would be kept alive until the next are due.
                del due
        finally:
            with self.changed:
                if self._thread is threading.current_thread():  # `act` has failed
                    self._thread, self._ending = None, False
            connections.close_all()

    def _wait(self) -> list[Watched] | None:
        """Return the objects that are due, or None if the thread must end."""
        with self.changed:
            while True:
                now = time.monotonic()
                due = [one for one in self.watched if one.due <= now]
                if due:
                    return due
                if self.watched or not self._ending:
                    wakes = [one.due for one in self.watched]
                    self._wakes = min(wakes, default=now + IDLE)
                    if self.changed.wait(self._wakes - now) or self.watched:
                        continue
                self._thread, self._ending = None, False
                return None
