"""The topics that threads of this process wait for in a database, and their wake-ups.

A topic is a text: `queue NAME` of the embedded broker, `outbox BROKER`, or `work`, for
requests of operators. A listener (`relaying/listener.py`) wakes the threads; while
there is none, all threads poll. A wake-up is only a hint: the thread then queries the
database.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection

from .per_process import Members, PerProcess

#: Wakes the waiters of every topic.
ALL = "*"
#: Requests of operators: a stage is paused, a bulk operation begins.
WORK = "work"


def queue(name: str) -> str:
    """Return the topic of a queue of the embedded broker."""
    return f"queue {name}"


def outbox(broker: str) -> str:
    """Return the topic of the messages stored for a broker, by its alias."""
    return f"outbox {broker}"


def later(delay: float) -> str:
    """Return the topic that makes a listener query again in that many seconds."""
    return f"+{delay:.3f}"


class Wakeup:
    """One thread's wait for a topic. Set from the start: the first query is due at
    once."""

    def __init__(self, using: str, topic: str) -> None:
        self.using, self.topic = using, topic
        self._rung = threading.Event()
        self._rung.set()
        _waiting().add(self)

    @property
    def heard(self) -> bool:
        """Whether a listener works: then there is nothing to find without a wake-up."""
        return heard(self.using)

    def due(self) -> bool:
        """Return whether to query now: always without a listener, otherwise once after
        each wake-up."""
        rung = self._rung.is_set()
        if rung:  # else a ring right now would be lost
            self._rung.clear()
        return rung or not self.heard

    def ring(self) -> None:
        """Make its thread query, or query again: there may be more."""
        self._rung.set()

    def wait(self, timeout: float) -> bool:
        """Wait for a wake-up, for at most `timeout` seconds. Returns whether it
        came."""
        return self._rung.wait(timeout)


def ring(using: str, topics: Collection[str]) -> None:
    """Wake the threads that wait for one of the topics in this database."""
    for one in _waiting().all():
        if one.using == using and (one.topic in topics or ALL in topics):
            one.ring()


def topics(using: str) -> set[str]:
    """Return the topics that threads wait for in this database."""
    return {one.topic for one in _waiting().all() if one.using == using}


def heard(using: str) -> bool:
    """Return whether a listener works in this database, as recently proved."""
    return _heard_until().get(using, 0.0) > time.monotonic()


def proved(using: str, seconds: float) -> None:
    """Record that a listener works, for that many seconds unless proved again."""
    _heard_until()[using] = time.monotonic() + seconds


def deaf(using: str) -> None:
    """Record that no listener works any more, and make all threads query."""
    _heard_until().pop(using, None)
    ring(using, {ALL})


_waiting: PerProcess[Members[Wakeup]] = PerProcess(Members)
_heard_until: PerProcess[dict[str, float]] = PerProcess(dict)
