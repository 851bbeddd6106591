"""Hop 1's rows: how they get into the outbox, and what their commit sets off."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Collection, Mapping

from django.db import connections
from django.utils import timezone

from .. import signals
from ..django_internals import last_hook
from ..errors import DuplicateMessage
from ..models import OutboxMessage
from ..models.outbox_store import NewMessage
from .scope import current_scope


def store(
    rows: list[NewMessage],
    alias: str,
    *,
    new_ids: bool = False,
    derived: Collection[uuid.UUID] = (),
) -> list[dt.datetime]:
    """Insert ready rows into the outbox and return when each was created.

    Raises DuplicateMessage, with nothing stored, when one of the ids is there already;
    `new_ids` says that none can be. One of the `derived` ids is there when its stage
    is made to run again by force: it is left as it is.
    """
    current, lock, alone = current_scope(), None, False
    join = current.join if current is not None and current.using == alias else None
    if join is not None:
        session_id, lock = join()
        alone = lock is None
        for row in rows:
            row.session_id = session_id
    created, xid, locked_at = OutboxMessage.objects.db_manager(alias).store(
        rows, new_ids=new_ids, tell_transaction=alone, lock=lock
    )
    missing = {row.message_id for row in rows} - created.keys()
    if not (missing <= set(derived) if missing else len(created) == len(rows)):
        ids = [pk for pk, _ in created.values()]
        OutboxMessage.objects.using(alias).filter(pk__in=ids).delete()
        raise DuplicateMessage(_duplicates(rows, set(created)))
    if current is not None and xid is not None:
        current.transaction = xid
    if current is not None and locked_at is not None:
        current.newest = max(locked_at, current.newest or locked_at)
    by_broker: dict[str, dict[int, uuid.UUID]] = {}
    for row in rows:
        if row.message_id in created:
            pk, _ = created[row.message_id]
            by_broker.setdefault(row.broker, {})[pk] = row.message_id
    for broker, stored in by_broker.items():
        after_commit(alias, broker, new=stored)
    now = timezone.now()
    return [created.get(row.message_id, (0, now))[1] for row in rows]


def after_commit(
    alias: str,
    broker: str,
    *,
    new: Mapping[int, uuid.UUID] | None = None,
    due: Collection[int] = (),
) -> None:
    """Have the dispatcher woken for rows once the transaction commits: `new` ones, the
    message id of each by its primary key, and others that are `due`.

    What is stored without a break under the same savepoints shares one hook, and is
    dispatched together.
    """
    hook = last_hook(connections[alias])
    if (
        not isinstance(hook, AfterCommit)
        or hook.called
        or (hook.alias, hook.broker) != (alias, broker)
    ):
        hook = AfterCommit(alias, broker)
        connections[alias].on_commit(hook, robust=True)
    hook.new |= new or {}
    hook.ids += [*(new or ()), *due]


def _duplicates(rows: list[NewMessage], stored: set[uuid.UUID]) -> str:
    ids = [str(row.message_id) for row in rows]
    twice = sorted({one for one in ids if ids.count(one) > 1} or set(ids))
    known = [one for one in twice if uuid.UUID(one) not in stored] or twice
    return (
        f"Message {', '.join(known[:5])} is stored already, and an id is stored once. "
        f"If this is a retry, the first call has done the work; for another message, "
        f"use another id."
    )


class AfterCommit:
    """What the commit of a transaction sets off for the rows of one savepoint.

    Django drops the hook when an `atomic()` block is rolled back. It keeps the hook
    after `savepoint_rollback()` and `ROLLBACK TO SAVEPOINT`, so some of the rows may
    be gone: a dispatcher finds nothing to claim, and nobody is told of them.
    """

    def __init__(self, alias: str, broker: str) -> None:
        # Django names a robust hook by it when it fails; of a class, an instance has
        # none.
        self.__qualname__ = "django_txmsg.outbox"
        self.alias, self.broker = alias, broker
        self.ids: list[int] = []
        #: By primary key. SQLite gives one that a rollback has freed to another row.
        self.new: dict[int, uuid.UUID] = {}
        #: As a TestCase does with hooks, in the middle of its transaction.
        self.called = False

    def __call__(self) -> None:
        self.called = True
        try:
            self._announce()
        finally:
            signals.messages_committed.send_robust(
                sender=None, using=self.alias, broker=self.broker, ids=self.ids
            )

    def _announce(self) -> None:
        """Tell of the rows that are there."""
        if not self.new or not signals.announced(signals.message_stored):
            return
        rows = OutboxMessage.objects.db_manager(self.alias)
        for pk, message_id, destination in rows.there(self.new):
            if self.new[pk] == message_id:
                signals.announce(
                    signals.message_stored,
                    id=message_id,
                    destination=destination,
                    using=self.alias,
                )
