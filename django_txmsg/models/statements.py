"""Short statements that PostgreSQL is to plan once for a connection, not each time.

To plan an INSERT of two rows costs it more than to do it. Django has psycopg 3 prepare
nothing, since a pooler may give each transaction another connection to the server, on
which nothing was prepared. Whether there is one in between, the number of the server's
process tells: a pooler gives its clients one of its own making.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from typing import Any

from django.db import Error as AnyDatabaseError

from ..django_internals import can_listen, logs_queries, raw, settings_of

log = logging.getLogger("django_txmsg.storing")

#: What one statement on each connection is to return, and `note()` is to be told.
PROCESS = "pg_backend_pid()"
#: Times that a statement is executed on a connection before it is prepared.
THRESHOLD = 3
#: PostgreSQL's code for a prepared statement that is not there.
_NOT_THERE = "26000"
_DJANGOS = "django.db.backends.postgresql.base"
#: Aliases on which somebody has thrown away what was prepared, as by DISCARD ALL.
_given_up: set[str] = set()


def is_unsure(connection: Any) -> bool:
    """Return whether nobody knows yet if statements can be prepared here."""
    return can_listen(connection) and not hasattr(raw(connection), "_txmsg_direct")


def note(connection: Any, process: int) -> None:
    """Know which process of the server has executed a statement."""
    driver = raw(connection)
    names: Any = getattr(driver, "_prepared", None)
    known = driver.info.backend_pid == process and hasattr(names, "_prepared_idx")
    driver._txmsg_direct = known
    if known:
        # psycopg counts names from 0 on each connection. Behind a pooler that is not
        # known as one, somebody else's statement is then not there, and not another.
        names._prepared_idx = secrets.randbits(62)


def fetch(connection: Any, sql: str, parameters: Sequence[Any]) -> list[Any]:
    """Execute a statement and return its rows. Where it may be prepared, the server
    binds the parameters: their types have to be plain from the text."""
    if not _can_prepare(connection):
        return _fetch(connection, sql, parameters)
    from psycopg import Cursor

    driver = raw(connection)
    before = driver.cursor_factory, driver.prepare_threshold
    driver.cursor_factory, driver.prepare_threshold = Cursor, THRESHOLD
    try:
        return _fetch(connection, sql, parameters)
    except AnyDatabaseError as error:
        if getattr(error.__cause__, "sqlstate", None) == _NOT_THERE:
            _given_up.add(connection.alias)
            log.warning(
                "somebody has thrown away the statements that were prepared on %r, as "
                "DISCARD ALL does: none is prepared there any more",
                connection.alias,
            )
        raise
    finally:
        driver.cursor_factory, driver.prepare_threshold = before


def _can_prepare(connection: Any) -> bool:
    """Return whether the server is reached directly, and nobody is against it: Django's
    `"prepare_threshold": None`, written out, means never; and cursors that are not
    Django's may be there to trace what they execute."""
    driver, options = raw(connection), settings_of(connection)["OPTIONS"]
    return (
        getattr(driver, "_txmsg_direct", False)
        and driver.cursor_factory.__module__ == _DJANGOS
        and connection.alias not in _given_up
        and options.get("prepare_threshold", THRESHOLD) is not None
        # Django shows what psycopg has bound by itself only.
        and not logs_queries(connection)
    )


def _fetch(connection: Any, sql: str, parameters: Sequence[Any]) -> list[Any]:
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        return cursor.fetchall()  # type: ignore[no-any-return]  # Django has no types here
