"""Hop 7, the heart: record → begin → run → finish, for everything that runs once.

The handlers of stages, alone and in batches, and Celery's tasks use it. If the worker
is killed between two of these steps, the next delivery of the message continues there.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from django.db import DatabaseError, connections, transaction

from ..django_internals import abandon, begins_early, raw
from ..envelope.message import Message
from ..envelope.transaction_definition import TransactionDefinition
from ..models.inbox import Seen
from ..models.inbox_order import Turn
from .transaction import StageTransaction, ours

Result = TypeVar("Result")

#: If a handler took this many seconds, a row marked before it is marked again after it,
#: so that `processed_at` is at most this much too early.
MARK_AGAIN_AFTER = 0.02


class LostRace(Exception):
    """Another copy of the message was processed while this one waited for the lock, or
    another worker has taken it."""


def record(
    rows: Any,
    stage: str,
    message: Message,
    *,
    runs: Callable[[Seen], bool],
    isolation: str | None = None,
    turn: Turn | None = None,
    early: bool = True,
) -> tuple[Seen, bool]:
    """Count a delivery durably, in a commit of its own.

    Returns the record of the message, and whether its transaction has begun and has
    taken the row, which on PostgreSQL needs no further round trip (if `early`). `runs`
    gets the record, and returns whether the message is to run.
    """
    transaction.get_autocommit(using=rows.db)  # which connects
    connection = connections[rows.db]
    if early and begins_early(connection):
        mark = str(uuid.uuid4())
        try:
            seen, taken = rows.record_and_begin(stage, message, isolation, mark, turn)
        except DatabaseError:
            if getattr(raw(connection), "closed", True):
                raise
            # A lock's time-out, or no room for the second half: do it step by step.
            abandon(connection)
            already = rows.recorded(stage, message, mark)
            if already is not None:
                return already, False
        else:
            if runs(seen) and taken:
                return seen, True
            abandon(connection)
            return seen, False
    return rows.record(stage, [message])[message.id], False


def once(
    definition: TransactionDefinition,
    *,
    take: Callable[[], object],
    run: Callable[[], Result],
    finish: Callable[[Result, bool], None],
    begun: bool = False,
) -> tuple[Result, bool]:
    """Do a message's work once: its effects and the mark that it is processed commit
    together, or not at all.

    `take` marks or locks the message's row. A copy of the message waits there until
    this transaction ends, and then takes nothing. `begun` means that the transaction
    has begun with the record, and has taken the row. `run` does the work, and its
    messages are stored in the same transaction. `finish` runs last in it: it stores the
    result; its argument says whether the row's mark is too early by now.

    Returns the result, and whether the database was used. Raises LostRace for a message
    that cannot be taken, Undecided for a refused statement of the package, and the
    errors of `run` and of the commit. Then everything is rolled back.
    """
    began = time.monotonic()
    with StageTransaction(definition, begun=begun) as block:
        if not begun:
            with ours():
                taken = take()
            if not taken:
                raise LostRace
        result = run()
        with ours():
            finish(result, time.monotonic() - began > MARK_AGAIN_AFTER)
    return result, block.employed
