"""Hops 1 and 9: `send_message()`, called inside a transaction, stores a message.

It inserts a row that commits with the business data or not at all, and asks for the
dispatcher to be woken after the commit. It never talks to a broker, but for a stage
whose messages belong to the broker's own transaction (best_effort_1pc, broker_only).
"""

from __future__ import annotations

import datetime as dt
import itertools
import os
import random
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from django.db import connections, router, transaction
from django.utils import timezone

from . import conf, serializers, signals, tracing, wire
from .errors import DuplicateMessage, InvalidMessage, TransactionRequired
from .message import (
    Message,
    check_destination,
    check_duration,
    check_headers,
    check_key,
)
from .models import OutboxMessage
from .models.outbox import NewMessage

#: Messages that wait for one INSERT at most.
MAX_GATHERED = 1000


@dataclass
class Scope:
    """What the messages sent in this context belong to: an HTTP session or a stage.

    `cause` is the message that a stage processes; its own messages get ids derived
    from it. `enlist`, when set, takes messages into the broker's transaction instead
    of the outbox. `gathers` is the connection of somebody who promises to `flush()` it
    before its commit: plain messages wait until then, and share an INSERT. `stored`
    counts the messages stored, by database alias, and `transactions` has the ids of the
    transactions they are in, where databases tell.
    """

    session_id: uuid.UUID
    using: str | None = None
    cause: Message | None = None
    stage: str = ""
    enlist: Callable[[NewMessage], None] | None = None
    gathers: Any = None
    stored: dict[str, int] = field(default_factory=dict)
    transactions: dict[str, str] = field(default_factory=dict)
    ordinals: Iterator[int] = field(default_factory=itertools.count)


_scope: ContextVar[Scope | None] = ContextVar("django_txmsg_scope", default=None)


def current_scope() -> Scope | None:
    """Return the scope that messages sent now would belong to."""
    return _scope.get()


def enter_scope(entered: Scope | None) -> Scope | None:
    """Make messages sent from now on belong to `entered`, and return what was before.

    For a scope that does not end where it began, as a request's under ASGI.
    """
    before = _scope.get()
    _scope.set(entered)
    return before


@contextmanager
def scope(entered: Scope) -> Iterator[Scope]:
    """Make messages sent inside belong to `entered`."""
    token = _scope.set(entered)
    try:
        yield entered
    finally:
        _scope.reset(token)


def send_message(
    destination: str,
    body: object,
    *,
    headers: Mapping[str, str] | None = None,
    message_id: uuid.UUID | None = None,
    key: str | None = None,
    delay: dt.timedelta | None = None,
    expires: dt.timedelta | None = None,
    using: str | None = None,
    broker: str = "default",
) -> Message:
    """Store one message; it leaves if and only if the open transaction commits.

    `body` is anything JSON can carry (with Decimal, date, time, UUID as strings) or
    bytes. Messages of one `key` leave in the order they were stored. `delay` and
    `expires` count from now, by the database's clock. `using` names the database.

    Raises TransactionRequired outside a transaction, InvalidMessage for what cannot be
    carried, DuplicateMessage when `message_id` is stored already. Nothing is stored
    then, and the transaction can go on.
    """
    return send_messages(
        [
            {
                "destination": destination,
                "body": body,
                "headers": headers,
                "message_id": message_id,
                "key": key,
                "delay": delay,
                "expires": expires,
            }
        ],
        using=using,
        broker=broker,
    )[0]


def send_messages(
    messages: Iterable[Mapping[str, Any]],
    *,
    using: str | None = None,
    broker: str = "default",
) -> list[Message]:
    """Store many messages in a few INSERTs: dicts of send_message()'s arguments.

    All are checked before the first is stored. Raises as send_message() does; after a
    DuplicateMessage, none of them is stored.
    """
    settings = conf.get()
    if broker not in settings.BROKERS:
        raise InvalidMessage(
            f'No broker {broker!r} under TXMSG["BROKERS"]; '
            f"known: {', '.join(sorted(settings.BROKERS))}."
        )
    current = _scope.get()
    given = list(messages)
    prepared = [_prepare(one, current, broker, settings) for one in given]
    if current is not None and current.enlist is not None:
        now = timezone.now()
        for row in prepared:
            if row.expiry is not None:
                row.expires_at = now + dt.timedelta(seconds=row.expiry)
            current.enlist(row)
        return _messages(given, prepared, [now] * len(prepared), settings.SERVICE)
    alias = using or (current and current.using) or router.db_for_write(OutboxMessage)
    if not prepared:
        return []
    require_transaction(alias, prepared[0].destination)
    new_ids = not any(one.get("message_id") for one in given)
    inside = current is not None and current.cause is not None
    derived = {
        row.message_id
        for row, one in zip(prepared, given, strict=True)
        if inside and not one.get("message_id")
    }
    connection = connections[alias]
    if (
        current is not None
        and current.gathers is connection
        and connection.in_atomic_block
        and len(prepared) < MAX_GATHERED
        and new_ids
        and all(map(_plain, prepared))
    ):
        created = _gather(prepared, alias, broker, derived=bool(derived))
    elif connection.in_atomic_block:
        created = store(
            prepared, alias, new_ids=new_ids and not inside, derived=derived
        )
    else:
        # Without REQUIRE_ATOMIC: still all of them or none.
        with transaction.atomic(using=alias):
            created = store(
                prepared, alias, new_ids=new_ids and not inside, derived=derived
            )
    if current is not None:
        current.stored[alias] = current.stored.get(alias, 0) + len(prepared)
    return _messages(given, prepared, created, settings.SERVICE)


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
    """Insert what was gathered in the open transaction and not rolled back since."""
    hooks = [
        hook
        for _, hook, *_ in connections[alias].run_on_commit
        if isinstance(hook, _Committed) and hook.gathered and hook.alias == alias
    ]
    if hooks:
        _flush(hooks, alias)


def _flush(hooks: list[_Committed], alias: str) -> None:
    rows = [row for hook in hooks for row in hook.gathered]
    new_ids = not any(hook.derived for hook in hooks)
    derived = () if new_ids else {row.message_id for row in rows}
    created = _insert(rows, alias, new_ids, derived)
    for hook in hooks:
        own = [row for row in hook.gathered if row.message_id in created]
        hook.gathered = []
        hook.note([created[row.message_id][0] for row in own], own)


def _plain(row: NewMessage) -> bool:
    """Return whether nobody can tell when, in its transaction, a message is inserted:
    its place among others of its key says so, and so does what counts from now."""
    return not row.key and not row.delay and row.expiry is None


def _gather(
    rows: list[NewMessage], alias: str, broker: str, *, derived: bool
) -> list[dt.datetime]:
    hook = _open_hook(alias, broker)
    if hook is None:
        hook = _Committed(alias, broker)
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
    stored = OutboxMessage.objects.db_manager(alias).store(rows, new_ids=new_ids)
    created = {message_id: (pk, instant) for pk, message_id, instant, _ in stored}
    missing = {row.message_id for row in rows} - created.keys()
    if not (missing <= set(derived) if missing else len(created) == len(rows)):
        ids = [pk for pk, _ in created.values()]
        OutboxMessage.objects.using(alias).filter(pk__in=ids).delete()
        raise DuplicateMessage(_duplicates(rows, set(created)))
    current = _scope.get()
    if current is not None and stored and stored[0][3] is not None:
        current.transactions[alias] = str(stored[0][3])
    return created


def after_commit(
    alias: str, broker: str, ids: list[int], rows: list[NewMessage]
) -> None:
    """Announce stored rows, and wake the dispatcher, once the transaction commits."""
    hook = _open_hook(alias, broker)
    if hook is not None:
        hook.note(ids, rows)
        return
    hook = _Committed(alias, broker)
    hook.note(ids, rows)
    connections[alias].on_commit(hook, robust=True)


def _open_hook(alias: str, broker: str) -> _Committed | None:
    """Return the hook of the messages stored last, if it is for these too.

    Those stored one after another under the same savepoints share one, so that they
    are dispatched together; a savepoint's rollback drops its hooks.
    """
    connection: Any = connections[alias]
    if connection.in_atomic_block and connection.run_on_commit:
        sids, last, _ = connection.run_on_commit[-1]
        if (
            isinstance(last, _Committed)
            and sids == set(connection.savepoint_ids)
            and (last.alias, last.broker) == (alias, broker)
        ):
            return last
    return None


def require_transaction(alias: str, destination: str) -> None:
    """Raise TransactionRequired unless a transaction is open on `alias`."""
    if connections[alias].in_atomic_block or not conf.get().REQUIRE_ATOMIC:
        return
    raise TransactionRequired(
        f"send_message() to {destination!r} needs an open transaction on database "
        f"{alias!r}, so that the message leaves only with your data. Wrap the call and "
        f"your own queries in transaction.atomic(using={alias!r}), or use "
        f"outbox_session(). In an async view or a streaming response, do so inside "
        f'sync_to_async(). TXMSG["REQUIRE_ATOMIC"] = False gives this up.'
    )


def wire_headers(row: Any, service: str, created: str) -> dict[str, str]:
    """Return the headers of an outbox row as they go on the wire; `created` is the
    instant of its storing, formatted for it."""
    headers = dict(row.headers)
    headers[wire.CONTENT_TYPE] = row.content_type
    headers[wire.MESSAGE_ID] = str(row.message_id)
    headers[wire.SERVICE] = service
    headers[wire.CREATED] = created
    if row.key:
        headers[wire.KEY] = row.key
    if row.correlation_id:
        headers[wire.CORRELATION_ID] = row.correlation_id
    if row.expires_at is not None:
        headers[wire.EXPIRES] = wire.format_instant(row.expires_at)
    return headers


#: Ids need no secret: this spares the system call that each would cost. Seeded by the
#: system and by nobody else, so that two processes that seed the shared generator
#: alike, as tests do, make different ones.
_random = random.Random()  # noqa: S311
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_random.seed)


def new_id() -> uuid.UUID:
    """Return a UUID of version 7 (RFC 9562): time first, so that an index on it
    grows at one end."""
    value = int(time.time() * 1000) << 80 | _random.getrandbits(80)
    value = value & ~(0xF << 76) | 0x7 << 76
    return uuid.UUID(int=value & ~(0x3 << 62) | 0x2 << 62)


def _prepare(
    given: Mapping[str, Any],
    current: Scope | None,
    broker: str,
    settings: conf.Settings,
) -> NewMessage:
    unknown = given.keys() - _ARGUMENTS
    if unknown or "destination" not in given or "body" not in given:
        raise InvalidMessage(
            f"A message is a dict with destination and body, and perhaps "
            f"{', '.join(sorted(_ARGUMENTS - {'destination', 'body'}))}; "
            f"got {', '.join(sorted(map(str, given)))}."
        )
    body, content_type = serializers.encode(given["body"])
    if len(body) > settings.MAX_MESSAGE_BYTES:
        raise InvalidMessage(
            f"The body has {len(body)} bytes; at most {settings.MAX_MESSAGE_BYTES} are "
            f'taken (TXMSG["MAX_MESSAGE_BYTES"]). Store it elsewhere and send a link.'
        )
    headers = check_headers(given.get("headers"))
    correlation_id = headers.pop(wire.CORRELATION_ID, "")
    if len(correlation_id) > 255:
        raise InvalidMessage("The header 'correlation-id' is longer than 255.")
    message_id = given.get("message_id")
    if message_id is not None and not isinstance(message_id, uuid.UUID):
        raise InvalidMessage(f"message_id must be a uuid.UUID, not {message_id!r}.")
    if current is not None and current.cause is not None:
        cause = current.cause
        ordinal = next(current.ordinals)
        message_id = message_id or wire.derived_id(cause.id, current.stage, ordinal)
        correlation_id = correlation_id or cause.correlation_id or str(cause.id)
    message_id = message_id or new_id()
    destination = check_destination(given["destination"])
    tracing.stored(message_id, destination, headers)
    if current is not None and current.cause is not None:
        inherited = current.cause.headers.get(wire.TRACEPARENT)
        if inherited is not None:
            headers.setdefault(wire.TRACEPARENT, inherited)
    delay = check_duration("delay", given.get("delay"))
    return NewMessage(
        message_id=message_id,
        broker=broker,
        destination=destination,
        key=check_key(given.get("key")),
        correlation_id=correlation_id,
        session_id=current.session_id if current else None,
        headers=headers,
        content_type=content_type,
        body=body,
        delay=delay.total_seconds() if delay else 0.0,
        expiry=_seconds(check_duration("expires", given.get("expires"))),
    )


_ARGUMENTS = frozenset(
    {"destination", "body", "headers", "message_id", "key", "delay", "expires"}
)


def _messages(given: Any, prepared: Any, created: Any, service: str) -> list[Message]:
    return [
        Message(
            id=row.message_id,
            destination=row.destination,
            body=one["body"],
            headers=row.headers,
            key=row.key or None,
            created_at=instant,
            correlation_id=row.correlation_id or None,
            service=service,
        )
        for one, row, instant in zip(given, prepared, created, strict=True)
    ]


def _seconds(duration: dt.timedelta | None) -> float | None:
    return None if duration is None else duration.total_seconds()


def _duplicates(rows: list[NewMessage], stored: set[uuid.UUID]) -> str:
    ids = [str(row.message_id) for row in rows]
    twice = sorted({one for one in ids if ids.count(one) > 1} or set(ids))
    known = [one for one in twice if uuid.UUID(one) not in stored] or twice
    return (
        f"Message {', '.join(known[:5])} is stored already, and an id is stored once. "
        f"If this is a retry, the first call has done the work; for another message, "
        f"use another id."
    )


class _Committed:
    """The one on_commit hook of a transaction, for all messages of one savepoint.

    A plain callable object with a `__qualname__`, since Django's robust hooks log it.
    """

    __qualname__ = "django_txmsg.outbox"

    def __init__(self, alias: str, broker: str) -> None:
        self.alias, self.broker = alias, broker
        self.ids: list[int] = []
        self.stored: list[tuple[uuid.UUID, str]] = []
        #: Not inserted yet, and whether one of them may be there already.
        self.gathered: list[NewMessage] = []
        self.derived = False

    def note(self, ids: list[int], rows: list[NewMessage]) -> None:
        """Add rows that are inserted."""
        self.ids += ids
        if signals.announced(signals.message_stored):
            self.stored += [(row.message_id, row.destination) for row in rows]

    def __call__(self) -> None:
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
