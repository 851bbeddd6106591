"""Hop 1: inserts rows into the outbox, and dispatches them after their commit."""

from __future__ import annotations

import datetime as dt
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from django.db import IntegrityError, connections, transaction
from django.utils import timezone

from .. import conf, signals, wire
from ..django_internals import hooks, in_block, last_hook
from ..envelope.message import Message
from ..errors import DuplicateMessage
from ..models import OutboxMessage
from ..models.fields import OneOf
from ..models.outbox_store import NewMessage
from .scope import CommitHook, current_scope


def store(rows: list[NewMessage], alias: str) -> list[dt.datetime]:
    """Insert rows into the outbox. Return the creation time of each row, or the current
    time for a row that is skipped.

    Raises DuplicateMessage, and stores nothing, if one of the ids is stored already.
    There is one exception: rows that have no unique key, and have an id that was
    derived from the message that a stage is processing. If the same message is already
    stored under the id of such a row, the row is skipped. If a different message is
    stored under this id, the row gets a new id and is stored.
    """
    if not in_block(connections[alias]):
        # Without REQUIRE_ATOMIC: still all of them or none.
        with transaction.atomic(using=alias):
            return store(rows, alias)
    current, lock, alone = current_scope(), None, False
    service = conf.get().SERVICE
    for row in rows:
        row.service = row.service or service
    # Read once: another thread that shares the scope may end the session.
    session = current.session if current is not None else None
    if current is not None and current.using == alias and session is not None:
        session_id, lock = session.join()
        alone = lock is None
        for row in rows:
            row.session_id = session_id
    created, xid, locked_at = OutboxMessage.objects.db_manager(alias).store(
        rows,
        new_ids=all(row.origin == "new" and not row.unique for row in rows),
        tell_transaction=alone,
        lock=lock,
    )
    missing = [row for row in rows if row.message_id not in created]
    refused = [row for row in missing if row.origin != "derived" or row.unique]
    if refused or len(created) + len(missing) < len(rows):
        ids = [pk for pk, _ in created.values()]
        OutboxMessage.objects.using(alias).filter(OneOf("pk", ids)).delete()
        counts = Counter(row.message_id for row in rows)
        twice = [message_id for message_id, count in counts.items() if count > 1]
        raise already_stored([row.message_id for row in refused] or twice)
    instants = {message_id: instant for message_id, (_, instant) in created.items()}
    if missing and (apart := set_apart(missing, alias)):
        ids_apart = [row.message_id for row in apart]
        instants |= zip(ids_apart, store(apart, alias), strict=True)
    if current is not None:
        current.stored[alias] = current.stored.get(alias, 0) + len(created)
        if xid is not None:
            current.transactions[connections[alias]] = xid
        if locked_at is not None:
            current.newest = max(locked_at, current.newest or locked_at)
    by_broker: dict[str, dict[int, uuid.UUID]] = {}
    spans = {}
    for row in rows:
        if row.message_id in created:
            pk, _ = created[row.message_id]
            by_broker.setdefault(row.broker, {})[pk] = row.message_id
            if row.committed is not None:
                spans[pk] = row.committed
    for broker, stored in by_broker.items():
        after_commit(alias, broker, new=stored).committed |= spans
    now = timezone.now()
    return [instants.get(row.message_id, now) for row in rows]


def set_apart(rows: list[NewMessage], alias: str) -> list[NewMessage]:
    """Give a row a new id if another message is stored under the row's derived id.
    Returns the changed rows.

    An earlier attempt of the stage may have committed such other messages, for example
    in a session of its own. Raises IntegrityError if no message is stored under the
    row's id.
    """
    known = OutboxMessage.objects.using(alias).filter(
        OneOf("message_id", [row.message_id for row in rows]), replay_id=""
    )
    stored = {
        message_id: (destination, key, bytes(body))
        for message_id, destination, key, body in known.values_list(
            "message_id", "destination", "key", "body"
        )
    }
    apart = []
    for row in rows:
        own = row.destination, row.key, row.body
        if row.message_id not in stored:
            transaction.set_rollback(True, using=alias)
            raise IntegrityError(
                f"Message {row.message_id} could not be stored, because its row got a "
                f"primary key that exists already: the sequence of the table is behind "
                f"its rows. manage.py txmsg doctor says what to do."
            )
        if stored[row.message_id] != own:
            row.message_id = wire.other_id(row.message_id, *own)
            apart.append(row)
    return apart


def as_sent(row: NewMessage, created_at: dt.datetime) -> Message:
    """Return the Message that the sender gets for a row that was just stored."""
    return Message(
        id=row.message_id,
        destination=row.destination,
        body=row.given,
        headers=row.headers,
        key=row.key or None,
        created_at=created_at,
        correlation_id=row.correlation_id or None,
        service=conf.get().SERVICE,
    )


def after_commit(
    alias: str,
    broker: str,
    *,
    new: Mapping[int, uuid.UUID] | None = None,
    due: Collection[int] = (),
) -> AfterCommit:
    """Register a hook that wakes the dispatcher after the commit, and return the hook.
    `new` maps the primary keys of new rows to their message ids. `due` lists the
    primary keys of older rows that are now due.

    Rows that are stored one after the other under the same savepoints share one hook,
    and are dispatched together.
    """
    hook = last_hook(connections[alias])
    if (
        not isinstance(hook, AfterCommit)
        or hook.called
        or (hook.alias, hook.broker) != (alias, broker)
    ):
        pending = hooks(connections[alias])
        earlier = (one.owners for one in pending if isinstance(one, AfterCommit))
        hook = AfterCommit(alias, broker, next(earlier, {}))
        connections[alias].on_commit(hook, robust=True)
    for pk, message_id in (new or {}).items():
        hook.new[pk] = message_id
        hook.owners[message_id] = hook.new
    hook.ids += [*(new or ()), *due]
    return hook


def already_stored(ids: Sequence[uuid.UUID]) -> DuplicateMessage:
    """Return the error for messages whose ids are stored already."""
    named = ", ".join(map(str, list(dict.fromkeys(ids))[:5]))
    return DuplicateMessage(
        f"Message {named} is stored already, and an id is stored once. If this is a "
        f"retry, the first call has done the work; for another message, use another id."
    )


class AfterCommit(CommitHook):
    """The hook that runs after the commit of the rows that were stored under one
    savepoint.

    Django drops the hook when an `atomic()` block is rolled back, but keeps the hook
    after `savepoint_rollback()` and `ROLLBACK TO SAVEPOINT`. So some of the hook's rows
    may not exist. That does no harm: no dispatcher can claim a missing row, and no
    event is sent for one.
    """

    def __init__(
        self, alias: str, broker: str, owners: dict[uuid.UUID, Mapping[int, uuid.UUID]]
    ) -> None:
        super().__init__(alias)
        # Django logs a robust hook's name when it fails; an instance has none of its
        # own.
        self.__qualname__ = "django_txmsg.outbox"
        self.alias, self.broker = alias, broker
        self.ids: list[int] = []
        #: By primary key. SQLite may reuse the primary key of a rolled-back row.
        self.new: dict[int, uuid.UUID] = {}
        #: The `new` of the hook that stored a message last in the transaction. Earlier
        #: hooks' rows of that id were rolled back by hand, even if the key is the same.
        self.owners = owners
        #: Functions that end the spans of new rows, by primary key.
        self.committed: dict[int, Callable[[], None]] = {}

    def __call__(self) -> None:
        super().__call__()
        try:
            self._announce()
        finally:
            signals.messages_committed.send_robust(
                sender=None, using=self.alias, broker=self.broker, ids=self.ids
            )

    def _announce(self) -> None:
        """Send the signal `message_stored` for each row that exists."""
        if not self.new:
            return
        if not self.committed and not signals.announced(signals.message_stored):
            return
        rows = OutboxMessage.objects.db_manager(self.alias)
        for pk, message_id, destination in rows.there(self.new):
            if self.new[pk] == message_id and self.owners[message_id] is self.new:
                if pk in self.committed:
                    self.committed[pk]()
                signals.announce(
                    signals.message_stored,
                    id=message_id,
                    destination=destination,
                    using=self.alias,
                )
