"""All that is used of Django without its documentation: Django may change any of it.

`tests/unit/test_django_internals.py` names every attribute and method, fails on a
Django that lacks one, and finds other files that use them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.core.handlers.base import BaseHandler
from django.db import Error, connections, transaction
from django.http import HttpRequest

View = Callable[..., Any]

#: What a connection knows of the atomic blocks around the present query, and forgets
#: when it connects.
_BLOCK = (
    *("in_atomic_block", "commit_on_exit", "needs_rollback"),
    *("savepoint_ids", "atomic_blocks", "run_on_commit"),
)
#: What every query passes before anything else.
_FIRST = ("close_if_health_check_failed", "ensure_connection")
#: psycopg's TransactionStatus INERROR, where COMMIT means ROLLBACK, and UNKNOWN, where
#: the connection is gone.
_SPOILED = (3, 4)


class LateAtomic:
    """`transaction.atomic(using=using)`, begun with the first use of the database.

    Inside another block, and where autocommit is off, it is an `atomic()` as any other.
    `isolation` is its transaction's level. `reading`: it probably only reads, and
    SQLite locks when there is something to write, whatever `transaction_mode` says.
    """

    def __init__(
        self, using: str, *, isolation: str | None = None, reading: bool = False
    ) -> None:
        self._connection: Any = connections[using]
        self._atomic = transaction.Atomic(using, True, False)
        self._isolation, self._reading = isolation, reading
        #: Whether anything was said to the server.
        self.begun = True

    def enter(self, *, begun: bool = False) -> None:
        """Open the block. `begun`: a statement has begun the transaction already, on a
        connection that is outside of any block (`begins_early()`)."""
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
            # Django's word for it; the driver itself has nothing to begin any more.
            connection.autocommit = False
        else:
            self._wait()

    def exit(self, error: BaseException | None) -> None:
        """Commit, or roll back because of the error, if anything has begun."""
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

    def _wait(self) -> None:
        self.begun = False
        for name in _FIRST:
            setattr(self._connection, name, self._begin)

    def _wait_no_more(self) -> None:
        for name in _FIRST:
            delattr(self._connection, name)

    def _begin(self) -> None:
        connection = self._connection
        if connection.closed_in_transaction:
            # Django's error says so; a new connection would hide it.
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
            # connect() takes the connection for a new one, outside of any block.
            for name, value in block.items():
                setattr(connection, name, value)
        self.begun = True
        if self._isolation is not None and connection.vendor == "postgresql":
            # Valid for this transaction only, and only before its first query.
            with connection.cursor() as cursor:
                cursor.execute(f"SET TRANSACTION ISOLATION LEVEL {self._isolation}")


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
    return isinstance(error, RuntimeError) and "durable atomic" in str(error)


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


def registered_hooks(connection: Any) -> list[Callable[[], object]]:
    """Return the functions that are to run after the commit, as far as no savepoint's
    rollback has dropped them."""
    return [hook for _, hook, *_ in connection.run_on_commit]


def last_hook(connection: Any) -> Callable[[], object] | None:
    """Return the hook registered last, if it was under the very savepoints that are
    open now: whatever drops one that is registered now would drop that one too."""
    for savepoints, hook, *_ in connection.run_on_commit[-1:]:
        if connection.in_atomic_block and savepoints == set(connection.savepoint_ids):
            return hook  # type: ignore[no-any-return]  # Django has no types here
    return None


def raw(connection: Any) -> Any:
    """Return the driver's connection, or None while there is none."""
    return connection.connection


def begins_early(connection: Any) -> bool:
    """Return whether the statement before a transaction can begin it too, which psycopg
    3 lets it as long as it binds by itself. Does not connect."""
    return bool(
        hasattr(connection.connection, "pgconn")
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


def djangos_errors(connection: Any) -> Any:
    """Return a context manager that raises the driver's errors as Django's."""
    return connection.wrap_database_errors


def is_non_atomic(view: View, using: str) -> bool:
    """Return whether `transaction.non_atomic_requests()` was said of a view."""
    return using in getattr(view, "_non_atomic_requests", ())


def wrap_views(
    wrap: Callable[[View, View, Callable[[str], View]], View],
    hear: Callable[[HttpRequest, Exception], None],
) -> None:
    """Have every handler run views as `wrap` says, and tell `hear` first of what they
    and their templates raise. Once a process.

    `wrap` is given a view, the view inside the blocks that ATOMIC_REQUESTS puts around
    it, and what returns the same without the block of one database. These methods are
    the one place before every process_exception(), and the one around a view alone.
    """
    usual = BaseHandler.make_view_atomic
    asking = BaseHandler.process_exception_by_middleware
    if hasattr(usual, "txmsg"):
        return

    @functools.wraps(asking)
    def asked(handler: BaseHandler, error: Exception, request: HttpRequest) -> Any:
        hear(request, error)
        return asking(handler, error, request)

    @functools.wraps(usual)
    def made_atomic(handler: BaseHandler, view: View) -> View:
        def without_atomic(using: str) -> View:
            # A copy, with a set of its own: the view may be used elsewhere.
            @functools.wraps(view)
            def bare(*args: Any, **kwargs: Any) -> Any:
                return view(*args, **kwargs)

            declared: set[str] = getattr(view, "_non_atomic_requests", set())
            bare._non_atomic_requests = {*declared, using}  # type: ignore[attr-defined]  # a mark on a function
            return usual(handler, bare)

        return wrap(view, usual(handler, view), without_atomic)

    made_atomic.txmsg = True  # type: ignore[attr-defined]  # a mark on a function
    handlers: Any = BaseHandler
    handlers.make_view_atomic = made_atomic
    handlers.process_exception_by_middleware = asked
