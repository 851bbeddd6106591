"""Runs a job until a signal stops it, even if a server does not answer."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

#: Seconds that a stopped job waits for servers that do not answer.
PATIENCE = 20.0


def run_until_stopped(
    work: Callable[[], None], stop: threading.Event, last: Callable[[], None]
) -> None:
    """Run `work` until it returns. The first SIGTERM or SIGINT sets `stop`, the second
    ends the process. If a server does not answer within PATIENCE seconds after `stop`,
    `last` is called, and the process exits with code 0.

    `work` runs in a separate thread, so that signals are handled while it waits for a
    server. Outside the main thread, this function handles no signals: the caller must
    set `stop`.
    """
    if threading.current_thread() is not threading.main_thread():
        work()
        return

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    before = {
        one: signal.signal(one, handle) for one in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="txmsg-follow")
        done = pool.submit(work)
        while not done.done() and not stop.is_set():
            wait([done], timeout=0.2)
        _end(done, last)
        pool.shutdown()
        done.result()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(done: Future[None], last: Callable[[], None]) -> None:
    wait([done], timeout=PATIENCE)
    if not done.done():
        last()
        sys.stderr.write(f"follow: stopped without an answer after {PATIENCE:g} s.\n")
        os._exit(0)
