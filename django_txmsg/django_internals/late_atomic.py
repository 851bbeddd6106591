"""The block of a transaction that begins with the first use of the database."""

from __future__ import annotations

import os
from typing import Any

from django.db import connections, transaction

#: A connection's state about the atomic blocks around the present query, which it
#: resets when it connects.
_BLOCK = (
    *("in_atomic_block", "commit_on_exit", "needs_rollback"),
    *("savepoint_ids", "atomic_blocks", "run_on_commit"),
)
#: A wrapper that every query passes first.
_FIRST = ("close_if_health_check_failed", "ensure_connection")


class LateAtomic:
    """`transaction.atomic(using=using)`, begun with the first use of the database.

    Inside another block, and with autocommit off, it is an ordinary `atomic()`.
    `isolation` is its transaction's level. `reading`: it probably only reads, so SQLite
    takes the write lock only for a write, whatever `transaction_mode` says.
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
            # Django's flag; the driver itself need not begin anything any more.
            connection.autocommit = False
        else:
            self._wait()

    def exit(self, error: BaseException | None) -> None:
        """Commit, or roll back because of the error, if the transaction has begun."""
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
        """Leave the block in a child that was forked before anything began: nothing
        there would commit the child's work."""
        connection = self._connection
        self._wait_no_more()
        connection.in_atomic_block = connection.needs_rollback = False
        connection.atomic_blocks, connection.savepoint_ids = [], []
        connection.run_on_commit = []

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


def _forked() -> None:
    """The blocks belong to the parent, and so does a transaction that has begun."""
    for connection in connections.all(initialized_only=True):
        begin = vars(connection).get(_FIRST[0])
        if begin is not None:
            begin.__self__.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
