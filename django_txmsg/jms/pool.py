"""The threads that run completion callbacks, shared by all connections.

Hop 4 of a message. They are neither the sender's threads nor a connection's, they
come on demand and leave when idle, and they do not keep the interpreter from ending.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

logger = logging.getLogger("django_txmsg.jms.pool")

#: Seconds a process that ends gives its outstanding sends.
EXIT_BUDGET = 2.0


class CompletionPool:
    """Runs tasks on daemon threads, never more of them than ``max_workers``."""

    def __init__(self, max_workers: int = 32, idle_seconds: float = 5.0) -> None:
        """Own no thread until there is a task."""
        self._max_workers = max_workers
        self._idle_seconds = idle_seconds
        self._tasks: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._idle = 0
        self._workers = 0
        self._stranded = False

    def submit(self, task: Callable[[], None]) -> None:
        """Run the task on a pool thread, soon."""
        with self._changed:
            self._tasks.append(task)
            if self._idle >= len(self._tasks):
                self._changed.notify()
                return
            if self._workers >= self._max_workers:
                return
            self._workers += 1
        name = "jms-completion"
        try:
            threading.Thread(target=self._work, name=name, daemon=True).start()
        except RuntimeError:  # the interpreter is ending and gives no new threads
            with self._changed:
                self._workers -= 1
                self._stranded = True

    def help_out(self) -> None:
        """Run what no thread could be started for, on the thread that waits for it."""
        while self._stranded:
            with self._changed:
                if not self._tasks:
                    return
                task = self._tasks.popleft()
            task()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                found = self._changed.wait_for(lambda: self._tasks, self._idle_seconds)
                self._idle -= 1
                if not found:
                    self._workers -= 1
                    return
                task = self._tasks.popleft()
            try:
                task()
            except BaseException:
                logger.exception("A completion task ended with an error.")


_pool = CompletionPool()


def submit(task: Callable[[], None]) -> None:
    """Run the task on the process's pool."""
    _pool.submit(task)


def help_out() -> None:
    """Run what the process's pool got no thread for as the interpreter ends."""
    _pool.help_out()


def _renew() -> None:
    """Start anew in a forked child, where the parent's threads do not exist."""
    global _pool
    _pool = CompletionPool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


def drain_at_exit(waiters: Callable[[], list[Callable[[float], int]]]) -> None:
    """At interpreter exit give outstanding sends a short while, then say what is left.

    ``waiters`` lists, for each open connection, a function that waits until a moment
    and returns how many sends stay without an outcome.
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
