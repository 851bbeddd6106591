"""Records whether the loops of this process still run, and which handlers run now.

Each long-lived thread calls `turned()` in each iteration of its loop, and passes the
number of seconds for which the loop may now wait. So a thread that pauses because a
broker or a database is unavailable does not count as hanging. Heartbeats report the
handlers.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .per_process import PerProcess


@dataclass(frozen=True)
class State:
    """The state of a process's loops."""

    #: Whether it works: it has started, and was not asked to stop.
    ready: bool
    #: The name of the loop whose last turn is the longest ago.
    loop: str
    #: Seconds since that turn, without the pause that the loop had announced.
    silent: float


def begin(name: str, *, ready: bool = True) -> None:
    """Watch the current thread from now on, until `ended()`. The process is not ready
    before each of its loops is."""
    _loops()[threading.get_ident()] = (name, time.monotonic(), ready)


def turned(pause: float = 0.0, *, ready: bool = True) -> None:
    """Record that the current thread has completed an iteration of its loop, and that
    it may now wait for `pause` seconds. Does nothing in a thread that has not called
    `begin()`."""
    ident = threading.get_ident()
    loops = _loops()
    known = loops.get(ident)
    if known is not None:
        loops[ident] = (known[0], time.monotonic() + pause, ready)


def pauses(seconds: float) -> None:
    """Record that the current thread now waits between two attempts of a message."""
    turned(seconds)
    _pause_ends()[threading.get_ident()] = time.monotonic() + seconds


def pause_end(ident: int | None) -> float:
    """Return when a thread's last pause between two attempts ends, as an instant of
    `time.monotonic()`, or 0 without such a pause."""
    return 0.0 if ident is None else _pause_ends().get(ident, 0.0)


def ended() -> None:
    """Stop watching the current thread."""
    _loops().pop(threading.get_ident(), None)
    _pause_ends().pop(threading.get_ident(), None)


def stopping() -> None:
    """Record that the process was asked to stop, so it is not ready any more."""
    global _stop_requested
    _stop_requested = True


def state() -> State:
    """Return the state of this process."""
    now = time.monotonic()
    loops = list(_loops().values())
    name, turned_at, _ = min(loops, key=lambda one: one[1], default=("", now, False))
    ready = bool(loops) and all(one[2] for one in loops) and not _stop_requested
    return State(ready, name, max(0.0, now - turned_at))


#: By thread: the name of its loop, when it turned last, and whether it is ready.
_loops: PerProcess[dict[int, tuple[str, float, bool]]] = PerProcess(dict)
_stop_requested = False

#: By thread: when its last pause between two attempts ends.
_pause_ends: PerProcess[dict[int, float]] = PerProcess(dict)

#: By thread: the handler that it runs.
_running: PerProcess[dict[int, Running]] = PerProcess(dict)


# When a process last did anything. `--once` ends by it, and a process that receives
# notifications polls less often.

#: Seconds without work after which a listening process polls only this often for due
#: redeliveries and operators' requests, since it is notified of them.
CALM, SELDOM, RARELY = 60.0, 10.0, 30.0


class Activity:
    """When a process last did any work. All threads of the process share this
    object."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def note(self) -> None:
        """Record that a piece of work was done."""
        self._last = time.monotonic()

    @property
    def idle(self) -> float:
        """Seconds since the last piece of work."""
        return time.monotonic() - self._last

    @property
    def calm(self) -> bool:
        """Whether the process has had no work for so long that it may poll less
        often."""
        return self.idle > CALM


@dataclass(frozen=True, slots=True)
class Running:
    """A handler that is processing a message."""

    thread: str
    stage: str
    message_id: uuid.UUID
    attempt: int
    #: An instant of `time.monotonic()`.
    since: float


@contextmanager
def running(stage: str, message_id: uuid.UUID, attempt: int) -> Iterator[None]:
    """Record, for the duration of the block, that this thread runs a handler."""
    thread = threading.current_thread()
    ident, since = threading.get_ident(), time.monotonic()
    handlers = _running()
    handlers[ident] = Running(thread.name, stage, message_id, attempt, since)
    try:
        yield
    finally:
        handlers.pop(ident, None)


def now_running() -> list[Running]:
    """Return the handlers that run now, the longest first."""
    found = list(_running().values())
    return sorted(found, key=lambda one: one.since)
