"""Hop 1's rows: how they get into the outbox, and what their commit sets off.

Most are inserted where they are sent. In a scope that gathers, plain messages wait in
the transaction's on_commit hook, and share one INSERT right before the commit.
"""

from __future__ import annotations

import datetime as dt
import logging
import uuid
from collections.abc import Collection

from django.db import connections, transaction
from django.utils import timezone

from .. import signals
from ..django_internals import in_block, last_hook, registered_hooks
from ..errors import DuplicateMessage
from ..models import OutboxMessage
from ..models.outbox_store import NewMessage
from .scope import current_scope

log = logging.getLogger("django_txmsg.storing")

#: Messages that wait for one INSERT at most.
MAX_GATHERED = 1000


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
    created = _insert(rows, alias, new_ids, derived)
    by_broker: dict[str, list[NewMessage]] = {}
    for row in rows:
        if row.message_id in created:
            by_broker.setdefault(row.broker, []).append(row)
    for broker, own in by_broker.items():
        ids = [created[row.message_id][0] for row in own]
        after_commit(alias, broker, ids, own)
    now = timezone.now()
    return [created.get(row.message_id, (0, now))[1] for row in rows]


def flush(alias: str) -> None:
    """Insert what was gathered in the open transaction and not rolled back since.

    The last thing before the commit: the scope that calls it gathers no more, and what
    is sent in it from now on is inserted where it is sent.
    """
    current = current_scope()
    if current is not None and current.gathers is connections[alias]:
        current.gathers = None
    hooks = [
        hook
        for hook in registered_hooks(connections[alias])
        if isinstance(hook, AfterCommit) and hook.gathered and hook.alias == alias
    ]
    if hooks:
        _flush(hooks, alias)


def _flush(hooks: list[AfterCommit], alias: str) -> None:
    rows = [row for hook in hooks for row in hook.gathered]
    new_ids = not any(hook.derived for hook in hooks)
    derived = () if new_ids else {row.message_id for row in rows}
    created = _insert(rows, alias, new_ids, derived)
    for hook in hooks:
        own = [row for row in hook.gathered if row.message_id in created]
        hook.gathered = []
        hook.note([created[row.message_id][0] for row in own], own)


def plain(row: NewMessage) -> bool:
    """Return whether nobody can tell when, in its transaction, a message is inserted:
    its place among others of its key says so, and so does what counts from now."""
    return not (row.key or row.delay or row.unique) and row.expiry is None


def gather(
    rows: list[NewMessage], alias: str, broker: str, *, derived: bool
) -> list[dt.datetime]:
    """Let plain rows wait for `flush()`, and return when each was taken."""
    hook = _open_hook(alias, broker)
    if hook is None:
        hook = AfterCommit(alias, broker)
        connections[alias].on_commit(hook, robust=True)
    hook.gathered += rows
    hook.derived = hook.derived or derived
    if len(hook.gathered) >= MAX_GATHERED:
        # Only its own: what an outer savepoint gathered must outlive this one.
        _flush([hook], alias)
    return [timezone.now()] * len(rows)


def _insert(
    rows: list[NewMessage], alias: str, new_ids: bool, derived: Collection[uuid.UUID]
) -> dict[uuid.UUID, tuple[int, dt.datetime]]:
    """Insert rows; return the primary key and the creation of each, by message id."""
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
    return created


def after_commit(
    alias: str, broker: str, ids: list[int], rows: list[NewMessage]
) -> None:
    """Announce stored rows, and wake the dispatcher, once the transaction commits."""
    hook = _open_hook(alias, broker)
    if hook is not None:
        hook.note(ids, rows)
        return
    hook = AfterCommit(alias, broker)
    hook.note(ids, rows)
    connections[alias].on_commit(hook, robust=True)


def _open_hook(alias: str, broker: str) -> AfterCommit | None:
    """Return the hook of the messages stored last, if it is for these too.

    Those stored one after another under the same savepoints share one, so that they
    are dispatched together; a savepoint's rollback drops its hooks.
    """
    last = last_hook(connections[alias])
    if not isinstance(last, AfterCommit) or last.called:
        return None
    return last if (last.alias, last.broker) == (alias, broker) else None


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
    """The one on_commit hook of a transaction, for all messages of one savepoint."""

    def __init__(self, alias: str, broker: str) -> None:
        # Django names a robust hook by it when it fails; of a class, an instance has
        # none.
        self.__qualname__ = "django_txmsg.outbox"
        self.alias, self.broker = alias, broker
        self.ids: list[int] = []
        self.stored: list[tuple[uuid.UUID, str]] = []
        #: Not inserted yet, and whether one of them may be there already.
        self.gathered: list[NewMessage] = []
        self.derived = False
        #: As a TestCase does with hooks, in the middle of its transaction.
        self.called = False

    def note(self, ids: list[int], rows: list[NewMessage]) -> None:
        """Add rows that are inserted."""
        self.ids += ids
        if signals.announced(signals.message_stored):
            self.stored += [(row.message_id, row.destination) for row in rows]

    def __call__(self) -> None:
        self.called = True
        if self.gathered:
            self._store_late()
        for message_id, destination in self.stored:
            signals.announce(
                signals.message_stored,
                id=message_id,
                destination=destination,
                using=self.alias,
            )
        signals.messages_committed.send_robust(
            sender=None, using=self.alias, broker=self.broker, ids=self.ids
        )

    def _store_late(self) -> None:
        """Store what was accepted and never flushed: the transaction has committed, so
        it is due to leave, and a message is never dropped in silence."""
        connection, count = connections[self.alias], len(self.gathered)
        if not in_block(connection):  # as it is when a TestCase runs its hooks
            log.error(
                "%d messages, the first %s to %r, were gathered in a transaction that "
                "committed without a flush. They are stored now and leave, but a crash "
                "in between would have lost them: please report how this came about.",
                count,
                self.gathered[0].message_id,
                self.gathered[0].destination,
            )
        with transaction.atomic(using=self.alias):
            _flush([self], self.alias)
