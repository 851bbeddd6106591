"""The threads of one process, which all end together.

If a thread fails, the process stops as after a signal, and ends with the thread's
error. Otherwise the process would go on sending heartbeats without this thread, and no
supervisor would restart the process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

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

    def join(self) -> None:
        """Wait until all threads have ended. If threads failed, raises the error of the
        thread that failed first."""
        for thread in self._threads:
            # With a timed join the main thread can handle its signals.
            while thread.is_alive():
                liveness.turned()
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
