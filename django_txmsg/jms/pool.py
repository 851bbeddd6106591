"""The threads that run a connection's completion callbacks.

Hop 4 of a message. They are neither the sender's threads nor the connection's own. They
start on demand, end when idle, and do not keep the interpreter from exiting.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

logger = logging.getLogger("django_txmsg.jms.pool")

#: Seconds that an exiting process gives its outstanding sends.
EXIT_BUDGET = 2.0
_this_thread = threading.local()
_NOT_OF_A_POOL = contextlib.nullcontext()


class CompletionPool:
    """Runs tasks on daemon threads. There are at most ``max_workers``, without those
    that wait for other tasks."""

    def __init__(self, max_workers: int = 32, idle_seconds: float = 5.0) -> None:
        """Start no thread until there is a task."""
        self._max_workers = max_workers
        self._idle_seconds = idle_seconds
        self._tasks: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._idle = 0
        self._workers = 0
        #: Whether tasks wait for a thread that could not be started.
        self.stranded = False

    def submit(self, task: Callable[[], None]) -> None:
        """Run the task on a thread of the pool, soon."""
        with self._changed:
            self._tasks.append(task)
        self.start_thread()

    def start_thread(self) -> bool:
        """Ensure that a thread takes the first task; return False if none can be
        started."""
        with self._changed:
            if self._idle >= len(self._tasks):
                self.stranded = False
                self._changed.notify()
                return True
            if self._workers >= self._max_workers:
                return True
            self._workers += 1
        try:
            threading.Thread(
                target=self._work, name="jms-completion", daemon=True
            ).start()
        except RuntimeError:  # the interpreter ends, or the system has no more threads
            with self._changed:
                self._workers -= 1
                self.stranded = True
                return False
        with self._changed:
            self.stranded = False
            return True

    def help_out(self) -> None:
        """Run tasks on this thread, which waits for them, if no other thread can be
        started."""
        while self.stranded and not self.start_thread():
            with self._changed:
                if not self._tasks:
                    self.stranded = False
                    return
                task = self._tasks.popleft()
            task()

    def _work(self) -> None:
        _this_thread.pool = self
        while True:
            with self._changed:
                self._idle += 1
                found = self._changed.wait_for(lambda: self._tasks, self._idle_seconds)
                self._idle -= 1
                if not found or self._workers > self._max_workers:
                    self._workers -= 1
                    self._changed.notify()  # another one takes what this one left
                    return
                task = self._tasks.popleft()
            try:
                task()
            except BaseException:
                logger.exception("A completion task ended with an error.")

    def _lend(self, threads: int) -> None:
        with self._changed:
            self._max_workers += threads
        if threads > 0:
            self.start_thread()

    @contextlib.contextmanager
    def _lent(self) -> Iterator[None]:
        self._lend(1)
        try:
            yield
        finally:
            self._lend(-1)


def waiting() -> contextlib.AbstractContextManager[None]:
    """Let another thread replace this one while its callback waits for other callbacks.
    Otherwise all threads might wait for each other."""
    pool: CompletionPool | None = getattr(_this_thread, "pool", None)
    return _NOT_OF_A_POOL if pool is None else pool._lent()


def drain_at_exit(waiters: Callable[[], list[Callable[[float], int]]]) -> None:
    """At the interpreter's exit, give outstanding sends a short time, then log how many
    remain.

    ``waiters`` has a function for each open connection. It waits until a moment and
    returns how many sends remain without an outcome.
    """

    def drain() -> None:
        give_up = time.monotonic() + EXIT_BUDGET
        left = sum(wait(give_up) for wait in waiters())
        if left:
            logger.warning(
                "%d asynchronous sends had no outcome when the process ended; close "
                "the connection before exit to wait for them.",
                left,
            )

    atexit.register(drain)
