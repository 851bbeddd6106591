"""Manages the database connections of long-lived threads, as Django does for requests.

Django checks its connections when a request begins and ends. The threads of `consume`
and `relay` have no requests. They call `recycle()` around each piece of work.
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
    begun_by_hand,
    close_at,
    forget_statements,
    in_block,
    raw,
    roll_back_blocks,
    settings_of,
    works,
)

#: Seconds for which a busy thread with CONN_MAX_AGE = 0 keeps its connection: a new one
#: for each message would cost more than most messages do. An idle thread closes it.
KEPT_WHILE_BUSY = 60.0
#: Bytes that justify a new connection: libpq keeps up to four times as much.
LARGE = 4 * 1024 * 1024


def recycle(*, idle: bool = False, but: str | None = None) -> None:
    """Close connections that are broken, older than their CONN_MAX_AGE, or from a pool.

    Connections inside an atomic block stay open. Only a connection that had an error
    needs a query, which shows whether the connection works.

    Pass `idle=True` if the thread has no work at the moment. Connections with a
    CONN_MAX_AGE of 0 are then closed immediately; a busy thread keeps them for up to a
    minute. The connection to the database `but` counts as busy in any case, because the
    thread polls the queues in that database all the time.

    With CONN_HEALTH_CHECKS, Django checks each remaining connection before its next
    use, as it does in a new request. With DEBUG, each connection forgets the statements
    that Django keeps until the next request.
    """
    for alias in connections:
        connection = connections[alias]
        forget_statements(connection)
        if raw(connection) is None or in_block(connection):
            continue
        if _is_to_be_closed(connection, idle and alias != but):
            connection.close()
        else:
            as_for_a_new_request(connection)


def shed(using: str, size: int) -> None:
    """Close a PostgreSQL connection if it has just transferred at least `LARGE` bytes,
    because its buffers have grown and would never shrink. `size` is the number of bytes
    that it has transferred."""
    connection = connections[using]
    if size < LARGE or connection.vendor != "postgresql":
        return
    if raw(connection) is not None and not in_block(connection):
        connection.close()


def leave_blocks() -> list[str]:
    """Roll back the transactions that a handler has begun and not ended, because the
    next handler of this thread would run inside them. Returns the aliases of the
    databases that had such transactions.

    Call this outside all atomic blocks of this package.
    """
    found = [
        alias
        for alias in connections
        if in_block(connections[alias]) or begun_by_hand(connections[alias])
    ]
    for alias in found:
        roll_back_blocks(connections[alias], 0)
        connections[alias].close()
    return found


def open_caches() -> None:
    """Make all contexts of this thread share Django's caches. Django keeps cache
    objects in the context, and each message has its own context. If the caches were not
    shared, each message would open new connections to them."""
    for alias in caches:
        with contextlib.suppress(Exception):  # the handler that uses it fails
            assert caches[alias] is not None


def close_broken(using: str) -> None:
    """Close this connection if it is broken, so that the next query opens a new one."""
    connection = connections[using]
    if raw(connection) is None or in_block(connection):
        return
    if not works(connection, suspect=_has_spoken(connection)):
        connection.close()


def _has_spoken(connection: Any) -> bool:
    """Return whether the server has sent unrequested bytes, as it does when it ends an
    idle session. Needs no query."""
    if connection.vendor != "postgresql":
        return False
    driver = raw(connection)
    if driver.closed:
        return True
    if not hasattr(select, "poll"):  # eventlet removes it
        return bool(select.select([driver.fileno()], [], [], 0)[0])
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
