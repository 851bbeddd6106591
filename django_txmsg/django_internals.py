"""Every use of Django's undocumented parts, which Django may change.

First come the functions on a connection and its transaction, then the block that begins
late. The wrapper of views is in `middleware.py`. The test
`tests/unit/test_django_internals.py` lists every attribute and method. It fails if a
release of Django lacks one, or if another file of the package uses one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import Error, connections, transaction
from django.db.transaction import TransactionManagementError

#: A function that Django calls after a commit.
Hook = Callable[[], object]
#: psycopg's TransactionStatus INERROR, in which COMMIT means ROLLBACK, and UNKNOWN, in
#: which the connection is gone.
_SPOILED = (3, 4)
#: The same: ACTIVE, INTRANS and INERROR, in which a transaction is open.
_BEGUN = (1, 2, 3)
#: Statements that end a transaction. ROLLBACK TO SAVEPOINT does not.
_ENDS = re.compile(
    r"\s*(COMMIT|END|ABORT|ROLLBACK(?!\s+(WORK\s+|TRANSACTION\s+)?TO\b))\b",
    re.IGNORECASE,
)


def in_block(connection: Any) -> bool:
    """Return whether an atomic block is open."""
    return bool(connection.in_atomic_block)


def isolation_of(connection: Any) -> str:
    """Return the isolation level that the transactions of a connection have by default,
    or "" if its database has no levels. The connection must have been opened once."""
    level = getattr(connection, "isolation_level", None)
    return "" if level is None else str(level.name).lower().replace("_", " ")


def depth(connection: Any) -> int:
    """Return how many nested atomic blocks are open."""
    return len(connection.atomic_blocks)


def roll_back_blocks(connection: Any, above: int) -> bool:
    """Roll back the atomic blocks that are still open, but leave the outermost ones.
    `above` is the number of blocks to leave. Returns whether any block was rolled
    back."""
    if len(connection.atomic_blocks) <= above:
        return False
    forgotten = connection.atomic_blocks[above:]
    error = RuntimeError("this block was entered and not left")
    for block in reversed(forgotten):
        with contextlib.suppress(Error):
            block.__exit__(RuntimeError, error, None)
    return True


def begun_by_hand(connection: Any) -> bool:
    """Return whether a transaction is open, or begins with the next statement, although
    no atomic block is open: `set_autocommit(False)` or BEGIN was executed."""
    raw = connection.connection
    if raw is None or connection.in_atomic_block:
        return False
    if not connection.autocommit:
        return bool(connection.settings_dict["AUTOCOMMIT"])
    if connection.vendor == "sqlite":
        return bool(raw.in_transaction)
    return has_begun(connection)


def has_begun(connection: Any) -> bool:
    """Return whether a transaction is open on a PostgreSQL server."""
    raw = connection.connection
    if connection.vendor != "postgresql" or raw is None:
        return False
    return bool(raw.info.transaction_status in _BEGUN)


def end_by_hand(connection: Any) -> None:
    """Roll back a transaction that no atomic block surrounds, and switch autocommit on.
    If the driver does not permit this, close the connection."""
    with contextlib.suppress(Error):
        connection.rollback()
        connection.set_autocommit(True)
    if begun_by_hand(connection):
        connection.close()  # psycopg2 does not notice a BEGIN


def in_testcase(connection: Any) -> bool:
    """Return whether a transaction of a TestCase is open. Such a transaction is always
    rolled back."""
    return any(block._from_testcase for block in connection.atomic_blocks)


def must_roll_back(connection: Any) -> bool:
    """Return whether the innermost block can only roll back. The cause may be
    `set_rollback()`, or an error, even one that Django has not noticed."""
    return bool(connection.needs_rollback) or is_broken(connection)


def is_broken(connection: Any) -> bool:
    """Return True if the open block's transaction can no longer commit. Either the
    connection was closed, or the database has aborted the transaction or rolled it
    back. Django does not notice this if the application caught the database's
    error."""
    raw, spoiled = connection.connection, bool(connection.closed_in_transaction)
    if connection.vendor == "postgresql" and raw is not None:
        spoiled |= raw.info.transaction_status in _SPOILED
    return spoiled or _rolled_back_by_sqlite(connection)


def _rolled_back_by_sqlite(connection: Any) -> bool:
    """Return whether SQLite has rolled back the open transaction by itself, as it does
    if the disk is full. Any further statement would then be committed alone, as soon as
    it is executed."""
    raw = connection.connection
    begun = connection.in_atomic_block and not connection.autocommit
    return bool(
        connection.vendor == "sqlite" and begun and raw and not raw.in_transaction
    )


def cause_of_rollback(connection: Any) -> BaseException | None:
    """Return the error that forces the open block to roll back. If Django has not
    stored that error, return the last error of a statement since `note_errors()`."""
    error: BaseException | None = connection.rollback_exc
    while isinstance(error, TransactionManagementError) and error.__cause__:
        error = error.__cause__  # Django's error about statements after the first
    return error


def note_errors(connection: Any) -> Callable[[], None]:
    """Record errors of statements from now on. Django itself does not record an error
    that a cursor raised and the caller caught. After SQLite has rolled back by itself,
    further statements are refused. A COMMIT or ROLLBACK of the application is always
    refused. Returns a function that stops recording."""

    def note(execute: Any, sql: Any, *rest: Any) -> Any:
        ends = _ENDS.match(sql) if isinstance(sql, str) else None
        if ends:
            raise TransactionManagementError(
                f"{ends[1].upper()} is forbidden inside a stage or a session, whose "
                f"transaction it would end. Use transaction.atomic(); to roll back, "
                f"raise an exception."
            )
        try:
            return execute(sql, *rest)
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
    """Call `hear` at each `set_rollback()` in the current innermost block, with the
    argument of `set_rollback()`. Returns a function that ends these calls."""
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
def under_savepoint(
    connection: Any, name: str, wrap: Callable[[Hook], Hook]
) -> Iterator[None]:
    """While the block runs, register on_commit hooks under this savepoint, so that its
    rollback drops them. Afterwards, `wrap` the hooks whose errors would keep Django
    from calling the hooks behind them."""
    first = len(connection.run_on_commit)
    connection.savepoint_ids.append(name)
    try:
        yield
    finally:
        connection.savepoint_ids.pop()
    connection.run_on_commit[first:] = [
        (savepoints, hook if robust else wrap(hook), robust)
        for savepoints, hook, robust in connection.run_on_commit[first:]
    ]


def last_hook(connection: Any) -> Callable[[], object] | None:
    """Return the last hook of the transaction, if it was registered under the same
    savepoints that are open now; else None. A new hook would be dropped by the same
    rollbacks as the returned hook. So the caller can use the returned hook instead."""
    for savepoints, hook, *_ in connection.run_on_commit[-1:]:
        if connection.in_atomic_block and savepoints == set(connection.savepoint_ids):
            return hook  # type: ignore[no-any-return]  # Django has no types here
    return None


def hooks(connection: Any) -> Iterator[Callable[[], object]]:
    """Yield the hooks of the current transaction, the oldest first."""
    return (hook for _, hook, *_ in connection.run_on_commit)


def has_ended(connection: Any) -> bool:
    """Return whether no transaction is open. This is so when Django calls the hooks of
    a commit, but not yet when Django drops the hooks of a rollback."""
    return bool(connection.autocommit)


def in_memory(connection: Any) -> bool:
    """Return whether the connection is to an in-memory SQLite of this process, as in
    the tests of a project on SQLite. Such connections do not wait for each other's
    locks."""
    return connection.vendor == "sqlite" and bool(connection.is_in_memory_db())


def raw(connection: Any) -> Any:
    """Return the driver's connection, or None if there is none."""
    return connection.connection


def can_listen(connection: Any) -> bool:
    """Return True if the connection is open, and its driver is psycopg 3. With this
    driver, the package can listen for PostgreSQL's notifications."""
    return hasattr(connection.connection, "pgconn")


def begins_early(connection: Any) -> bool:
    """Return True if one round trip to the server can contain a statement and then a
    BEGIN. This requires an open connection of psycopg 3 that binds parameters on the
    client. No transaction may be open, and autocommit must be on."""
    return bool(
        can_listen(connection)
        and not connection.in_atomic_block
        and connection.autocommit
        and not connection.features.uses_server_side_binding
    )


def abandon(connection: Any) -> None:
    """Roll back a transaction that a statement began on PostgreSQL, and that no block
    has taken over."""
    if connection.connection is not None and not connection.in_atomic_block:
        connection.rollback()


def works(connection: Any, *, suspect: bool = False) -> bool:
    """Return whether an open connection works. The server is queried only if an earlier
    query failed as it would on a broken connection, or if `suspect` is true."""
    return not (suspect or connection.errors_occurred) or bool(connection.is_usable())


def forget_statements(connection: Any) -> None:
    """Empty the log of statements that Django keeps if DEBUG is set. A test that counts
    statements keeps its log."""
    if not connection.force_debug_cursor:
        connection.queries_log.clear()


def settings_of(connection: Any) -> dict[str, Any]:
    """Return the connection's entry in DATABASES, with Django's defaults."""
    return connection.settings_dict  # type: ignore[no-any-return]  # Django has no types here


def close_at(connection: Any) -> float | None:
    """Return the time, by `time.monotonic()`, at which the connection reaches its
    CONN_MAX_AGE, or None if it has no limit."""
    return connection.close_at  # type: ignore[no-any-return]  # Django has no types here


def as_for_a_new_request(connection: Any) -> None:
    """Make Django check the connection before its next use, if CONN_HEALTH_CHECKS is
    set."""
    connection.errors_occurred = connection.health_check_done = False


def delete_where(rows: Any) -> int:
    """Delete a queryset's rows in one statement, and return how many. The statement
    checks the condition again for each row after it has waited for the row's lock.
    Django's `delete()` would read the rows first if `post_delete` has receivers, and
    would also delete rows that no longer match."""
    return int(rows._raw_delete(rows.db) or 0)


def djangos_errors(connection: Any) -> Any:
    """Return a context manager that converts the driver's errors to Django's."""
    return connection.wrap_database_errors


# The block of a transaction that begins with the first use of the database.

#: A connection's state about the atomic blocks around the present query, which it
#: resets when it connects.
_BLOCK = (
    *("in_atomic_block", "commit_on_exit", "needs_rollback"),
    *("savepoint_ids", "atomic_blocks", "run_on_commit"),
)
#: A wrapper that every query passes first.
_FIRST = ("close_if_health_check_failed", "ensure_connection")
#: What a block that has not begun replaces on its connection.
_REPLACED = (*_FIRST, "close")


class LateAtomic:
    """`transaction.atomic(using=using)` that begins its transaction at the first use of
    the database.

    Inside another block, or with autocommit off, it is an ordinary `atomic()`.
    `isolation` is the isolation level of the transaction. `reading` means that the
    block probably only reads. On SQLite such a block takes the write lock at its first
    write, whatever `transaction_mode` says.
    """

    def __init__(
        self, using: str, *, isolation: str | None = None, reading: bool = False
    ) -> None:
        self._connection: Any = connections[using]
        self._atomic = transaction.Atomic(using, True, False)
        self._isolation, self._reading = isolation, reading
        #: Whether any statement was sent to the server.
        self.begun = True

    def enter(self, *, begun: bool = False) -> None:
        """Open the block. Pass `begun=True` if a transaction is already open on the
        server, because a statement outside any block has begun it (`begins_early()`).
        The block then takes over this transaction."""
        connection = self._connection
        manual = connection.connection is not None and not connection.autocommit
        if connection.in_atomic_block or manual:
            self._atomic.__enter__()
            return
        connection.commit_on_exit = True
        connection.needs_rollback = False
        connection.in_atomic_block = True
        connection.atomic_blocks.append(self._atomic)
        if begun:
            # Django's flag; the driver itself need not begin anything any more.
            connection.autocommit = False
            connection.create_cursor = functools.partial(_create_cursor, connection)
        else:
            self._wait()

    def exit(self, error: BaseException | None) -> None:
        """If the transaction has begun, commit it, or roll it back if there is an
        `error`."""
        if self.begun:
            self._atomic.__exit__(type(error) if error else None, error, None)
            return
        connection = self._connection
        self._wait_no_more()
        connection.atomic_blocks.pop()
        connection.in_atomic_block = False
        undone = error is not None or connection.needs_rollback
        connection.needs_rollback = False
        if connection.closed_in_transaction:
            connection.connection = None
        if undone:
            connection.run_on_commit = []
        else:
            connection.run_and_clear_commit_hooks()

    def forget(self) -> None:
        """Exit the block in a forked child process. Call this if the parent was inside
        the block when it forked, and the transaction had not begun. The child then
        starts inside the block too, and no other code in the child exits it."""
        connection = self._connection
        self._wait_no_more()
        connection.in_atomic_block = connection.needs_rollback = False
        connection.atomic_blocks, connection.savepoint_ids = [], []
        connection.run_on_commit = []

    def _wait(self) -> None:
        self.begun = False
        for name in _FIRST:
            setattr(self._connection, name, self._begin)
        self._connection.close = self._close

    def _wait_no_more(self) -> None:
        for name in _REPLACED:
            delattr(self._connection, name)

    def _close(self) -> None:
        """Close the connection. If there is none, do nothing: Django's own method
        would forget the hooks of this block, which still commits."""
        if self._connection.connection is not None:
            type(self._connection).close(self._connection)

    def _begin(self) -> None:
        connection = self._connection
        if connection.closed_in_transaction:
            # Django's error reports it; a new connection would hide it.
            return
        block = {name: getattr(connection, name) for name in _BLOCK}
        mode = None
        self._wait_no_more()
        connection.in_atomic_block = False
        try:
            connection.close_if_health_check_failed()
            connection.ensure_connection()
            mode = getattr(connection, "transaction_mode", None)  # of SQLite
            if self._reading and mode is not None:
                connection.transaction_mode = None
            connection.set_autocommit(
                False, force_begin_transaction_with_broken_autocommit=True
            )
        except BaseException:
            self._wait()
            raise
        finally:
            if mode is not None:
                connection.transaction_mode = mode
            # connect() resets the state to a new connection, outside of any block.
            for name, value in block.items():
                setattr(connection, name, value)
        self.begun = True
        if self._isolation is not None and connection.vendor == "postgresql":
            # Valid for this transaction only, and only before its first query.
            with connection.cursor() as cursor:
                cursor.execute(f"SET TRANSACTION ISOLATION LEVEL {self._isolation}")


def _create_cursor(connection: Any, name: str | None = None) -> Any:
    """Do the same as Django's method, but create no cursor WITH HOLD inside a block.
    Django looks at the autocommit mode of the driver, which has not begun the block's
    transaction. PostgreSQL refuses such a cursor for SELECT … FOR UPDATE."""
    if name is None or not connection.in_atomic_block:
        return type(connection).create_cursor(connection, name)
    from django.db.backends.postgresql.base import ServerSideCursor
    from django.db.backends.postgresql.psycopg_any import register_tzloader

    kind: Any = ServerSideCursor  # its stub has no parameters
    cursor = kind(connection.connection, name, scrollable=False, withhold=False)
    register_tzloader(connection.timezone, cursor)
    return cursor


def _forked() -> None:
    """In a forked child, exit the blocks whose transactions have not begun, because
    these blocks belong to the parent."""
    for connection in connections.all(initialized_only=True):
        begin = vars(connection).get(_FIRST[0])
        if begin is not None:
            begin.__self__.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
