"""The database transaction around a stage: late, defined, and guarded.

`StageTransaction` is the block with the options of a stage's definition; nothing that
happens after its commit fails the stage. `guarded()` wraps the handler, and refuses
what Django would roll back silently.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from django.db import DatabaseError, connections
from django.db import Error as AnyDatabaseError

from ..django_internals import (
    cause_of_rollback,
    depth,
    must_roll_back,
    refuses_durable,
    roll_back_blocks,
)
from ..envelope.transaction_definition import TransactionDefinition
from ..errors import (
    BlockLeftOpen,
    BrokerUnavailable,
    DurableInStage,
    SwallowedDatabaseError,
)
from ..runtime import database_health
from ..sending.block import Block

log = logging.getLogger("django_txmsg.demarcation")

#: Most repetitions of a transaction that lost conflicts.
MAX_CONFLICTS = 10


@contextmanager
def guarded(using: str) -> Iterator[None]:
    """Around a handler, inside its transaction or savepoint.

    Raises SwallowedDatabaseError if the handler hid a database error, so that leaving
    the block without an exception would silently roll its work back; DurableInStage for
    an `atomic(durable=True)` inside; BlockLeftOpen for an `atomic()` that it did not
    leave, which would keep the stage's own transaction from ending.
    """
    connection = connections[using]
    outer, left_open = depth(connection), False
    try:
        try:
            yield
        finally:
            left_open = roll_back_blocks(connection, outer)
    except RuntimeError as error:
        if not refuses_durable(error):
            raise
        raise DurableInStage(
            "atomic(durable=True) cannot be entered inside a stage, whose transaction "
            "surrounds it."
        ) from error
    if left_open:
        raise BlockLeftOpen(
            f"A transaction.atomic() on {using!r} was entered inside the stage and not "
            f"left. Use it in a with statement, or as a decorator."
        )
    if must_roll_back(connection):
        cause = cause_of_rollback(connection)
        if cause is not None and database_health.lacks_resources(cause):
            raise cause  # hidden or not, it is no failure of the message
        raise SwallowedDatabaseError(
            f"A database error on {using!r} was caught inside the stage and its "
            f"transaction can only roll back. Let the error propagate, or put the "
            f"failing query into an atomic() and catch it outside of that."
        ) from cause


def lost_conflict(error: BaseException) -> bool:
    """Return whether PostgreSQL has rolled back a transaction because of a conflict, so
    that a repetition may succeed: a serialization failure or a deadlock."""
    lost = isinstance(error, DatabaseError)
    return lost and database_health.sqlstate(error) in ("40001", "40P01")


class Conflicts:
    """The repetitions of work that lost a conflict: at once, then at growing
    intervals."""

    def __init__(self) -> None:
        self._count = 0

    def mends(self, error: BaseException) -> bool:
        """Return whether to repeat what ended with this error, once more."""
        if self._count >= MAX_CONFLICTS or not lost_conflict(error):
            return False
        self._count += 1
        return True

    @property
    def pause(self) -> float:
        """Seconds until then."""
        longest = min(0.5, 0.002 * 2**self._count)
        return random.uniform(0, longest)  # noqa: S311 - no secret


def is_outage(error: BaseException, raw: Any) -> bool:
    """Return whether the broker failed, or the database of the stage's own transaction,
    and not the message. `raw` is the driver's connection it ran on: queries of the
    handler on other databases are the handler's, and leave that connection open."""
    if isinstance(error, BrokerUnavailable):
        return True
    return database_health.is_away(error) and bool(getattr(raw, "closed", False))


class Undecided(Exception):
    """The database has refused a statement of the package, as `error` says. That is no
    failure of the message, nor of its handler."""

    def __init__(self, error: AnyDatabaseError) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def ours() -> Iterator[None]:
    """Around statements of the package in a stage's transaction.

    Raises Undecided if the database refuses one that may succeed another time; not for
    a conflict, which is repeated at once.
    """
    try:
        yield
    except AnyDatabaseError as error:
        if lost_conflict(error) or not database_health.may_pass(error):
            raise
        raise Undecided(error) from error


class StageTransaction:
    """A context manager that may be entered once.

    `begun` means that the server has begun the transaction already. On leaving without
    an exception it commits; a hook that raises after the commit is logged, and not
    propagated.
    """

    def __init__(
        self, definition: TransactionDefinition, *, begun: bool = False
    ) -> None:
        self._block = Block(definition.using, isolation=definition.isolation)
        self._begun = begun

    @property
    def employed(self) -> bool:
        """Whether the database was used."""
        return self._block.employed

    @property
    def committed(self) -> bool:
        """Whether the transaction is committed."""
        return self._block.committed

    def __enter__(self) -> StageTransaction:
        self._block.enter(begun=self._begun)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._block.exit(error)
        except Exception as late:
            if not self._block.committed:
                raise
            log.exception(
                "an on_commit hook raised after the commit; the message is processed "
                "and is not processed again: %s",
                late,
            )
