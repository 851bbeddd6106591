"""Before hops 3 and 6: hears, by PostgreSQL's LISTEN, that there are rows.

One thread and one connection for each database of a process that relays or consumes.
It has proof: nobody trusts a listener that has not heard of itself within the last
minute or so, and that does not look for what is due, for all who wait, every few
seconds. Its connection may lead to a server that is the primary no more, which answers
it all the same. Behind a pooler that
hands a session to another client after each transaction nothing is heard, and all poll
as they do on SQLite; TXMSG["LISTEN_DATABASE"] names a direct way.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import Error as AnyDatabaseError
from django.db import connections, router

from .. import conf
from ..django_internals import can_listen, djangos_errors, raw
from ..models import OutboxMessage
from ..models.due import seconds_until_due
from ..runtime import database_health, notifications
from ..runtime.notifier import CHANNEL, notify

log = logging.getLogger("django_txmsg.notify")

#: Seconds between two looks for what nobody has told of.
LOOK = 4.0
#: Seconds for which a look proves that its connection lives.
PROVED = 3 * LOOK
#: Seconds that a listener waits to hear of itself, and before it tries again.
PROOF, AGAIN = 3.0, 60.0
#: Seconds between two proofs of one that listens.
ANEW = 60.0


class Listener:
    """Listens in one database: `run()`, until `stop` is set."""

    def __init__(self, using: str, stop: threading.Event) -> None:
        self._using, self._stop = using, stop
        self._alias = alias_of(using)

    def run(self) -> None:
        """Listen, and after what breaks listen again."""
        told = False
        while not self._stop.is_set():
            pause = 1.0
            try:
                if database_health.usable(self._alias):
                    self._listen()
                    pause = AGAIN
            except AnyDatabaseError as error:
                if not database_health.note(self._alias, error):
                    log.warning("cannot listen in database %r: %s", self._alias, error)
                    pause = AGAIN
            except _Deaf:
                pause = AGAIN
                if not told:
                    log.warning(
                        "database %r: a notification did not come, and all wait by "
                        "polling. Behind a pooler in transaction mode, name a direct "
                        'way in TXMSG["LISTEN_DATABASE"]',
                        self._alias,
                    )
                told = True
            except Exception:
                log.exception("listening in database %r failed", self._alias)
                pause = AGAIN
            finally:
                notifications.deaf(self._using)
                database_health.discard(self._alias)
            self._stop.wait(pause)

    def _listen(self) -> None:
        heard = hears(self._using, self._stop)
        if heard is None or self._stop.is_set():
            return
        if not heard:
            raise _Deaf
        connection, look_at = connections[self._alias], 0.0
        proof, asked = "", time.monotonic()
        while not self._stop.is_set():
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + self._look()
            if not proof and time.monotonic() > asked + ANEW:
                proof, asked = _ask(self._using), time.monotonic()
            topics = _received(connection, min(0.3, look_at - time.monotonic()))
            if topics:
                notifications.ring(self._using, topics)
                look_at = min([look_at, *_delays(topics)])
            if proof in topics:
                proof = ""
            elif proof and time.monotonic() > asked + PROVED:
                raise _Deaf

    def _look(self) -> float:
        """Ring for what is due, and return in how many seconds to look again."""
        waiting = notifications.topics(self._using)
        due = seconds_until_due(self._alias, waiting, conf.get().services)
        if not notifications.heard(self._using):
            notifications.ring(self._using, {notifications.ALL})
        notifications.proved(self._using, PROVED)
        notifications.ring(self._using, {one for one, left in due.items() if left <= 0})
        return min([LOOK, *(left + 0.001 for left in due.values() if left > 0)])


class _Deaf(Exception):
    """The listener has not heard of itself."""


def _delays(topics: Collection[str]) -> Iterator[float]:
    """Yield when to look for messages that were told of before they are due."""
    for one in topics:
        if one.startswith("+"):
            # Anybody in the database can notify, of anything.
            with contextlib.suppress(ValueError):
                yield time.monotonic() + max(0.0, float(one[1:]))


def hears(using: str, stop: threading.Event | None = None) -> bool | None:
    """Begin to listen with this thread's connection, and return whether a notification
    comes that this process sends by another one; None where the driver cannot listen.

    Raises Django's database errors. Returns soon after `stop` is set.
    """
    connection: Any = connections[alias_of(using)]
    with connection.cursor() as cursor:
        if not can_listen(connection):
            return None  # not psycopg 3
        cursor.execute(f"LISTEN {CHANNEL}")
    proof = _ask(using)
    end = time.monotonic() + PROOF
    while proof not in _received(connection, 0.2):
        if time.monotonic() > end or (stop is not None and stop.is_set()):
            with connection.cursor() as cursor:
                cursor.execute(f"UNLISTEN {CHANNEL}")  # a pooler keeps the session
            return False
    return True


def _ask(using: str) -> str:
    """Have a notification sent by another connection, perhaps another way, as those of
    others will come. Returns it."""
    proof = f"proof {uuid.uuid4()}"
    notify(using, {proof})
    return proof


def _received(connection: Any, timeout: float) -> set[str]:
    """Return the topics that were told of within so many seconds."""
    topics: set[str] = set()
    with djangos_errors(connection):
        driver = raw(connection)
        for one in driver.notifies(timeout=max(0.0, timeout), stop_after=1):
            topics |= set(one.payload.split("\n"))
    return topics


def alias_of(using: str) -> str:
    """Return the alias by which to listen in a database."""
    direct = conf.get().LISTEN_DATABASE
    main = router.db_for_write(OutboxMessage)
    return direct if direct and using == main else using


@contextmanager
def listening(databases: Collection[str]) -> Iterator[None]:
    """Listen in these databases, as far as they are PostgreSQL's, while the block
    runs: once for all who ask for it in this process."""
    if not conf.get().NOTIFY:
        yield
        return
    wanted = {one for one in databases if connections[one].vendor == "postgresql"}
    with _lock:
        for using in wanted:
            _begin(using)
    try:
        yield
    finally:
        with _lock:
            for using in wanted:
                _end(using)


def _begin(using: str) -> None:
    count, stop = _listening.get(using, (0, threading.Event()))
    _listening[using] = (count + 1, stop)
    if not count:
        thread = threading.Thread(
            target=_run, args=(using, stop), name=f"txmsg-listen-{using}", daemon=True
        )
        thread.start()


def _end(using: str) -> None:
    count, stop = _listening.pop(using, (1, threading.Event()))
    if count > 1:
        _listening[using] = (count - 1, stop)
    else:
        # Not waited for: it holds nothing but a connection.
        stop.set()


def _run(using: str, stop: threading.Event) -> None:
    try:
        Listener(using, stop).run()
    finally:
        connections.close_all()


_listening: dict[str, tuple[int, threading.Event]] = {}
_lock = threading.Lock()


def _forget() -> None:
    """The threads are the parent's."""
    global _lock
    _lock = threading.Lock()
    _listening.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
