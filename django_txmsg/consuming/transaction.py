"""The database transaction around a stage: lazy, defined, and guarded.

`Demarcation` is `transaction.atomic()` with three differences: it connects only when
the first query comes, it knows whether one came, and it sets the isolation level.
`guarded()` is around the handler, and refuses what Django would roll back quietly.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from django.db import DatabaseError, connections, transaction

from ..errors import DurableInStage, SwallowedDatabaseError
from ..stages import TransactionDefinition
from ..upkeep.connections import has_spoken

log = logging.getLogger("django_txmsg.demarcation")

#: psycopg's TransactionStatus of a connection without a transaction.
_IDLE = 0
#: psycopg's TransactionStatus INERROR, where COMMIT means ROLLBACK, and UNKNOWN, where
#: the connection is gone.
_SPOILED = (3, 4)


@contextmanager
def guarded(using: str) -> Iterator[None]:
    """Around a handler, inside its transaction or savepoint.

    Raises SwallowedDatabaseError when the handler hid a database error, so that leaving
    the block without an exception would roll its work back in silence; DurableInStage
    for an `atomic(durable=True)` inside.
    """
    try:
        yield
    except RuntimeError as error:
        if "durable atomic" not in str(error):
            raise
        raise DurableInStage(
            "atomic(durable=True) cannot be entered inside a stage, whose transaction "
            "surrounds it."
        ) from error
    connection: Any = connections[using]
    spoiled = connection.needs_rollback
    if connection.vendor == "postgresql" and connection.connection is not None:
        spoiled = spoiled or connection.connection.info.transaction_status in _SPOILED
    if spoiled:
        raise SwallowedDatabaseError(
            f"A database error on {using!r} was caught inside the stage and its "
            f"transaction can only roll back. Let the error propagate, or put the "
            f"failing query into an atomic() and catch it outside of that."
        )


#: What a connection knows of the atomic blocks around the present query.
_BLOCK = (
    "in_atomic_block",
    "commit_on_exit",
    "needs_rollback",
    "savepoint_ids",
    "atomic_blocks",
    "run_on_commit",
)


def begins_early(using: str) -> bool:
    """Return whether the statement before a stage's transaction can begin it as well:
    several to a round trip, which psycopg 3 sends as long as it binds by itself."""
    connection: Any = connections[using]
    return (
        connection.vendor == "postgresql"
        and not connection.in_atomic_block
        and connection.autocommit
        and hasattr(connection.connection, "pgconn")
        and not connection.features.uses_server_side_binding
    )


def lost_conflict(error: BaseException) -> bool:
    """Return whether PostgreSQL has rolled a transaction back for another one's sake,
    which a repetition mends: a serialization failure or a deadlock."""
    state = getattr(error.__cause__, "sqlstate", None)
    return isinstance(error, DatabaseError) and state in ("40001", "40P01")


def abandon(using: str) -> None:
    """Roll back what was begun early, if no `Demarcation` has taken it over."""
    connection: Any = connections[using]
    if connection.connection is None or connection.in_atomic_block:
        return
    if connection.connection.info.transaction_status != _IDLE:
        connection.rollback()


class Demarcation:
    """A context manager that may be entered once.

    `begun` says that the server has begun the transaction already. On leaving without
    an exception it commits; `committed` says that it did, even when a hook that ran
    after the commit raised, which is logged and not propagated.
    """

    def __init__(
        self, definition: TransactionDefinition, *, begun: bool = False
    ) -> None:
        self._definition = definition
        self._begun = begun
        self._connection: Any = connections[definition.using]
        self._atomic = transaction.Atomic(definition.using, True, False)
        self._lazy = False
        self._outermost = True
        self.employed = False
        self.committed = False

    def __enter__(self) -> Demarcation:
        connection = self._connection
        if self._begun:
            self._open_block()
            # Django's word for it; psycopg itself has nothing to begin any more.
            connection.autocommit = False
            self.employed = True
            connection.on_commit(self._note_commit)
            return self
        self._discard_stale()
        # In a project's TestCase the block is a savepoint.
        self._outermost = not connection.in_atomic_block
        if connection.connection is None and self._outermost:
            self._enter_lazily()
        else:
            self._atomic.__enter__()
        connection.execute_wrappers.append(self._on_query)
        # The first hook of all: whatever raises after it, raises after the commit.
        connection.on_commit(self._note_commit)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        connection = self._connection
        if not self._begun:
            connection.execute_wrappers.remove(self._on_query)
        try:
            if self._lazy:
                self._leave_unused(error)
            else:
                self._atomic.__exit__(kind, error, traceback)
        except Exception as late:
            if not self.committed:
                raise
            log.exception(
                "an on_commit hook raised after the commit; the message is processed "
                "and is not processed again: %s",
                late,
            )

    def _note_commit(self) -> None:
        self.committed = True

    def _on_query(
        self, execute: Any, sql: Any, params: Any, many: Any, context: Any
    ) -> Any:
        if not self.employed:
            self.employed = True
            level = self._definition.isolation
            postgresql = self._connection.vendor == "postgresql"
            if level is not None and postgresql and self._outermost:
                # Valid for this transaction only, and only before its first query.
                execute(
                    f"SET TRANSACTION ISOLATION LEVEL {level}", None, False, context
                )
        return execute(sql, params, many, context)

    def _discard_stale(self) -> None:
        connection = self._connection
        if connection.in_atomic_block or connection.connection is None:
            return
        suspect = connection.errors_occurred or has_spoken(connection)
        if suspect and not connection.is_usable():
            connection.close()

    def _open_block(self) -> None:
        connection = self._connection
        connection.in_atomic_block = True
        connection.commit_on_exit = True
        connection.needs_rollback = False
        connection.atomic_blocks.append(self._atomic)

    def _enter_lazily(self) -> None:
        """Open the block as Atomic would, but leave the connection to the first query:
        `connect()` then begins the transaction and takes the block over."""
        connection = self._connection
        self._lazy = True
        self._open_block()
        connect = type(connection).connect

        def connect_and_begin() -> None:
            block = {name: getattr(connection, name) for name in _BLOCK}
            try:
                connect(connection)
                connection.set_autocommit(
                    False, force_begin_transaction_with_broken_autocommit=True
                )
            finally:
                # connect() takes the connection for a new one, outside of any block.
                for name, value in block.items():
                    setattr(connection, name, value)
            del connection.connect
            self._lazy = False

        connection.connect = connect_and_begin

    def _leave_unused(self, error: BaseException | None) -> None:
        connection = self._connection
        del connection.connect
        connection.atomic_blocks.pop()
        connection.in_atomic_block = False
        connection.needs_rollback = False
        if error is None:
            # Nothing to commit; the hooks follow as after an empty transaction.
            connection.run_and_clear_commit_hooks()
        else:
            connection.run_on_commit = []
