"""Signals, heartbeats and memory of a process that runs a long-running command.

After a signal, the process finishes the messages in progress and ends. A handler may
take as long as it needs. Once no handler is running, the process has `PATIENCE` seconds
to end. If the process has not ended by then, it must be waiting for a server that does
not answer. So it exits immediately, and other processes take over its unfinished
messages.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from django.db import router

from ...models import Worker
from ...monitoring.presence import Presence
from ...relaying.relay import Relay
from ...runtime import liveness
from ...runtime.connections import LARGE
from ...runtime.thread_group import start_daemon
from ...sending.scope import handlers_running
from ..terminal import say
from . import _supervisor

#: Seconds that a stopping process waits for servers, once no handler is running.
PATIENCE = 15.0
#: The parameter of glibc's mallopt(): the size from which a block of memory is the
#: system's again as soon as it is freed.
M_MMAP_THRESHOLD = -3
SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stop_on_signals(stop: Callable[[], None], stderr: Any) -> Iterator[None]:
    """On the first SIGTERM or SIGINT, call `stop` in another thread. On the second, end
    the process. A child process obeys only SIGTERM, and ends with its parent."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals: Sequence[signal.Signals] = SIGNALS
    if _supervisor.is_child():
        # A terminal sends Ctrl-C and its hang-up to all: the parent decides for them.
        signals = [signal.SIGTERM]
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with _supervisor.signals_read(signals) as reading:
        # A main thread that waits in C, for a database or a name server, runs no signal
        # handler. This thread ends with the block, which closes the socket's other end.
        start_daemon("txmsg-signals", _obey, reading.dup(), signals, stop, stderr)
        yield


def _obey(
    reading: socket.socket,
    signals: Collection[int],
    stop: Callable[[], None],
    stderr: Any,
) -> None:
    """Call `stop` on the first signal, or when the parent has ended. Exit on the second
    signal. Also exit if the process has not ended `PATIENCE` seconds after the end of
    its last handler, because the process then waits for a server that does not
    answer."""
    sources = [reading.fileno(), *_supervisor.parent_pipe()]
    pause: float | None = None  # until it stops
    seen, since = 0, 0.0
    with reading:
        while True:
            ready = select.select(sources, [], [], pause)[0]
            numbers: list[int] = []
            if reading.fileno() in ready:
                read = reading.recv(64)
                if not read:
                    return  # the block has ended
                numbers = [number for number in read if number in signals]
                seen += len(numbers)
                if seen > 1:
                    os._exit(128 + numbers[-1])
            if pause is None:
                if not numbers and ready == sources[:1]:
                    continue  # a signal of somebody else
                pause, sources = 0.2, sources[:1]
                liveness.stopping()
                stop()
                since = time.monotonic()
            if numbers:
                say(
                    stderr,
                    "Stopping after the messages in progress. Press Ctrl-C again to "
                    "quit now.",
                )
            if handlers_running():
                since = time.monotonic()
            elif time.monotonic() - since > PATIENCE:
                waiting = sorted(one.name for one in threading.enumerate())
                say(
                    stderr,
                    f"Stopped without an answer after {PATIENCE:g} s. The messages in "
                    f"progress are delivered again. Waiting threads: "
                    f"{', '.join(waiting)}.",
                )
                os._exit(0)


def stay_light() -> None:
    """Exclude all existing objects from garbage collection, and collect less often.

    Without this, a busy relay spends a third of its time on traversing these objects.
    By default, Python also searches for reference cycles after every 700 new objects.
    That takes a tenth of the remaining time, although a batch creates no cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, *gc.get_threshold()[1:])


def return_memory() -> None:
    """Make the C library return the memory of large bodies to the system as soon as the
    memory is free.

    By default, glibc keeps such memory for each thread. A consumer with four threads
    kept 250 MiB. Nothing is changed if the C library is not glibc, or if the user has
    set a limit.
    """
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        with contextlib.suppress(OSError, AttributeError, TypeError):
            ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE)


def heartbeat(relay: Relay, stop: Callable[[], None]) -> AbstractContextManager[None]:
    """Send heartbeats of a relay's process while the block runs. If the thread fails,
    `stop` is called, and the error is raised."""
    presence = Presence("relay", router.db_for_write(Worker))
    return presence.beating(lambda: relay.in_flight, stop)
