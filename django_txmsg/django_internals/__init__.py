"""All that is used of Django without its documentation: Django may change any of it.

Here, what a connection and its transaction are asked; `late_atomic.py` is the block
that begins late, and `views.py` what is around every view.
`tests/unit/test_django_internals.py` names every attribute and method, fails on a
Django that lacks one, and finds other files that use them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import Error

#: psycopg's TransactionStatus INERROR, where COMMIT means ROLLBACK, and UNKNOWN, where
#: the connection is gone.
_SPOILED = (3, 4)


def in_block(connection: Any) -> bool:
    """Return whether an atomic block is open."""
    return bool(connection.in_atomic_block)


def depth(connection: Any) -> int:
    """Return how many atomic blocks are open, one inside of the other."""
    return len(connection.atomic_blocks)


def roll_back_blocks(connection: Any, above: int) -> bool:
    """Roll back the atomic blocks that were entered and not left, but for the outer
    `above` ones. Returns whether there are any."""
    if len(connection.atomic_blocks) <= above:
        return False
    forgotten = connection.atomic_blocks[above:]
    error = RuntimeError("somebody entered this block and did not leave it")
    for block in reversed(forgotten):
        with contextlib.suppress(Error):
            block.__exit__(RuntimeError, error, None)
    return True


def in_testcase(connection: Any) -> bool:
    """Return whether a TestCase's block, which is rolled back for sure, is open."""
    return any(block._from_testcase for block in connection.atomic_blocks)


def must_roll_back(connection: Any) -> bool:
    """Return whether the innermost block can only roll back: an error left it so, seen
    by Django or not, or `set_rollback()` did."""
    return bool(connection.needs_rollback) or is_broken(connection)


def is_broken(connection: Any) -> bool:
    """Return whether the transaction of an open block cannot commit: its connection was
    closed, or PostgreSQL has ended it. A caught error hides that from Django."""
    raw, spoiled = connection.connection, bool(connection.closed_in_transaction)
    if connection.vendor == "postgresql" and raw is not None:
        spoiled |= raw.info.transaction_status in _SPOILED
    return spoiled


def cause_of_rollback(connection: Any) -> BaseException | None:
    """Return the error that left the open block nothing but to roll back."""
    return connection.rollback_exc  # type: ignore[no-any-return]  # Django has no types here


def refuses_durable(error: BaseException) -> bool:
    """Return whether this is what Django says of `atomic(durable=True)` in a block."""
    # Not by its text: that of a handler's own error may raise.
    said = error.args[0] if type(error) is RuntimeError and error.args else None
    return type(said) is str and "durable atomic" in said


def hear_rollbacks(connection: Any, hear: Callable[[bool], None]) -> Callable[[], None]:
    """Call `hear` with what `set_rollback()` is told for the block that is innermost
    now. Returns what ends it."""
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
    """Have hooks that are registered inside dropped by this savepoint's rollback."""
    connection.savepoint_ids.append(name)
    try:
        yield
    finally:
        connection.savepoint_ids.pop()


def last_hook(connection: Any) -> Callable[[], object] | None:
    """Return the hook registered last, if it was registered under the savepoints that
    are open now: what drops a hook registered now would drop that one too."""
    for savepoints, hook, *_ in connection.run_on_commit[-1:]:
        if connection.in_atomic_block and savepoints == set(connection.savepoint_ids):
            return hook  # type: ignore[no-any-return]  # Django has no types here
    return None


def in_memory(connection: Any) -> bool:
    """Return whether it is to SQLite in the memory of this process, as in the tests of
    a project on SQLite. Connections to it wait for no lock of another."""
    return connection.vendor == "sqlite" and bool(connection.is_in_memory_db())


def raw(connection: Any) -> Any:
    """Return the driver's connection, or None while there is none."""
    return connection.connection


def can_listen(connection: Any) -> bool:
    """Return whether the open connection is psycopg 3's, whatever binds parameters."""
    return hasattr(connection.connection, "pgconn")


def begins_early(connection: Any) -> bool:
    """Return whether the statement before a transaction can begin it too, which psycopg
    3 lets it as long as it binds by itself. Does not connect."""
    return bool(
        can_listen(connection)
        and not connection.in_atomic_block
        and connection.autocommit
        and not connection.features.uses_server_side_binding
    )


def abandon(connection: Any) -> None:
    """Roll back what a statement began on PostgreSQL and no block has taken over."""
    if connection.connection is not None and not connection.in_atomic_block:
        connection.rollback()


def works(connection: Any, *, suspect: bool = False) -> bool:
    """Return whether a connection that is open works. The server is asked if a query
    has failed as on a broken connection, or if something else makes it `suspect`."""
    return not (suspect or connection.errors_occurred) or bool(connection.is_usable())


def settings_of(connection: Any) -> dict[str, Any]:
    """Return its part of DATABASES, with Django's defaults."""
    return connection.settings_dict  # type: ignore[no-any-return]  # Django has no types here


def close_at(connection: Any) -> float | None:
    """Return when CONN_MAX_AGE ends, by `time.monotonic()`, or None for never."""
    return connection.close_at  # type: ignore[no-any-return]  # Django has no types here


def as_for_a_new_request(connection: Any) -> None:
    """Have Django ask the connection before its next use, with CONN_HEALTH_CHECKS."""
    connection.errors_occurred = connection.health_check_done = False


def delete_where(rows: Any) -> int:
    """Delete a queryset's rows in one statement, which looks at each again once nobody
    else holds it, and return how many. Where anybody listens to `post_delete`,
    `delete()` reads them first, and deletes what they have become meanwhile, too."""
    return int(rows._raw_delete(rows.db) or 0)


def djangos_errors(connection: Any) -> Any:
    """Return a context manager that raises the driver's errors as Django's."""
    return connection.wrap_database_errors
