"""The threads that run a connection's completion callbacks.

Hop 4 of a message. Callbacks never run on a thread of a sender or of the connection.
The pool starts a thread on demand, and an idle thread ends. The threads are daemon
threads, so the interpreter can exit.
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
    """Runs tasks on daemon threads. At most ``max_workers`` threads run at the same
    time, not counting threads that wait for other tasks."""

    def __init__(self, max_workers: int = 32, idle_seconds: float = 5.0) -> None:
        """Create a pool without threads. The first task starts a thread."""
        self._max_workers = max_workers
        self._idle_seconds = idle_seconds
        self._tasks: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._idle = 0
        self._workers = 0
        #: Whether tasks wait for a thread that could not be started.
        self.stranded = False

    def submit(self, task: Callable[[], None]) -> None:
        """Queue the task for a thread of the pool."""
        with self._changed:
            self._tasks.append(task)
        self.start_thread()

    def start_thread(self) -> bool:
        """Ensure that a thread runs the next task. Return False if no thread can be
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
        """Run the queued tasks on the calling thread if the pool cannot start a thread.
        Call this before waiting for these tasks."""
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
    """While the block runs, allow the pool one more thread. Used when a callback waits
    for other callbacks, because otherwise all threads might wait for each other."""
    pool: CompletionPool | None = getattr(_this_thread, "pool", None)
    return _NOT_OF_A_POOL if pool is None else pool._lent()


def drain_at_exit(waiters: Callable[[], list[Callable[[float], int]]]) -> None:
    """When the interpreter exits, wait briefly for outstanding sends. Then log the
    number of sends without an outcome.

    ``waiters`` returns one function for each open connection. Each function waits at
    most until a monotonic time, and returns the number of sends without an outcome.
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
