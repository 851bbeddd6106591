"""Before hops 3 and 6: receives PostgreSQL's notifications about new rows, by LISTEN.

A process that relays or consumes has one listener (a thread with its own connection) in
each database. On behalf of all waiting threads, the listener also queries for due rows
every few seconds.

A listener regularly notifies itself. It counts as working only if such a notification
has arrived within about the last minute. Answered queries are not enough: a former
primary server answers them, too. Behind a pooler in transaction mode no notifications
arrive, and all threads poll, as on SQLite. TXMSG["LISTEN_DATABASE"] can name a direct
connection.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import Error as AnyDatabaseError
from django.db import connections, router

from .. import conf, rules
from ..django_internals import can_listen, djangos_errors, raw
from ..models import OutboxMessage, QueueMessage
from ..rules.outbox import PENDING
from ..runtime import database_health, notifications
from ..runtime.notifications import CHANNEL, notify
from ..runtime.per_process import PerProcess
from ..runtime.thread_group import start_daemon

_OUTBOX, _QUEUE = OutboxMessage._meta.db_table, QueueMessage._meta.db_table
# Each is the head of the index by which the rows are claimed.
_LOOK = f"""
    SELECT 'queue ' || name, EXTRACT(EPOCH FROM (
        SELECT available_at FROM {_QUEUE} WHERE queue = name
        ORDER BY available_at, id LIMIT 1) - statement_timestamp())
    FROM unnest(%s::text[]) name
    UNION ALL
    SELECT 'outbox ' || name, EXTRACT(EPOCH FROM (
        SELECT due_at FROM {_OUTBOX}
        WHERE {PENDING.sql()} AND broker = name AND service = ANY(%s::text[])
          AND {rules.NOT_LEASED.sql(now="statement_timestamp()")}
        ORDER BY due_at, id LIMIT 1) - statement_timestamp())
    FROM unnest(%s::text[]) name
"""  # noqa: S608 - constants only


def seconds_until_due(
    using: str, topics: Collection[str], services: Collection[str] = ()
) -> dict[str, float]:
    """Return the seconds until the first row of each topic is due: zero or less if it
    is due already. Topics without rows are omitted. A row of the outbox counts only if
    one of `services`, or an earlier release, stored it."""
    queues, outboxes = [
        [one.removeprefix(kind) for one in topics if one.startswith(kind)]
        for kind in (notifications.queue(""), notifications.outbox(""))
    ]
    with connections[using].cursor() as cursor:
        cursor.execute(_LOOK, [queues, ["", *services], outboxes])
        return {
            topic: float(seconds)
            for topic, seconds in cursor.fetchall()
            if seconds is not None
        }


log = logging.getLogger("django_txmsg.notify")

#: Seconds between two queries for rows without a notification.
LOOK = 4.0
#: Seconds for which a query proves that its connection is alive.
PROVED = 3 * LOOK
#: Seconds in which a listener must receive its own notification.
PROOF = 3.0
#: Seconds until it retries, at first and at most: slowness passes, a pooler stays.
SOON, AGAIN = 2.0, 60.0
#: Seconds between two such tests of a working listener.
PROVE_EVERY = 60.0


class Listener:
    """Listens in one database, in a thread, as long as this process has users of the
    listener."""

    def __init__(self, using: str) -> None:
        self._using, self._lock = using, threading.Lock()
        self._users, self._stop = 0, threading.Event()

    @property
    def _alias(self) -> str:
        return alias_of(self._using)

    def add_user(self) -> None:
        """Add a user. The first user starts the thread."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._stop = threading.Event()
                start_daemon(f"txmsg-listen-{self._using}", self.run, self._stop)

    def remove_user(self) -> None:
        """Remove a user. After the last user is removed, the thread ends. Nothing waits
        for its end, because the thread holds only a connection."""
        with self._lock:
            self._users -= 1
            if not self._users:
                self._stop.set()

    def run(self, stop: threading.Event) -> None:
        """Listen until `stop` is set, and then close this thread's connections."""
        try:
            self._run(stop)
        finally:
            connections.close_all()

    def _run(self, stop: threading.Event) -> None:
        """Listen. After an error, pause and listen again."""
        warned, later = False, SOON
        while not stop.is_set():
            pause = 1.0
            try:
                if database_health.usable(self._alias):
                    self._listen(stop)
                    pause = AGAIN
            except AnyDatabaseError as error:
                if not database_health.note(self._alias, error):
                    log.warning("cannot listen in database %r: %s", self._alias, error)
                    pause = AGAIN
            except _NotReceived:
                # During an outage, also of a read-only server, none is sent.
                if database_health.error(self._using) is None:
                    pause, later = later, min(4 * later, AGAIN)
                    if not warned:
                        log.warning(
                            "database %r: no notification arrived, so all threads "
                            "poll. %s",
                            self._alias,
                            advice(self._using),
                        )
                    warned = True
            except Exception:
                log.exception("listening in database %r failed", self._alias)
                pause = AGAIN
            finally:
                notifications.listener_ended(self._using)
                database_health.discard(self._alias)
            stop.wait(pause)

    def _listen(self, stop: threading.Event) -> None:
        received = receives_notifications(self._using, stop)
        if received is None or stop.is_set():
            return
        if not received:
            raise _NotReceived
        connection, look_at = connections[self._alias], 0.0
        proof, sent_at = "", time.monotonic()
        while not stop.is_set():
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + self._look()
            if not proof and time.monotonic() > sent_at + PROVE_EVERY:
                proof, sent_at = _send_proof(self._using), time.monotonic()
            topics = _received(connection, min(0.3, look_at - time.monotonic()))
            if topics:
                notifications.ring(self._using, topics)
                look_at = min([look_at, *_delays(topics)])
            if proof in topics:
                proof = ""
            elif proof and time.monotonic() > sent_at + PROVED:
                raise _NotReceived

    def _look(self) -> float:
        """Wake the threads whose rows are due. Returns the seconds until the next
        query."""
        waiting = notifications.topics(self._using)
        due = seconds_until_due(self._alias, waiting, conf.get().services)
        if not notifications.has_listener(self._using):
            notifications.ring(self._using, {notifications.ALL})
        notifications.proved(self._using, PROVED)
        notifications.ring(self._using, {one for one, left in due.items() if left <= 0})
        return min([LOOK, *(left + 0.001 for left in due.values() if left > 0)])


class _NotReceived(Exception):
    """The listener did not receive its own notification."""


def _delays(topics: Collection[str]) -> Iterator[float]:
    """Yield the times at which delayed messages become due. The notification of a
    delayed message contains its delay."""
    for one in topics:
        if one.startswith("+"):
            # Any client of the database can send notifications of any content.
            with contextlib.suppress(ValueError):
                yield time.monotonic() + max(0.0, float(one[1:]))


def receives_notifications(
    using: str, stop: threading.Event | None = None
) -> bool | None:
    """Start to listen on this thread's connection, and return whether notifications
    arrive. To test that, this process sends a notification on another connection.
    Returns None if the driver cannot listen.

    Raises Django's database errors. Returns soon after `stop` is set.
    """
    connection: Any = connections[alias_of(using)]
    with connection.cursor() as cursor:
        if not can_listen(connection):
            return None  # not psycopg 3
        cursor.execute(f"LISTEN {CHANNEL}")
    proof = _send_proof(using)
    end = time.monotonic() + PROOF
    while proof not in _received(connection, 0.2):
        if time.monotonic() > end or (stop is not None and stop.is_set()):
            with connection.cursor() as cursor:
                cursor.execute(f"UNLISTEN {CHANNEL}")  # a pooler keeps the session open
            return False
    return True


def _send_proof(using: str) -> str:
    """Send a notification to the listener itself, and return the notification's text.
    The notification is sent on another connection, like the notifications of other
    processes."""
    proof = f"proof {uuid.uuid4()}"
    notify(using, {proof})
    return proof


def _received(connection: Any, timeout: float) -> set[str]:
    """Return the topics of notifications received within `timeout` seconds."""
    topics: set[str] = set()
    with djangos_errors(connection):
        driver = raw(connection)
        for one in driver.notifies(timeout=max(0.0, timeout), stop_after=1):
            topics |= set(one.payload.split("\n"))
    return topics


def alias_of(using: str) -> str:
    """Return the alias of the connection that listens for a database."""
    direct = conf.get().LISTEN_DATABASE
    main = router.db_for_write(OutboxMessage)
    return direct if direct and using == main else using


def advice(using: str) -> str:
    """Return what to do if no notification arrives from a database."""
    if using != router.db_for_write(OutboxMessage):
        return (
            'TXMSG["LISTEN_DATABASE"] serves only the outbox\'s database. Behind a '
            "pooler in transaction mode, workers poll this one."
        )
    return (
        "Behind a pooler in transaction mode, name an alias that connects directly to "
        'the server in TXMSG["LISTEN_DATABASE"].'
    )


@contextmanager
def listening(databases: Collection[str]) -> Iterator[None]:
    """Listen in these databases while the block runs. Databases other than PostgreSQL
    are ignored. All users in this process share one listener for each database."""
    if not conf.get().NOTIFY:
        yield
        return
    wanted = {one for one in databases if connections[one].vendor == "postgresql"}
    listeners = [_listener(using) for using in wanted]
    for one in listeners:
        one.add_user()
    try:
        yield
    finally:
        for one in listeners:
            one.remove_user()


_listener = PerProcess(Listener)
