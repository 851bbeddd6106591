"""Classifies and handles database errors, in the same way for all threads.

While the database is unavailable or full, all threads of this process wait until one
thread's probe can write. If the probe succeeds and the database still refuses a
thread's statement (because of a lock's time-out, a trigger, a missing privilege), a
`Retry` makes that thread pause, each time longer. No attempt is counted during these
waits and pauses.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from django.apps import apps
from django.db import (
    DatabaseError,
    DataError,
    InterfaceError,
    OperationalError,
    connections,
    transaction,
)
from django.db import Error as AnyDatabaseError

from ..django_internals import djangos_errors, in_block, raw
from ..envelope.failure import cause_of, text_of
from . import liveness
from .breaker import Breaker
from .per_process import PerProcess

log = logging.getLogger("django_txmsg.outage")

Result = TypeVar("Result")

#: SQLSTATE classes and codes that mean: not this server, or not now. 08 connection
#: exceptions, 57P operator's intervention (shutdown, crash, starting up), 25006 a
#: server that takes no writes (a primary that was demoted), 58030 an error of its disk.
_CLASSES = ("08", "57P", "25006", "58030")
#: Insufficient resources: 53100 no room on the disk, 53200 in memory, 53300 no
#: connection.
_RESOURCES = "53"
#: A limit of the program, such as the size of an index row: no other try helps.
_LIMITS = "54"
#: SQLite's errors if it cannot open its file, or cannot write it.
_SQLITE = ("unable to open", "readonly database", "disk i/o error")
_SQLITE_FULL = "database or disk is full"
#: Longest pause, in seconds, between probes, and between two tries of one thread.
MAX_PAUSE = 10.0
#: Seconds before the second try of a refused statement; doubled each time.
FIRST_PAUSE = 0.2
#: Fewest seconds between two log lines of a process about refusals.
SAY_EVERY = 1.0
#: Bytes that a probe writes: more than fit on a page that is half empty.
PROBE_BYTES = 16_384


def sqlstate(error: BaseException) -> str:
    """Return PostgreSQL's code for a database error, or "" if it has none. Works with
    psycopg 3 and psycopg2."""
    cause: Any = cause_of(error)
    return str(getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None) or "")


def is_away(error: BaseException | None) -> bool:
    """Return whether the error means that the database cannot be used now. Returns
    False if only the statement was wrong, waited too long, or lost a conflict."""
    if not isinstance(error, DatabaseError | InterfaceError):
        return False
    cause = cause_of(error)
    if isinstance(error, InterfaceError):
        return not _is_sqlite(cause)  # SQLite's error for a value of a wrong type
    if lacks_resources(error):
        return True
    state = sqlstate(error)
    if state:
        return state.startswith(_CLASSES)
    if not isinstance(error, OperationalError):
        return False
    if _is_sqlite(cause):
        return any(words in _lowercase_text(cause) for words in _SQLITE)
    # There is no code from the server: no connection, a broken one, or none from the
    # pool in time. Errors that our or Django's Python code raises itself have no cause.
    return cause is not None


def lacks_resources(error: BaseException | None) -> bool:
    """Return whether the error means that the database answers, but has no disk space,
    memory or connection left."""
    if not isinstance(error, DatabaseError):
        return False
    cause = cause_of(error)
    full = _is_sqlite(cause) and _SQLITE_FULL in _lowercase_text(cause)
    return full or sqlstate(error).startswith(_RESOURCES)


def may_pass(error: BaseException | None) -> bool:
    """Return whether the same statement may succeed later.

    True if the database is unavailable, if the statement timed out or lost a conflict,
    or if a trigger, a policy or a missing privilege refused the statement. False if the
    database cannot store a value, or if the error does not come from the database."""
    if isinstance(error, DatabaseError) and sqlstate(error).startswith(_LIMITS):
        return False
    if isinstance(error, OperationalError) or is_away(error):
        return True
    if not isinstance(error, DatabaseError) or isinstance(error, DataError):
        return False
    return cause_of(error) is not None


def _is_sqlite(cause: BaseException | None) -> bool:
    return type(cause).__module__.partition(".")[0] == "sqlite3"


def _lowercase_text(cause: BaseException | None) -> str:
    return "" if cause is None else text_of(cause).lower()


def _breaker(using: str) -> Breaker:
    return Breaker(
        using,
        MAX_PAUSE,
        kind="database",
        follows="threads that need it wait, keep their messages, and count no attempt",
    )


#: The breaker of a database, shared by all threads of this process, by its alias.
breaker = PerProcess(_breaker)


def lost_conflict(error: BaseException) -> bool:
    """Return whether PostgreSQL rolled back the transaction because of a serialization
    failure or a deadlock. The same work may succeed if it is repeated."""
    lost = isinstance(error, DatabaseError)
    return lost and sqlstate(error) in ("40001", "40P01")


def gave_up_waiting(error: BaseException) -> bool:
    """Return whether PostgreSQL cancelled the statement because it waited too long for
    a lock."""
    return isinstance(error, OperationalError) and sqlstate(error) == "55P03"


def error(using: str) -> BaseException | None:
    """Return the error that made the database unavailable, or None if this process has
    recorded no outage."""
    return breaker(using).error


def note(using: str, error: BaseException) -> bool:
    """Return whether the error means that the database cannot be used now. If so, close
    this thread's connection, and test whether the database accepts a write on a new
    connection. If the test fails, record an outage.

    Call this outside any atomic block.
    """
    if not is_away(error):
        return False
    discard(using)
    shared = breaker(using)
    if shared.error is None:
        with shared.connecting:
            if shared.error is None:
                _probe(using)
    return True


def usable(using: str) -> bool:
    """Return whether the database can be used. Queries the database only if this
    process has recorded an outage. During an outage, only one thread at a time probes
    the database. Meanwhile this returns False for the other threads, without
    waiting."""
    shared = breaker(using)
    if shared.error is None:
        return True
    if shared.remaining or not shared.connecting.acquire(blocking=False):
        return False
    try:
        if shared.error is not None and not shared.remaining:
            _probe(using)
    finally:
        shared.connecting.release()
    return shared.error is None


def wait(using: str, stop: threading.Event) -> bool:
    """Wait until the database is usable. Returns False as soon as `stop` is set."""
    while not usable(using):
        liveness.turned()
        if stop.wait(min(max(0.01, breaker(using).remaining), 0.5)):
            break
    return not stop.is_set()


class Retry:
    """Decides when a statement that the database has refused is tried again: after a
    pause, or after a probe has succeeded.

    `what` is the beginning of the log lines. A process logs at most one such line a
    second. Threads that use the database for the same purpose can share an instance.
    """

    def __init__(self, using: str, what: str) -> None:
        self._using, self._what = using, what
        self._failures = 0
        self._until = 0.0

    @property
    def ready(self) -> bool:
        """Whether the pause has ended and the database can be used."""
        return time.monotonic() >= self._until and usable(self._using)

    def failed(self, error: BaseException) -> None:
        """Record a refusal. If only the connection was broken, the next try need not
        wait. Otherwise it must wait for the end of a pause, or until the database is
        available again. From the second refusal on, the next try has a new connection.

        Call this outside any atomic block.
        """
        broke = note(self._using, error) and not lacks_resources(error)
        if breaker(self._using).error is not None:
            return  # all threads wait; one log line is enough
        self._failures += 1
        if broke and self._failures == 1:
            return
        if self._failures > 1 and not in_block(connections[self._using]):
            discard(self._using)  # the cause may be its session: a search_path, a role
        pause = min(MAX_PAUSE, FIRST_PAUSE * 2 ** min(self._failures - 1, 10))
        pause *= random.uniform(0.75, 1.25)  # noqa: S311 - jitter
        self._until = time.monotonic() + pause
        report(f"{self._what}; again in {pause:.1f} s", error)

    def worked(self) -> None:
        """Record that the database no longer refuses the statement."""
        self._failures, self._until = 0, 0.0

    def after(self, error: BaseException, stop: threading.Event) -> bool:
        """Record a refusal, and wait until the statement should be tried again. Returns
        False as soon as `stop` is set."""
        if stop.is_set():
            return False
        self.failed(error)
        stop.wait(max(0.0, self._until - time.monotonic()))
        return wait(self._using, stop)

    def run(
        self,
        work: Callable[[], Result],
        survives: type[Exception] = AnyDatabaseError,
    ) -> Result | None:
        """Call a function that is not urgent, and return its result. Returns None if
        the function raises an error of the class `survives`, for example because the
        database refuses a statement. Also returns None if the pause after such an error
        has not ended."""
        while self.ready:
            try:
                # Closing a server-side cursor raises the driver's own error.
                with djangos_errors(connections[self._using]):
                    result = work()
            except survives as error:
                self.failed(error)
            else:
                self.worked()
                return result
        return None


#: This process's `Retry` for one periodic use of a database, by its alias and the use.
retry = PerProcess(Retry)


class _Report:
    """Remembers when the next line may be logged as a warning."""

    def __init__(self) -> None:
        self._lock, self.at = threading.Lock(), 0.0

    def is_recent(self) -> bool:
        with self._lock:
            now = time.monotonic()
            recent = now < self.at
            self.at = self.at if recent else now + SAY_EVERY
            return recent


_report = PerProcess(_Report)


def report(what: str, error: BaseException) -> None:
    """Log that the database has refused a statement. At most one such line a second is
    a warning; the others have the level DEBUG."""
    recent = _report().is_recent()
    # A database's first line says what it refused; other errors need their traceback.
    ours = not isinstance(error, AnyDatabaseError)
    log.log(
        logging.DEBUG if recent else logging.WARNING,
        "%s: %s",
        what,
        text_of(error).partition("\n")[0],
        exc_info=error if ours else None,
    )


def discard(using: str) -> None:
    """Close this thread's connection, so that it does not go back to a pool."""
    connection: Any = connections[using]
    if raw(connection) is not None and connection.vendor == "postgresql":
        with contextlib.suppress(Exception):
            raw(connection).close()
    with contextlib.suppress(AnyDatabaseError):
        connection.close()


def _probe(using: str) -> None:
    """Test whether the database accepts writes, and record the result for all
    threads."""
    try:
        with transaction.atomic(using=using):
            _write(using)
    except AnyDatabaseError as failure:
        discard(using)
        if is_away(failure):
            breaker(using).failed(failure)
            return
    breaker(using).worked()


def _write(using: str) -> None:
    """Write a row to the inbox table, and remove it again."""
    model = apps.get_model("django_txmsg", "InboxMessage")
    rows = model._base_manager.using(using)
    body = os.urandom(PROBE_BYTES)  # random: it cannot be compressed
    row = model(message_id=uuid.uuid4(), body=body)
    rows.bulk_create([row])
    if connections[using].vendor == "postgresql":
        # PostgreSQL has written it to the disk already.
        transaction.set_rollback(True, using=using)
    else:
        # SQLite writes nothing before it commits.
        rows.filter(message_id=row.message_id).delete()
