"""Beside all hops that use a database: is it away, and what is done about it.

One answer to "is the database away?" and one reaction, for every thread that uses one:
close the connection, wait, as all threads of this process do, until one thread's probe
gets an answer, and continue. An error that is not an outage is left to the caller: a
deadlock, a lock's or a statement's time-out, a constraint.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any

from django.db import DatabaseError, InterfaceError, OperationalError, connections
from django.db import Error as AnyDatabaseError

from ..django_internals import raw
from .breaker import Breaker

#: SQLSTATE classes and codes that say: not this server, or not now. 08 connection
#: exceptions, 57P operator's intervention (shutdown, crash, starting up), 25006 a
#: server that takes no writes (a primary that was demoted), 53300 and 53100 no
#: connection, no disk left.
_CLASSES = ("08", "57P", "25006", "53300", "53100")
#: What SQLite says when it cannot get at its file, or cannot write it.
_SQLITE = (
    "unable to open",
    "readonly database",
    "disk i/o error",
    "database or disk is full",
)
#: Longest pause, in seconds, between probes.
MAX_PAUSE = 10.0


def sqlstate(error: BaseException) -> str:
    """Return PostgreSQL's code for one of Django's database errors, as psycopg 3 or
    psycopg2 tells it, or an empty text where there is none."""
    cause: Any = error.__cause__
    return str(getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None) or "")


def is_away(error: BaseException | None) -> bool:
    """Return whether the error means that the database cannot be used now, and not
    that a statement was wrong, had to wait too long, or lost a race."""
    if not isinstance(error, DatabaseError | InterfaceError):
        return False
    cause: Any = error.__cause__
    sqlite = type(cause).__module__.partition(".")[0] == "sqlite3"
    if isinstance(error, InterfaceError):
        return not sqlite  # to SQLite it is a parameter of the wrong type
    state = sqlstate(error)
    if state:
        return state.startswith(_CLASSES)
    if not isinstance(error, OperationalError):
        return False
    if sqlite:
        return any(words in str(error).lower() for words in _SQLITE)
    # The server said nothing, or the driver nothing that it said: no connection, one
    # that broke, none to be had from the pool in time. Errors that Python code of ours
    # or of Django raises by itself have no cause.
    return cause is not None


def may_pass(error: BaseException | None) -> bool:
    """Return whether the same may succeed another time: the database is away, or a lock
    or the time ran out, a race was lost."""
    return isinstance(error, OperationalError) or is_away(error)


def breaker(using: str) -> Breaker:
    """Return what all threads of this process know of the database."""
    with _lock:
        if using not in _breakers:
            _breakers[using] = Breaker(
                using,
                MAX_PAUSE,
                kind="database",
                follows="threads that need it wait, keep their messages, and count "
                "no attempt",
            )
        return _breakers[using]


def gave_up_waiting(error: BaseException) -> bool:
    """Return whether PostgreSQL has waited for a lock for as long as it was to."""
    return isinstance(error, OperationalError) and sqlstate(error) == "55P03"


def error(using: str) -> BaseException | None:
    """Return why the database is away, as far as anybody knows, or None."""
    return breaker(using).error


def note(using: str, error: BaseException) -> bool:
    """Return whether the error means that the database is away. This thread's
    connection is closed then, and the outage noted, if no other one can be opened.

    Call it outside of any atomic block.
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
    """Return whether the database can be asked, as far as anybody knows. Costs no query
    when it can; otherwise, of all threads one at a time probes it. Does not wait."""
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
    """Wait until the database is usable. Returns False, at once, when `stop` is set."""
    while not usable(using):
        if stop.wait(min(max(0.01, breaker(using).remaining), 0.5)):
            break
    return not stop.is_set()


def outlast(using: str, error: BaseException, stop: threading.Event) -> bool:
    """Close this thread's connection and wait until the database is usable: at once
    where only the connection had broken. Returns False, at once, when `stop` is set."""
    return not stop.is_set() and note(using, error) and wait(using, stop)


def discard(using: str) -> None:
    """Close this thread's connection for good: no pool may hand it out again."""
    connection: Any = connections[using]
    if raw(connection) is not None and connection.vendor == "postgresql":
        with contextlib.suppress(Exception):
            raw(connection).close()
    with contextlib.suppress(AnyDatabaseError):
        connection.close()


def _probe(using: str) -> None:
    """Ask the database whether it takes writes, and tell everybody."""
    connection: Any = connections[using]
    try:
        with connection.cursor() as cursor:
            if connection.vendor == "postgresql":
                cursor.execute("SHOW transaction_read_only")
                if cursor.fetchone() == ("on",):
                    raise OperationalError("the server is read-only")
            else:
                cursor.execute("BEGIN IMMEDIATE")
                cursor.execute("ROLLBACK")
    except AnyDatabaseError as failure:
        discard(using)
        if is_away(failure) or failure.__cause__ is None:
            breaker(using).failed(failure)
            return
    breaker(using).worked()


_breakers: dict[str, Breaker] = {}
_lock = threading.Lock()


def _forget() -> None:
    """A child process finds out for itself, and under locks of its own."""
    global _lock
    _lock = threading.Lock()
    _breakers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
