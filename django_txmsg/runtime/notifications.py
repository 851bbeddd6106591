"""What threads of this process wait for in a database, and what wakes them.

A topic is a text: `queue NAME` of the embedded broker, `outbox BROKER`, or `work`, what
an operator asks for. Somebody who listens (`relaying/listener.py`) rings; while nobody
does, everybody polls. A ring is a hint: whoever is woken looks for himself.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Collection

#: Rings every topic.
ALL = "*"
#: What an operator asks for: a stage is paused, a bulk operation begins.
WORK = "work"


def queue(name: str) -> str:
    """Return the topic of a queue of the embedded broker."""
    return f"queue {name}"


def outbox(broker: str) -> str:
    """Return the topic of the messages stored for a broker, by its alias."""
    return f"outbox {broker}"


def later(delay: float) -> str:
    """Return what asks a listener to look in so many seconds."""
    return f"+{delay:.3f}"


class Wakeup:
    """One thread's wait for a topic. Rung from the start: the first look is now."""

    def __init__(self, using: str, topic: str) -> None:
        self.using, self.topic = using, topic
        self._rung = threading.Event()
        self._rung.set()
        with _lock:
            _waiting.add(self)

    @property
    def heard(self) -> bool:
        """Whether somebody listens, so that there is nothing to see without a ring."""
        return heard(self.using)

    def due(self) -> bool:
        """Return whether to look now: always while nobody listens, otherwise once
        after each ring."""
        rung = self._rung.is_set()
        if rung:  # or else a ring that comes just now would be forgotten
            self._rung.clear()
        return rung or not self.heard

    def ring(self) -> None:
        """Have it look, or look again: there may be more."""
        self._rung.set()

    def wait(self, timeout: float) -> bool:
        """Wait for a ring, for at most `timeout` seconds. Returns whether it came."""
        return self._rung.wait(timeout)


def ring(using: str, topics: Collection[str]) -> None:
    """Wake who waits for one of the topics in this database."""
    with _lock:
        woken = [
            one
            for one in _waiting
            if one.using == using and (one.topic in topics or ALL in topics)
        ]
    for one in woken:
        one.ring()


def topics(using: str) -> set[str]:
    """Return what is waited for in this database."""
    with _lock:
        return {one.topic for one in _waiting if one.using == using}


def heard(using: str) -> bool:
    """Return whether somebody listens in this database, as was proved a moment ago."""
    return _heard_until.get(using, 0.0) > time.monotonic()


def proved(using: str, seconds: float) -> None:
    """Note that somebody listens, for so many seconds unless proved again."""
    _heard_until[using] = time.monotonic() + seconds


def deaf(using: str) -> None:
    """Note that nobody listens any more, and have everybody look."""
    _heard_until.pop(using, None)
    ring(using, {ALL})


_waiting: weakref.WeakSet[Wakeup] = weakref.WeakSet()
_heard_until: dict[str, float] = {}
_lock = threading.Lock()


def _forget() -> None:
    """The threads that waited and listened are the parent's."""
    global _lock
    _lock = threading.Lock()
    _waiting.clear()
    _heard_until.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
