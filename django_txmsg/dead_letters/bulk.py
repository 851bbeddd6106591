"""Bulk operations on dead letters and runs of flows: many thousands, in batches.

An operator's request is a row (`BulkOperation`), and `manage.py consume` executes the
operation in growing batches, even if the operator closes the browser. The cursor
advances in the batch's own transaction, so a crash neither loses nor doubles a message.
A small operation works the same way, but is executed immediately by the process that
starts the operation.
"""

from __future__ import annotations

import datetime as dt
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from django.db import OperationalError, connections, transaction
from django.db.models import F, Max, Q, QuerySet
from django.db.models.functions import Now

from .. import conf
from ..django_internals import in_block, must_roll_back
from ..errors import TxmsgError
from ..models import BulkOperation, DeadLetter, InboxMessage, OutboxMessage
from ..models.bulk_operation import BulkKind, BulkState
from ..models.dead_letter import Resolution
from ..models.fields import Later, limit_waits
from ..models.monitoring import Deed, Done
from ..rules import dead_letters, outbox
from ..runtime import database_health, liveness, notifications
from ..runtime.notifications import notify
from . import resolution, selection
from .resolution import Tally
from .selection import Shown

# Redelivers one message first: is the cause mended?
#
# A batch of a redelivery waits until the messages of the batch before were processed,
# or have died again. Batches have 1, 10, 100 messages; then the rest follows,
# unwatched, but still counted.

#: The sizes of the batches whose outcome is waited for.
STEPS = (1, 10, 100)
#: Seconds between two looks at their outcome.
PAUSE = 0.5


def died_again(operation: BulkOperation, using: str) -> int:
    """Return the number of messages that the operation has redelivered and that have
    died again. It does not matter whether a message died of the same error again."""
    letters = DeadLetter.objects.using(using)
    # A redelivered letter is open again only if its message has died again.
    return letters.filter(resolution=Resolution.OPEN, operation=operation.pk).count()


def unsettled(operation: BulkOperation, using: str) -> bool:
    """Return True if any message of the operation's last batch is neither processed nor
    dead again. The operation must then wait. A message that was sent to its queue
    counts as settled when it is dispatched, if no stage of that name has received it
    by then: the queue's consumer may belong to another service."""
    letters = DeadLetter.objects.using(using).filter(
        pk__in=operation.watched, resolution=Resolution.REDELIVERED
    )
    for pk, message_id, stage in letters.values_list("pk", "message_id", "stage"):
        again: Any = OutboxMessage.objects.using(using).filter(
            message_id=message_id, replay_id__startswith=f"{outbox.REDELIVERED}{pk}-"
        )
        if again.filter(dispatched_at=None, dead_at=None).exists():
            return True
        rows: Any = InboxMessage.objects.using(using).filter(
            message_id=message_id, stage=stage, processed_at=None, dead_at=None
        )
        if stage and rows.exists():
            return True
    return False


def most(operation: BulkOperation, back: int) -> int:
    """Return the maximum size of the operation's next batch. `back` is the number of
    redelivered messages that have died again.

    The operation stops when more than `operation.tolerates` messages have died again.
    While every redelivered message has died again, the next batch is as small as
    possible: if all its messages die too, just enough have died to stop the operation.
    """
    assert operation.tolerates is not None
    if operation.done > back:
        return STEPS[-1] * 10
    return operation.tolerates - back + 1


def next_step(step: int, batch: list[DeadLetter], tally: Tally) -> dict[str, Any]:
    """Return the columns to store after `batch`: the messages whose outcome the next
    batch must wait for, and the size of the next batch."""
    watched = [one.pk for one in batch if one.pk not in tally.skipped]
    if step > STEPS[-1]:
        return {"watched": []}
    return {"watched": watched, "batch_size": step * 10 if watched else step}


log = logging.getLogger("django_txmsg.bulk")

Matching = Callable[[Mapping[str, Any], str], QuerySet[Any]]
Do = Callable[[BulkOperation, Any, Tally, str], None]

LARGEST_BATCH = 1000


#: What an operation of a kind selects and does, if it is not about dead letters.
_PROVIDED: dict[str, tuple[Matching, Do]] = {}


def provide(kind: BulkKind, matching: Matching, do: Do) -> None:
    """Register the functions for operations of a kind. `matching` selects the rows by a
    filter. `do` handles a batch of rows in the batch's transaction."""
    _PROVIDED[kind] = matching, do


def _matching(kind: str, filters: Mapping[str, Any], using: str) -> QuerySet[Any]:
    if kind in _PROVIDED:
        return _PROVIDED[kind][0](filters, using)
    return selection.matching(kind, filters, using=using)


def _ours(using: str) -> QuerySet[BulkOperation]:
    """Return the running operations that processes of this service execute: those that
    the service has requested. Only its own processes have its brokers and stages. An
    operation of an earlier release names no service, and any service executes it."""
    own = Q(filter__service__in=conf.get().services)
    earlier = Q(filter__service__isnull=True)
    running = BulkOperation.objects.using(using).filter(state=BulkState.RUNNING)
    return running.filter(own | earlier)


#: Seconds that a batch waits for a message that a worker holds, before it is tried
#: again later.
PATIENCE = 3.0

#: How many skipped messages an operation records the reason for.
REMEMBERED = 50


class _Moved(OperationalError):
    """Another worker has executed this batch already."""


def start(
    kind: BulkKind | str,
    filters: Mapping[str, Any],
    *,
    using: str = "default",
    by: str = "",
    why: str = "",
    force: bool = False,
    rate: float | None = None,
    shown: Shown | None = None,
    tolerates: int | None = None,
) -> BulkOperation:
    """Request the operation `kind` for all rows that match now. No row is changed yet.

    `rate` limits the rows per second. Messages that die after this call are not
    included. If `shown` is given, only the rows that the operator was shown are
    included, and Changed is raised if one of these no longer matches.

    If `tolerates` is given, a redelivery takes one message first, then 10, then 100,
    then the rest. Each batch waits for the outcome of the batch before. The operation
    stops itself when more than `tolerates` messages have died again.
    """
    if wrong := dead_letters.wrong_rate(rate):
        raise TxmsgError(wrong)
    kind = BulkKind(kind)
    selection.insist_on_few_ids(filters)
    filters = dict(filters)
    letters = _matching(kind, filters, using)
    if shown is not None:
        letters = shown.insist(letters)
        filters["before"] = shown.before(filters)
    with transaction.atomic(using=using), connections[using].cursor() as cursor:
        sql, values = dead_letters.bulk_operation(
            connections[using].vendor,
            kind=kind.value,
            filters=filters,
            service=conf.get().SERVICE,
            total=letters.count(),
            up_to=letters.aggregate(last=Max("pk"))["last"] or 0,
            by=by,
            why=why,
            force=force,
            rate=rate,
        )
        cursor.execute(sql, values)
        (pk,) = cursor.fetchone()
        if tolerates is not None and kind == BulkKind.REDELIVER:
            started = BulkOperation.objects.using(using).filter(pk=pk)
            # At most what the column holds.
            started.update(tolerates=min(tolerates, 2**31 - 1), batch_size=1)
    operation: BulkOperation = BulkOperation.objects.using(using).get(pk=pk)
    if conf.get().NOTIFY:
        notify(using, {notifications.WORK})
    log.info(
        "bulk operation %d: %s %s, asked for by %s, filter %s",
        operation.pk, kind, operation.subject, by or "unknown", dict(filters),
    )  # fmt: skip
    return operation


def described(operation: BulkOperation, filters: Mapping[str, Any], why: str) -> str:
    """Return the text for the audit about the start of an operation."""
    if operation.kind == BulkKind.GO_BACK:
        what = f"Send {operation.subject} back to step {filters['to']}"
    else:
        what = f"{operation.kind.capitalize()} {operation.subject}{operation.forced}"
    first = "" if operation.tolerates is None else ", one first"
    because = f"; why: {why}" if why else ""
    return f"{what}{first}; filter: {selection.filter_text(filters)}{because}."


def move(verb: str, pk: int, using: str) -> Done | None:
    """Pause, resume or cancel an operation. Returns None if the operation does not
    exist, or is in a state in which `verb` is not possible."""
    operations = BulkOperation.objects.db_manager(using)
    if not getattr(operations, verb)(pk):
        return None
    operation = operations.get(pk=pk)
    return operation, Deed.OPERATION, f"{verb.capitalize()}: {operation}."


def work_off(using: str, stop: threading.Event) -> int:
    """Process the batches of operations in the state "running" until no batch is due.
    Returns the number of handled messages.

    Several processes may do this at the same time, because each batch belongs to one
    process. If `stop` is set, complete the current batch and return.
    """
    worked = 0
    while not stop.is_set():
        liveness.turned()
        handled = work_batch(using, stop=stop)
        if handled is None:
            break
        worked += handled
    return worked


def running(using: str) -> bool:
    """Return whether this service has a running operation, including one whose next
    batch is not due yet."""
    return _ours(using).exists()


def finish(
    operation: BulkOperation,
    *,
    patience: float = math.inf,
    on_batch: Callable[[BulkOperation], None] = lambda operation: None,
) -> BulkOperation:
    """Execute one operation until it ends, is paused, or `patience` seconds have
    passed. Call `on_batch` after each batch. Other processes may execute some of the
    batches.

    Returns the operation in its present state.
    """
    using = operation._state.db or "default"
    deadline = time.monotonic() + patience
    while True:
        handled = work_batch(using, only=operation.pk)
        operation.refresh_from_db(using=using)
        on_batch(operation)
        if operation.state != BulkState.RUNNING or time.monotonic() > deadline:
            break
        if handled is None:
            # The rate says not yet, or another worker has the batch, or a message.
            threading.Event().wait(0.05)
    return operation


def work_batch(
    using: str, *, only: int | None = None, stop: threading.Event | None = None
) -> int | None:
    """Execute one batch of one running operation, in one transaction.

    Returns the number of handled messages. Returns None if nothing is due, or if
    another process holds one of the messages for longer than PATIENCE.
    """
    for patience in (0.1, 0.4, None):
        taken: list[BulkOperation] = []
        try:
            with transaction.atomic(using=using):
                return _work_batch(using, only, taken)
        except OperationalError as error:
            if database_health.gave_up_waiting(error):
                return None
            # The victim of a deadlock: nothing was changed.
            if in_block(connections[using]):
                raise
            if patience is None:
                if not taken or not _is_too_much(error):
                    raise
                return _smaller(taken[0], using, error)
            (stop or threading.Event()).wait(patience)
        except Exception as error:
            if not taken or must_roll_back(connections[using]):
                raise
            return _smaller(taken[0], using, error)
    return None


def _is_too_much(error: OperationalError) -> bool:
    """Return whether PostgreSQL refused a statement, for example because it ran longer
    than `statement_timeout`, and may accept it for fewer messages."""
    passes = database_health.lost_conflict(error) or database_health.is_away(error)
    return bool(database_health.sqlstate(error)) and not passes


def _work_batch(using: str, only: int | None, taken: list[BulkOperation]) -> int | None:
    # A pause or cancellation of the operation waits for the batch.
    limit_waits(connections[using], PATIENCE)
    due = _ours(using).filter(due_at__lte=Now())
    if only is not None:
        due = due.filter(pk=only)
    free = due.select_for_update(skip_locked=True)
    operation = free.order_by("changed_at", "pk").first()
    if operation is None:
        return None
    taken.append(operation)
    step = operation.batch_size
    if operation.tolerates is not None:
        back = died_again(operation, using)
        if back > operation.tolerates:
            return _stop(operation, using, back)
        if unsettled(operation, using):
            _advance(operation, using, due_at=Later(PAUSE))
            return 0
        operation.batch_size = min(step, most(operation, back))
    batch = _next(operation, using)
    if not batch:
        _advance(operation, using, state=BulkState.DONE, finished_at=Now())
        log.info(
            "bulk operation %d is done: %s %d, skipped %d",
            operation.pk, operation.kind, operation.done, operation.skipped,
        )  # fmt: skip
        return 0
    tally = Tally()
    kind = operation.kind
    do = _PROVIDED[kind][1] if kind in _PROVIDED else getattr(resolution, kind)
    do(operation, batch, tally, using)
    remembered = dict(operation.skipped_why)
    for pk, why in list(tally.skipped.items())[: REMEMBERED - len(remembered)]:
        remembered[str(pk)] = why
    limit: dict[str, Any] = {}
    if operation.tolerates is not None:
        limit |= next_step(step, batch, tally)
    if operation.rate is not None:
        pause = dt.timedelta(seconds=len(batch) / operation.rate)
        limit["due_at"] = Now() + pause
    _advance(
        operation,
        using,
        cursor=batch[-1].pk,
        done=F("done") + tally.done,
        skipped=F("skipped") + len(tally.skipped),
        skipped_why=remembered,
        **{"batch_size": min(operation.batch_size * 2, LARGEST_BATCH)} | limit,
    )
    return len(batch)


def _stop(operation: BulkOperation, using: str, back: int) -> int:
    """Pause an operation of which too many messages have died again."""
    why = f"{back:,} of {operation.done:,} redelivered messages died again"
    _advance(operation, using, state=BulkState.PAUSED, stopped_why=why, watched=[])
    log.error("bulk operation %d has stopped itself: %s", operation.pk, why)
    return 0


def _next(operation: BulkOperation, using: str) -> list[Any]:
    size = operation.batch_size
    if operation.rate is not None:
        size = max(1, min(size, int(operation.rate)))
    filters = operation.filter
    if operation.kind not in _PROVIDED:
        filters = {name: filters[name] for name in filters.keys() - {"service"}}
    letters = _matching(operation.kind, filters, using)
    restores = operation.kind == BulkKind.RESTORE
    since = "resolved_at" if restores else selection.since(letters)
    letters = letters.filter(
        pk__gt=operation.cursor,
        pk__lte=operation.up_to,
        **{f"{since}__lte": operation.created_at},
    )
    if operation.kind not in _PROVIDED:
        # One that a later operation has restored did not match then.
        letters = letters.exclude(operation__gt=operation.pk).only(*_NEEDED)
    # No SKIP LOCKED here: the cursor would pass a message that is locked for a moment.
    return list(letters.select_for_update().order_by("pk")[:size])


#: The columns of a dead letter that operations read; the longest are copied within the
#: database.
_NEEDED = (
    "message_id", "stage", "broker", "destination", "headers", "deaths", "reason",
    "resolution", "resolved_at", "resolved_by",
)  # fmt: skip


def _smaller(operation: BulkOperation, using: str, error: Exception) -> int:
    """Make the operation's batches smaller, after a batch failed and was rolled back.
    If a batch of one message fails, skip that message. If not even that message can be
    selected, pause the operation, so that it does not block the others."""
    log.warning("bulk operation %d: a batch failed: %s", operation.pk, error)
    with transaction.atomic(using=using), suppress(_Moved):
        if operation.batch_size > 1:
            # A failing message must fail alone before it is skipped.
            smaller = max(1, operation.batch_size // 10)
            _advance(operation, using, batch_size=smaller, last_error=str(error)[:2000])
            return 0
        try:
            with transaction.atomic(using=using):
                batch = _next(operation, using)
        except Exception as refusal:
            if database_health.is_away(refusal):
                raise
            why = str(refusal)[:2000]
            _advance(operation, using, state=BulkState.PAUSED, last_error=why)
            log.error("bulk operation %d is paused: %s", operation.pk, why)
            return 0
        if not batch:
            return 0
        remembered = dict(operation.skipped_why)
        if len(remembered) < REMEMBERED:
            remembered[str(batch[0].pk)] = str(error)[:500]
        _advance(
            operation,
            using,
            cursor=batch[0].pk,
            skipped=F("skipped") + 1,
            skipped_why=remembered,
            last_error=str(error)[:2000],
        )
        return 1
    return 0


def _advance(operation: BulkOperation, using: str, **values: Any) -> None:
    # The cursor is the fence: a process that read an older one changes nothing. Nor
    # does one whose batch has failed, if the operation was cancelled meanwhile.
    running = BulkOperation.objects.using(using).filter(state=BulkState.RUNNING)
    same = running.filter(pk=operation.pk, cursor=operation.cursor)
    if not same.update(changed_at=Now(), **values):
        raise _Moved(f"bulk operation {operation.pk} was moved by another worker")
