"""Deletes settled rows that are older than TXMSG["RETENTION"].

Rows are deleted in batches, each in a short transaction. The database's clock
determines the age of a row. Rows that are not settled are never deleted: pending
messages, parked messages, and everything about an open dead letter. If TXMSG["LAKE"] is
set, `manage.py pipeline archive` deletes the rows of messages and dead letters instead,
after it has verified that they are in the lake.
"""

from __future__ import annotations

import datetime as dt
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from django.db import models, router, transaction
from django.db.models import Exists, F, OuterRef, Q, QuerySet, Value
from django.db.models.lookups import LessThan

from .. import conf, wire
from ..django_internals import delete_where
from ..http_outbox import control_message
from ..models import (
    Attempt,
    Batch,
    DeadLetter,
    IdempotencyKey,
    InboxMessage,
    KeyTail,
    OutboxMessage,
    QueueMessage,
    RateLine,
    Run,
    SessionRecord,
    StopRequest,
    TaskRun,
    Worker,
)
from ..models.fields import Holds, OneOf, clock
from ..rules import Rule, dead_letters, flows, inbox, outbox
from ..runtime import liveness
from ..scheduling.time_loop import TimeLoop
from .databases import with_only_queues

#: Days after which the row of a killed worker is deleted.
SILENT_WORKERS = 1.0

#: Rows read, and at most deleted, in one transaction.
BATCH_SIZE = 1000


@dataclass(frozen=True)
class Kind:
    """One table whose settled rows are deleted.

    `by` is the column that determines the order of reading. `clock` is an optional
    column with a time that grows with the primary key. With `clock`, reading stops at
    the first page whose rows are all younger than the cutoff.
    """

    name: str
    model: type[models.Model]
    days: float | None
    #: Which rows may be deleted, by the cutoff. The pipeline's archive uses the same
    #: rules.
    settled: Rule | Callable[[dt.datetime], Q]
    clock: str | None = None
    by: str = "pk"
    #: Whose rows are deleted, in a database that several services share.
    services: tuple[str, ...] | None = None

    @property
    def logged(self) -> bool:
        """Whether `pipeline archive` deletes this table's rows if TXMSG["LAKE"] is set.
        Pruning then leaves them alone."""
        return isinstance(self.settled, Rule)

    def doomed(self, using: str, cutoff: dt.datetime) -> QuerySet[Any]:
        """Return the rows that may be deleted."""
        if isinstance(self.settled, Rule):
            instant = Value(cutoff, output_field=models.DateTimeField())
            condition = Q(Holds(self.settled, cutoff=instant))
        else:
            condition = self.settled(cutoff)
        if self.services is not None:
            condition &= Q(service__in=self.services)
        return self.model._default_manager.using(using).filter(condition)


def kinds() -> list[Kind]:
    """Return the tables to prune, each with its retention in days from the settings."""
    keep, stale = conf.get().RETENTION, control_message.KEPT / 86_400
    return [
        Kind("outbox messages", OutboxMessage, keep.OUTBOX, outbox.SETTLED, _CREATED),
        Kind("inbox messages", InboxMessage, keep.INBOX, inbox.SETTLED, _RECEIVED),
        # Like the inbox, they record what was done.
        Kind("task runs", TaskRun, keep.INBOX, _old, _CREATED),
        Kind("dead letters", DeadLetter, keep.DEAD_LETTERS, dead_letters.SETTLED),
        Kind("idempotency keys", IdempotencyKey, keep.IDEMPOTENCY, _old, by=_CREATED),
        Kind("batches of runs", Batch, keep.FLOWS, _before("run__ended_at")),
        Kind("runs of flows", Run, keep.FLOWS, flows.ENDED, by="ended_at"),
        # They record the outcome of the transactions that filled the outbox.
        Kind("session records", SessionRecord, keep.OUTBOX, _old, by=_CREATED),
        Kind("stale control messages", QueueMessage, stale, _of_no_use, "enqueued_at"),
        # The inboxes of this service forget what it has sent after the same time.
        Kind("key tails", KeyTail, keep.INBOX, _old_tail),
        Kind("rate lines", RateLine, keep.INBOX, _old_line),
        Kind("stop requests", StopRequest, SILENT_WORKERS, _before("at")),
        Kind("silent workers", Worker, SILENT_WORKERS, _before("heartbeat_at")),
    ]


def kinds_in(using: str, *, named: bool = False) -> list[Kind]:
    """Return the tables to prune in a database. Where only a broker's queues are used,
    all other tables are left to the services that use them. But if an operator has
    `named` this database, return the outbox for this service's own messages: code may
    store them there with `using=`."""
    if using not in with_only_queues():
        return kinds()
    own = conf.get().services
    return [
        replace(kind, services=own) if kind.model is OutboxMessage else kind
        for kind in kinds()
        if kind.model is QueueMessage or (named and kind.model is OutboxMessage)
    ]


def places(database: str | None) -> list[tuple[Kind, str]]:
    """Return the tables to prune, each with its database. By default, these are the
    tables of the outbox's database, and the embedded brokers' queues in databases of
    their own."""
    if database:
        return [(kind, database) for kind in kinds_in(database, named=True)]
    aliases = [router.db_for_write(OutboxMessage), *with_only_queues()]
    return [(kind, alias) for alias in aliases for kind in kinds_in(alias)]


def prunable(kind: Kind) -> bool:
    """Return whether pruning may delete rows of this kind."""
    archived = kind.logged and conf.get().LAKE is not None
    return kind.days is not None and not archived


def count(kind: Kind, using: str) -> int:
    """Return how many rows `prune()` would delete now."""
    return sum(rows.count() for rows in _doomed(kind, using, 10 * BATCH_SIZE))


def prune(kind: Kind, using: str, *, batch_size: int = BATCH_SIZE) -> Iterator[int]:
    """Delete the settled rows of one table that are older than their retention. Yields
    the number of deleted rows after each transaction."""
    for rows in _doomed(kind, using, batch_size):
        yield _delete(rows, using)


def _doomed(kind: Kind, using: str, size: int) -> Iterator[QuerySet[Any]]:
    """Yield the rows that may be deleted now, in the order of the indexed column
    `kind.by`. Each part is within `size` rows of the table, which include rows that are
    not settled."""
    if kind.days is None or not prunable(kind):
        return
    cutoff = clock(using) - dt.timedelta(days=kind.days)
    doomed = kind.doomed(using, cutoff)
    rows: QuerySet[Any] = kind.model._default_manager.using(using)
    if kind.by != "pk":
        rows = rows.filter(**{f"{kind.by}__lt": cutoff})
    last: Any = None
    while True:
        following = rows if last is None else rows.filter(**{f"{kind.by}__gt": last})
        ordered = following.order_by(kind.by)
        page = list(ordered.values_list(kind.by, kind.clock or kind.by)[:size])
        if not page:
            return
        if kind.clock is not None and min(clock for _, clock in page) >= cutoff:
            return
        first, last = last, page[-1][0]
        if kind.by != "pk":
            # SQLite compares text: its clock writes 5.000 s, and Django writes 5 s,
            # which is less. So the page ends with the last row's millisecond.
            last += dt.timedelta(microseconds=999)
        bounds = Q(**{f"{kind.by}__lte": last})
        if first is not None:
            bounds &= Q(**{f"{kind.by}__gt": first})
        yield doomed.filter(bounds)


def _delete(doomed: QuerySet[Any], using: str) -> int:
    """Delete rows in one transaction, and return their number. The statement checks
    again that each row is settled."""
    if doomed.model in (Batch, Run):
        # With its branches; with its steps and its undos.
        return int(doomed.delete()[1].get(doomed.model._meta.label, 0))
    if doomed.model is not InboxMessage:
        return delete_where(doomed)
    attempts = Attempt.objects.using(using)
    # Checked before the transaction: on SQLite one that began by reading may not write.
    messages = set(doomed.values_list("message_id", "stage"))
    same = attempts.filter(OneOf("message_id", {one for one, _ in messages}))
    found = same.values_list("pk", "message_id", "stage")
    failed = [pk for pk, *of in found if tuple(of) in messages]
    remembered = InboxMessage.objects.using(using).filter(_same_message())
    with transaction.atomic(using=using):
        deleted = delete_where(doomed)
        # A message that was redelivered in between keeps its row, and these with it.
        attempts.filter(OneOf("pk", failed)).exclude(Exists(remembered)).delete()
    return deleted


def _before(column: str) -> Callable[[dt.datetime], Q]:
    return lambda cutoff: Q(**{f"{column}__lt": cutoff})


_CREATED, _RECEIVED = "created_at", "first_received_at"
_old = _before(_CREATED)


def _of_no_use(cutoff: dt.datetime) -> Q:
    # Other brokers delete expired messages themselves.
    queues = map(wire.control_destination, conf.get().services)
    return Q(queue__in=list(queues), enqueued_at__lt=cutoff)


def _old_tail(cutoff: dt.datetime) -> Q:
    return Q(last_at__lt=int(cutoff.timestamp() * 1_000_000))


def _old_line(cutoff: dt.datetime) -> Q:
    last = F("origin") + F("taken") * F("period")
    # A new line would count from 0, and their slots would be due far in the future.
    waiting = InboxMessage.objects.filter(
        stage=OuterRef("stage"),
        key=OuterRef("key"),
        slot__isnull=False,
        due_at__isnull=False,
    ).exclude(key="")  # as in the index's condition: SQLite does not infer it
    return Q(LessThan(last, Value(cutoff.timestamp()))) & ~Q(Exists(waiting))


def _same_message() -> Q:
    return Q(message_id=OuterRef("message_id"), stage=OuterRef("stage"))


# Automatic pruning in a long-running process: `manage.py txmsg run`.

log = logging.getLogger("django_txmsg.pruning")

#: Seconds until the first pruning, and between two. Each wait varies by up to a
#: quarter, so that processes that start together prune at different times.
FIRST, EVERY = 300.0, 3600.0


class Pruner(TimeLoop):
    """Deletes rows that are older than TXMSG["RETENTION"], every hour."""

    refused = "rows that are no longer needed stay"

    def first(self) -> float:
        """Return the seconds until the first pruning."""
        return _about(FIRST)

    def _keep(self, using: str) -> float:
        for kind in kinds_in(using):
            deleted = 0
            for number in () if self._stop.is_set() else prune(kind, using):
                deleted += number
                liveness.turned()
                if self._stop.is_set():
                    break
            if deleted:
                log.info("%s of database %r: %d deleted", kind.name, using, deleted)
        return _about(EVERY)


def _about(pause: float) -> float:
    return pause * random.uniform(0.75, 1.25)  # noqa: S311 - jitter
