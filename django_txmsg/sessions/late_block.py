"""Hop 1's transaction, which begins when the database is first asked for something.

`transaction.atomic()` connects, and on SQLite takes a lock, for a view that asks the
database nothing. Everything else is as there: the block is open from its entry on, for
`on_commit()`, `set_rollback()`, savepoints and `send_message()`.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from django.db import connections, transaction

#: What a connection knows of the atomic blocks around the present query, and forgets
#: when it connects.
_BLOCK = (
    "in_atomic_block",
    "commit_on_exit",
    "needs_rollback",
    "savepoint_ids",
    "atomic_blocks",
    "run_on_commit",
)


class LateBlock:
    """`transaction.atomic(using=using)`, begun late if it is the outermost block.

    `reading` says that it probably only reads: then SQLite takes its lock for writing
    when there is something to write, whatever `transaction_mode` says.
    """

    def __init__(self, using: str, *, reading: bool = False) -> None:
        self._connection: Any = connections[using]
        self._atomic = transaction.Atomic(using, True, False)
        self._reading = reading
        self._waiting = False

    def enter(self) -> None:
        """Open the block."""
        connection = self._connection
        manual = connection.connection is not None and not connection.autocommit
        if connection.in_atomic_block or manual:
            self._atomic.__enter__()
            return
        self._waiting = True
        connection.commit_on_exit = True
        connection.needs_rollback = False
        connection.in_atomic_block = True
        connection.atomic_blocks.append(self._atomic)
        # Every cursor, savepoint and question for the mode goes through it.
        connection.ensure_connection = self._begin

    def exit(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None = None,
    ) -> None:
        """Commit, or roll back because of the error, if anything has begun."""
        if not self._waiting:
            self._atomic.__exit__(kind, error, traceback)
            return
        connection = self._connection
        del connection.ensure_connection
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

    def _begin(self) -> None:
        connection = self._connection
        block = {name: getattr(connection, name) for name in _BLOCK}
        if connection.closed_in_transaction:
            # Django's error says so; a new connection would hide it.
            return
        del connection.ensure_connection
        connection.in_atomic_block = False
        try:
            connection.ensure_connection()
            self._begin_now()
            self._waiting = False
        finally:
            # connect() takes the connection for a new one, outside of any block.
            for name, value in block.items():
                setattr(connection, name, value)
            if self._waiting:
                connection.ensure_connection = self._begin

    def _begin_now(self) -> None:
        connection = self._connection
        mode = getattr(connection, "transaction_mode", None)
        if self._reading and mode is not None:
            connection.transaction_mode = None
        try:
            connection.set_autocommit(
                False, force_begin_transaction_with_broken_autocommit=True
            )
        finally:
            if mode is not None:
                connection.transaction_mode = mode
