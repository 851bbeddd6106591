"""Every use of Django's undocumented parts: Django may change any of it.

This module has the functions on a connection and its transaction; `late_atomic.py` the
block that begins late, and `views.py` the wrapper of views.
`tests/unit/test_django_internals.py` names every attribute and method, fails on a
Django that lacks one, and finds other files that use them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import Error
from django.db.transaction import TransactionManagementError

#: psycopg's TransactionStatus INERROR, in which COMMIT means ROLLBACK, and UNKNOWN, in
#: which the connection is gone.
_SPOILED = (3, 4)


def in_block(connection: Any) -> bool:
    """Return whether an atomic block is open."""
    return bool(connection.in_atomic_block)


def depth(connection: Any) -> int:
    """Return how many nested atomic blocks are open."""
    return len(connection.atomic_blocks)


def roll_back_blocks(connection: Any, above: int) -> bool:
    """Roll back the atomic blocks that were entered and not left, except the outer
    `above` ones. Returns whether there are any."""
    if len(connection.atomic_blocks) <= above:
        return False
    forgotten = connection.atomic_blocks[above:]
    error = RuntimeError("this block was entered and not left")
    for block in reversed(forgotten):
        with contextlib.suppress(Error):
            block.__exit__(RuntimeError, error, None)
    return True


def in_testcase(connection: Any) -> bool:
    """Return whether a TestCase's block, which is certain to be rolled back, is
    open."""
    return any(block._from_testcase for block in connection.atomic_blocks)


def must_roll_back(connection: Any) -> bool:
    """Return whether the innermost block can only roll back: because of an error, seen
    by Django or not, or of `set_rollback()`."""
    return bool(connection.needs_rollback) or is_broken(connection)


def is_broken(connection: Any) -> bool:
    """Return whether the transaction of an open block cannot commit: its connection was
    closed, or the database has ended it. If the error was caught, Django does not
    know."""
    raw, spoiled = connection.connection, bool(connection.closed_in_transaction)
    if connection.vendor == "postgresql" and raw is not None:
        spoiled |= raw.info.transaction_status in _SPOILED
    return spoiled or _rolled_back_by_sqlite(connection)


def _rolled_back_by_sqlite(connection: Any) -> bool:
    """Return whether SQLite has rolled back the open transaction by itself, as it does
    if the disk is full: what follows would be committed at once, statement by
    statement."""
    raw = connection.connection
    begun = connection.in_atomic_block and not connection.autocommit
    return bool(
        connection.vendor == "sqlite" and begun and raw and not raw.in_transaction
    )


def cause_of_rollback(connection: Any) -> BaseException | None:
    """Return the error because of which the open block can only roll back, or else the
    last one of a statement since `note_errors()`."""
    error: BaseException | None = connection.rollback_exc
    while isinstance(error, TransactionManagementError) and error.__cause__:
        error = error.__cause__  # Django's error about statements after the first
    return error


def note_errors(connection: Any) -> Callable[[], None]:
    """Record errors of statements from now on, also of those sent by a cursor and then
    caught, which Django forgets. After SQLite has rolled back by itself, Django refuses
    further statements. Returns a function that ends this."""

    def note(execute: Any, *statement: Any) -> Any:
        try:
            return execute(*statement)
        except Error as error:
            if not _is_consequence(error):
                connection.rollback_exc = error
            if _rolled_back_by_sqlite(connection):
                connection.needs_rollback = True
            raise

    def end() -> None:
        if note in connection.execute_wrappers:
            connection.execute_wrappers.remove(note)

    connection.rollback_exc = None
    # The outermost: others remove theirs, in Django's own way, by removing the last.
    connection.execute_wrappers.insert(0, note)
    return end


def _is_consequence(error: BaseException) -> bool:
    """Return whether Django or PostgreSQL has refused a statement because an earlier
    one of its transaction failed."""
    if isinstance(error, TransactionManagementError):
        return True
    cause = error.__cause__
    return "25P02" in (getattr(cause, "sqlstate", ""), getattr(cause, "pgcode", ""))


def refuses_durable(error: BaseException) -> bool:
    """Return whether this is Django's error about `atomic(durable=True)` in a block."""
    # Not by its text: the text of a handler's own error may raise.
    text = error.args[0] if type(error) is RuntimeError and error.args else None
    return type(text) is str and "durable atomic" in text


def hear_rollbacks(connection: Any, hear: Callable[[bool], None]) -> Callable[[], None]:
    """Call `hear` with the argument of `set_rollback()` for the block that is innermost
    now. Returns a function that ends this."""
    usual, level = connection.set_rollback, len(connection.atomic_blocks)
    before = connection.__dict__.get("set_rollback")

    def set_rollback(rollback: bool) -> None:
        usual(rollback)
        if len(connection.atomic_blocks) == level:
            hear(rollback)

    def end() -> None:
        del connection.set_rollback
        if before is not None:
            connection.set_rollback = before

    connection.set_rollback = set_rollback
    return end


@contextmanager
def under_savepoint(connection: Any, name: str) -> Iterator[None]:
    """While the block runs, register on_commit hooks under this savepoint, so that its
    rollback drops them."""
    connection.savepoint_ids.append(name)
    try:
        yield
    finally:
        connection.savepoint_ids.pop()


def last_hook(connection: Any) -> Callable[[], object] | None:
    """Return the hook registered last, if it was registered under the savepoints that
    are open now: a rollback that drops a hook registered now would drop it too."""
    for savepoints, hook, *_ in connection.run_on_commit[-1:]:
        if connection.in_atomic_block and savepoints == set(connection.savepoint_ids):
            return hook  # type: ignore[no-any-return]  # Django has no types here
    return None


def hooks(connection: Any) -> Iterator[Callable[[], object]]:
    """Yield the hooks of the current transaction, the oldest first."""
    return (hook for _, hook, *_ in connection.run_on_commit)


def in_memory(connection: Any) -> bool:
    """Return whether the connection is to an in-memory SQLite of this process, as in
    the tests of a project on SQLite. Its connections do not wait for each other's
    locks."""
    return connection.vendor == "sqlite" and bool(connection.is_in_memory_db())


def raw(connection: Any) -> Any:
    """Return the driver's connection, or None if there is none."""
    return connection.connection


def can_listen(connection: Any) -> bool:
    """Return whether the open connection is psycopg 3's, regardless of where parameters
    are bound."""
    return hasattr(connection.connection, "pgconn")


def begins_early(connection: Any) -> bool:
    """Return whether the statement before a transaction can also begin it, as psycopg 3
    permits if it binds parameters itself. Does not connect."""
    return bool(
        can_listen(connection)
        and not connection.in_atomic_block
        and connection.autocommit
        and not connection.features.uses_server_side_binding
    )


def abandon(connection: Any) -> None:
    """Roll back a transaction that a statement began on PostgreSQL and no block has
    taken over."""
    if connection.connection is not None and not connection.in_atomic_block:
        connection.rollback()


def works(connection: Any, *, suspect: bool = False) -> bool:
    """Return whether an open connection works. The server is queried if a query has
    failed as on a broken connection, or if the connection is otherwise `suspect`."""
    return not (suspect or connection.errors_occurred) or bool(connection.is_usable())


def settings_of(connection: Any) -> dict[str, Any]:
    """Return its entry in DATABASES, with Django's defaults."""
    return connection.settings_dict  # type: ignore[no-any-return]  # Django has no types here


def close_at(connection: Any) -> float | None:
    """Return when CONN_MAX_AGE ends, by `time.monotonic()`, or None for never."""
    return connection.close_at  # type: ignore[no-any-return]  # Django has no types here


def as_for_a_new_request(connection: Any) -> None:
    """Have Django check the connection before its next use, with CONN_HEALTH_CHECKS."""
    connection.errors_occurred = connection.health_check_done = False


def delete_where(rows: Any) -> int:
    """Delete a queryset's rows in one statement, which rechecks each row after waiting
    for its lock, and return how many. If `post_delete` has receivers, `delete()` reads
    the rows first, and also deletes rows that no longer match."""
    return int(rows._raw_delete(rows.db) or 0)


def djangos_errors(connection: Any) -> Any:
    """Return a context manager that raises the driver's errors as Django's."""
    return connection.wrap_database_errors
