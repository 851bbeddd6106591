"""The topics for which threads of this process wait in a database, and their wake-ups.

A topic is a text: `queue NAME` for a queue of the embedded broker, `outbox BROKER` for
stored messages, or `work` for requests of operators. A listener
(`relaying/listener.py`) wakes the threads that wait for a topic, and each then queries
the database. Without a listener, all threads poll.

PostgreSQL's NOTIFY tells waiting processes that rows were committed. A process sends
NOTIFY after the commit, in a thread with its own connection, because NOTIFY inside
transactions would serialize all commits of the server. The thread sends at most one
NOTIFY every 10 ms, for all commits since the last one. If a notification is lost, the
next poll finds the rows.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Collection
from functools import partial
from typing import Any

from django.db import connections

from ..django_internals import in_block
from . import database_health
from .connections import recycle
from .per_process import Members, PerProcess, at_childs_end
from .thread_group import Watch

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
    """Return the topic that tells a listener to repeat its query in `delay` seconds."""
    return f"+{delay:.3f}"


class Wakeup:
    """Decides when one thread queries for a topic. The first query is due
    immediately."""

    def __init__(self, using: str, topic: str) -> None:
        self.using, self.topic = using, topic
        self._rung = threading.Event()
        self._rung.set()
        _waiting().add(self)

    @property
    def has_listener(self) -> bool:
        """Whether a listener works. If so, the thread queries only after a wake-up."""
        return has_listener(self.using)

    def due(self) -> bool:
        """Return whether the thread should query now. With a listener, this returns
        True one time after each wake-up. Without a listener, this always returns
        True."""
        rung = self._rung.is_set()
        if rung:  # else a ring right now would be lost
            self._rung.clear()
        return rung or not self.has_listener

    def ring(self) -> None:
        """Make the thread query once more, because there may be more rows."""
        self._rung.set()

    def wait(self, timeout: float) -> bool:
        """Wait for a wake-up, for at most `timeout` seconds. Returns whether the
        wake-up came."""
        return self._rung.wait(timeout)


def ring(using: str, topics: Collection[str]) -> None:
    """Wake the threads that wait for one of the topics in this database."""
    for one in _waiting().all():
        if one.using == using and (one.topic in topics or ALL in topics):
            one.ring()


def topics(using: str) -> set[str]:
    """Return the topics of this database that threads wait for."""
    return {one.topic for one in _waiting().all() if one.using == using}


def has_listener(using: str) -> bool:
    """Return whether a listener works in this database, according to the last call of
    `proved()`."""
    return _listener_until().get(using, 0.0) > time.monotonic()


def proved(using: str, seconds: float) -> None:
    """Record that a listener works, and count it as working for `seconds` from now."""
    _listener_until()[using] = time.monotonic() + seconds


def listener_ended(using: str) -> None:
    """Record that no listener works any more, and make all threads query."""
    _listener_until().pop(using, None)
    ring(using, {ALL})


_waiting: PerProcess[Members[Wakeup]] = PerProcess(Members)
_listener_until: PerProcess[dict[str, float]] = PerProcess(dict)


log = logging.getLogger("django_txmsg.notify")

CHANNEL = "django_txmsg"
#: Fewest seconds between two notifications of a process.
GAP = 0.01
#: PostgreSQL refuses longer ones, at 8,000 bytes.
MAX_BYTES = 7000


def notify(using: str, topics: Collection[str]) -> None:
    """In all processes, wake the threads that wait for one of the topics. Inside an
    atomic block, the threads are woken after the commit. This function never blocks and
    never fails. It does nothing if the database is not PostgreSQL."""
    connection: Any = connections[using]
    if not topics or connection.vendor != "postgresql":
        return
    if in_block(connection):
        connection.on_commit(lambda: _notifier(using).add(topics), robust=True)
    else:
        _notifier(using).add(topics)


class _Notifier:
    """The notifications that must be sent in one database. A thread sends them, and
    ends when there have been no notifications for a while."""

    #: The topics are always due at once.
    due = 0.0

    def __init__(self, using: str) -> None:
        self._using = using
        self._topics: set[str] = set()
        # At the end of a process no thread starts: the next poll finds the rows.
        refused = partial(log.debug, "cannot notify: %s")
        name = f"txmsg-notify-{using}"
        self.thread: Watch[_Notifier] = Watch(name, self._send, refused)

    def add(self, topics: Collection[str]) -> None:
        """Send notifications for these topics soon."""
        with self.thread.changed:
            self._topics.update(topics)
            self.thread.add(self)

    def _send(self, _: object) -> None:
        with self.thread.changed:
            topics, self._topics = self._topics, set()
            self.thread.remove(self)
        try:
            self._say(topics)
            recycle()
        except Exception:
            # The next poll finds what lost notifications were about.
            log.exception("notifying in database %r failed", self._using)
        threading.Event().wait(GAP)

    def _say(self, topics: Collection[str]) -> None:
        payload = "\n".join(sorted(topics))
        if len(payload.encode()) > MAX_BYTES:
            payload = ALL

        def say() -> None:
            with connections[self._using].cursor() as cursor:
                cursor.execute("SELECT pg_notify(%s, %s)", [CHANNEL, payload])

        # Try again at once on another connection: a restart of the server ends a
        # connection, and only its next use reveals that.
        database_health.retry(self._using, "waiting processes are not notified").run(
            say
        )


def _begin(using: str) -> _Notifier:
    at_childs_end(stop_notifiers, turn=1)
    return _Notifier(using)


_notifier = PerProcess(_begin)


@atexit.register
def stop_notifiers(timeout: float = 1.0) -> None:
    """Send the outstanding notifications and end the threads that send them. Waits at
    most `timeout` seconds for each thread. A later notification starts a new thread."""
    for one in _notifier.all():
        one.thread.stop(timeout)
