"""The core of hop 7: record → begin → run → finish. All work that takes effect only
once uses these steps.

Such work is done by stages' handlers, alone and in batches, and by Celery's OnceTasks.
If the worker is killed between two steps, the next delivery of the message continues
after the last committed step.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from django.db import DatabaseError, connections, transaction
from django.db import Error as AnyDatabaseError

from ..django_internals import (
    abandon,
    begins_early,
    begun_by_hand,
    cause_of_rollback,
    depth,
    end_by_hand,
    has_begun,
    is_broken,
    must_roll_back,
    raw,
    refuses_durable,
    roll_back_blocks,
)
from ..envelope.message import Message
from ..envelope.stage_options import TransactionDefinition
from ..errors import (
    BlockLeftOpen,
    BrokerUnavailable,
    DurableInStage,
    StageError,
    SwallowedDatabaseError,
)
from ..models.inbox_arrival import InboxRecord
from ..models.turn import Turn
from ..runtime import database_health
from ..sending.scope import Block

log = logging.getLogger("django_txmsg.demarcation")

#: Most repetitions of a transaction that lost conflicts.
MAX_CONFLICTS = 10

Result = TypeVar("Result")

#: If a handler took this many seconds, a row marked before it is marked again after it,
#: so that `processed_at` is at most this much too early.
MARK_AGAIN_AFTER = 0.02

#: SQLSTATEs of a role without a privilege, of a table that is not in the search_path
#: (both 42), and of a transaction that is read-only.
_OF_SESSION = ("42", "25006")


class LostRace(Exception):
    """This delivery of the message cannot be processed any more: another delivery was
    processed while this one waited for the lock, or another worker has claimed the
    message."""


def record(
    rows: Any,
    stage: str,
    message: Message,
    *,
    runs: Callable[[InboxRecord], bool],
    isolation: str | None = None,
    turn: Turn | None = None,
    early: bool = True,
) -> tuple[InboxRecord, bool]:
    """Count a delivery. The count is committed at once, so that a message that kills
    its worker is still counted.

    Returns the message's record, and whether the stage's transaction has begun. With
    `early`, one round trip to PostgreSQL counts the delivery, begins the stage's
    transaction and takes the message's row. Then `runs` is called with the record, and
    returns whether the stage must run. If `runs` returns False, the stage's transaction
    is rolled back.
    """
    transaction.get_autocommit(using=rows.db)  # connects
    connection = connections[rows.db]
    if early and begins_early(connection):
        mark = str(uuid.uuid4())
        try:
            record, taken = rows.record_and_begin(stage, message, isolation, mark, turn)
        except DatabaseError:
            if getattr(raw(connection), "closed", True):
                raise
            # The lock timed out, or the message's transaction could not begin: try
            # again step by step.
            already = rows.recorded(stage, message, mark)
            abandon(connection)
            if already is not None:
                return already, False
        else:
            if runs(record) and taken:
                return record, True
            abandon(connection)
            return record, False
    return rows.record(stage, [message])[message.id], False


def once(
    definition: TransactionDefinition,
    *,
    take: Callable[[], object],
    run: Callable[[], Result],
    finish: Callable[[Result, bool], None],
    begun: bool = False,
) -> tuple[Result, bool]:
    """Do a message's work so that it takes effect only once: the work and the mark that
    the message is processed commit together, or neither commits.

    - `take` marks or locks the message's row. A worker with a duplicate of the message
      waits for this lock until the transaction ends, and then cannot take the row.
    - `begun` means that `record()` has already begun the transaction and taken the row.
    - `run` does the work. The messages that it sends are stored in the same
      transaction.
    - `finish` is called last in the transaction. Its arguments are the result of `run`,
      and a bool. The bool is true if `run` took long: then `finish` must mark the row
      again, with the current time.

    Returns the result, and whether the database was used. After an exception,
    everything is rolled back. Raises LostRace if the row cannot be taken, Undecided if
    the database refuses a statement of the package, and the errors of `run` and of the
    commit. A connection that ended while `run` ran is an error of `run`.
    """
    began = time.monotonic()
    with StageTransaction(definition, begun=begun) as block:
        if not begun:
            with ours():
                taken = take()
            if not taken:
                raise LostRace
        result = run()
        with ours(after_run=raw(connections[definition.using])):
            finish(result, time.monotonic() - began > MARK_AGAIN_AFTER)
    return result, block.employed


def refuse_left_open(aliases: Sequence[str]) -> None:
    """Raise BlockLeftOpen if a handler has left transactions open on these
    databases."""
    if aliases:
        raise BlockLeftOpen(
            f"A transaction on {', '.join(map(repr, aliases))} was begun inside the "
            f"stage and not ended: by transaction.atomic(), set_autocommit(False) or "
            f"BEGIN. Use atomic() in a with statement, or as a decorator."
        )


@contextmanager
def guarded(using: str) -> Iterator[None]:
    """Surround a handler, inside its transaction or savepoint. If the handler runs
    outside of any transaction, only BlockLeftOpen is raised.

    Raises SwallowedDatabaseError if the handler caught a database error after which the
    transaction can only roll back: a commit would silently lose the work. Raises
    StageError if the handler has ended the transaction by the driver's own methods.
    Raises DurableInStage if the handler entered `atomic(durable=True)`. Raises
    BlockLeftOpen if the handler did not leave an `atomic()` block, or left autocommit
    off, on any database.
    """
    connection = connections[using]
    outer, begun = depth(connection), has_begun(connections[using])
    before = {one: depth(one) for one in connections.all(initialized_only=True)}
    by_hand = {one for one in before if begun_by_hand(one)}
    left_open: list[str] = []
    try:
        try:
            yield
        finally:
            for one in connections.all(initialized_only=True):
                found = roll_back_blocks(one, before.get(one, 0))
                if begun_by_hand(one) and one not in by_hand:
                    end_by_hand(one)
                    found = True
                if found:
                    left_open.append(one.alias)
    except RuntimeError as error:
        if not outer or not refuses_durable(error):
            raise
        raise DurableInStage(
            "atomic(durable=True) cannot be entered inside a stage, whose transaction "
            "surrounds it."
        ) from error
    except AnyDatabaseError:
        if outer:
            _raise_hidden(connection)
        raise
    refuse_left_open(left_open)
    if outer and must_roll_back(connection):
        _raise_hidden(connection)
        raise _swallowed(connection) from cause_of_rollback(connection)
    if outer and begun and not has_begun(connection):
        raise StageError(
            f"The stage's transaction on {using!r} was ended while the handler ran, by "
            f"a method of the driver's connection. To roll back, raise an exception."
        )


def _swallowed(connection: Any) -> SwallowedDatabaseError:
    if cause_of_rollback(connection) is None and not is_broken(connection):
        return SwallowedDatabaseError(
            f"The stage's transaction on {connection.alias!r} can only roll back: "
            f"transaction.set_rollback(True) was called, or an exception that left an "
            f"atomic(savepoint=False) was caught. To roll back, raise an exception: "
            f"Refuse buries the message, Redeliver tries it again."
        )
    return SwallowedDatabaseError(
        f"A database error on {connection.alias!r} was caught inside the stage and its "
        f"transaction can only roll back. Let the error propagate, or put the "
        f"failing query into an atomic() and catch it outside of that."
    )


def _raise_hidden(connection: Any) -> None:
    """If the database ran out of resources, raise the database's error instead of the
    handler's error, because the message is not at fault."""
    cause = cause_of_rollback(connection)
    if must_roll_back(connection) and database_health.lacks_resources(cause):
        assert cause is not None
        raise cause


class Conflicts:
    """Counts the repetitions of work that lost a conflict. The pauses between
    repetitions grow."""

    _count = 0

    def mends(self, error: BaseException) -> bool:
        """Return whether the work that failed with this error should be repeated."""
        if self._count >= MAX_CONFLICTS or not database_health.lost_conflict(error):
            return False
        self._count += 1
        return True

    @property
    def pause(self) -> float:
        """Seconds until the next repetition."""
        longest = min(0.5, 0.002 * 2**self._count)
        return random.uniform(0, longest)  # noqa: S311 - no secret


def despite_conflicts(work: Callable[[], Result], stop: threading.Event) -> Result:
    """Do work of the package, and repeat the work while it loses conflicts. After
    `stop` is set, the repetitions continue without pauses."""
    conflicts = Conflicts()
    while True:
        try:
            return work()
        except DatabaseError as error:
            if not conflicts.mends(error):
                raise
        stop.wait(conflicts.pause)


def is_outage(error: BaseException, raw: Any) -> bool:
    """Return True if the broker or the stage's own database is unavailable. The message
    is then not at fault.

    `raw` is the driver's connection of the stage's transaction. If `raw` is still open,
    the stage's own database has not failed. A database error then comes from a query
    that the handler has sent to another database, and counts as the handler's failure.
    """
    if isinstance(error, BrokerUnavailable):
        return True
    return database_health.is_away(error) and bool(getattr(raw, "closed", False))


class Undecided(Exception):
    """The database has refused one of the package's own statements with `error`.
    Neither the message nor its handler is at fault."""

    def __init__(self, error: AnyDatabaseError) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def ours(after_run: Any = None) -> Iterator[None]:
    """A context manager around SQL statements that the package itself executes in a
    stage's transaction. Raises Undecided if the database refuses a statement that may
    succeed later. If the transaction loses a conflict with another one, the database's
    error is raised unchanged, so that the caller can repeat the work immediately.

    `after_run` is the driver's connection on which a handler has run. If this
    connection has ended, the error is raised unchanged too, because the handler may be
    at fault: it crashed the server, or waited for longer than the server permits. So is
    an error of the session's role, `search_path` or read-only mode: before the handler
    changed these, the same table was written."""
    try:
        yield
    except AnyDatabaseError as error:
        if database_health.lost_conflict(error) or not database_health.may_pass(error):
            raise
        state = database_health.sqlstate(error)
        changed = after_run is not None and state.startswith(_OF_SESSION)
        if changed or getattr(after_run, "closed", False):
            raise
        raise Undecided(error) from error


def log_late(error: Exception) -> None:
    """Log the error of a hook after the commit."""
    log.error(
        "an on_commit hook raised after the commit; the message is processed and is "
        "not processed again: %s",
        error,
        exc_info=error,
    )


class StageTransaction(Block):
    """A context manager for one transaction of a stage.

    Commits if the block ends without an exception. If a hook raises after the commit,
    the exception is only logged. `begun` means that the server has begun the
    transaction already.
    """

    def __init__(
        self, definition: TransactionDefinition, *, begun: bool = False
    ) -> None:
        super().__init__(definition.using, isolation=definition.isolation)
        self._begun = begun

    def __enter__(self) -> StageTransaction:
        self.enter(begun=self._begun)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self.exit(error)
        except Exception as late:
            if not self.committed:
                raise
            log_late(late)
