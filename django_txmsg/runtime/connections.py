"""The database connections of threads that live long, kept as Django keeps a request's.

Django looks after its connections when a request begins and ends. The threads of
`consume` and `relay` have no requests: they call `recycle()` around each piece of work.
"""

from __future__ import annotations

import contextlib
import select
import time
from typing import Any

from django.core.cache import caches
from django.db import connections, transaction

from ..django_internals import (
    as_for_a_new_request,
    close_at,
    in_block,
    raw,
    roll_back_blocks,
    settings_of,
    works,
)

#: Seconds for which a thread with CONN_MAX_AGE = 0 keeps its connection while one
#: piece of work follows the other: a new one for each message would cost more than
#: most messages do. A thread without work gives it back.
KEPT_WHILE_BUSY = 60.0
#: Bytes that are worth a new connection: libpq keeps up to four times as much.
LARGE = 4 * 1024 * 1024


def recycle(*, idle: bool = False, but: str | None = None) -> None:
    """Close what is broken, what is older than its CONN_MAX_AGE, and what belongs to a
    pool. Leaves connections inside of a block alone, and costs no query, but for one
    on a connection that had an error.

    `idle` says that there is no work for the moment, `but` for which alias that is not
    so, since a queue in it is looked at all the time.

    With CONN_HEALTH_CHECKS, Django asks each connection that is left before its next
    use, as in a new request.
    """
    for alias in connections:
        connection = connections[alias]
        if raw(connection) is None or in_block(connection):
            continue
        if _is_to_be_closed(connection, idle and alias != but):
            connection.close()
        else:
            as_for_a_new_request(connection)


def shed(using: str, size: int) -> None:
    """Close a PostgreSQL connection that has just carried `size` bytes, if that is
    much: its buffers have grown with what they carried, and never shrink."""
    connection = connections[using]
    if size < LARGE or connection.vendor != "postgresql":
        return
    if raw(connection) is not None and not in_block(connection):
        connection.close()


def leave_blocks() -> list[str]:
    """Roll back the atomic blocks that a piece of work entered and did not leave: the
    next one would be done inside of them. Call it outside of all blocks of ours.
    Returns the aliases of their databases."""
    found = [alias for alias in connections if in_block(connections[alias])]
    for alias in found:
        roll_back_blocks(connections[alias], 0)
        connections[alias].close()
    return found


def open_caches() -> None:
    """Have this thread's contexts share its caches. Django keeps them in the context:
    made in a message's own, each would be a new one, with new connections."""
    for alias in caches:
        with contextlib.suppress(Exception):  # the handler that uses it will say why
            assert caches[alias] is not None


def close_broken(using: str) -> None:
    """Close a connection that died, so that the next query opens another."""
    connection = connections[using]
    if raw(connection) is None or in_block(connection):
        return
    if not works(connection, suspect=_has_spoken(connection)):
        connection.close()


def _has_spoken(connection: Any) -> bool:
    """Return whether the server has said something unasked, as it does when it ends an
    idle session. Costs no query."""
    if connection.vendor != "postgresql":
        return False
    driver = raw(connection)
    if driver.closed:
        return True
    listener = select.poll()
    listener.register(driver.fileno(), select.POLLIN)
    return bool(listener.poll(0))


def _is_to_be_closed(connection: Any, idle: bool) -> bool:
    settings = settings_of(connection)
    autocommit = transaction.get_autocommit(using=connection.alias)
    if settings["OPTIONS"].get("pool") or autocommit != settings["AUTOCOMMIT"]:
        return True
    no_age = settings["CONN_MAX_AGE"] == 0
    until = close_at(connection)
    if until is not None:
        until += KEPT_WHILE_BUSY if no_age and not idle else 0.0
        if time.monotonic() >= until:
            return True
    return not works(connection, suspect=_has_spoken(connection))
