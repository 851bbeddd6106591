"""Hops 1 and 9: `send_message()`, called inside a transaction, stores a message.

It inserts a row that commits with the business data or not at all, and asks for the
dispatcher to be woken after the commit. It never talks to a broker, but for a stage
whose messages belong to the broker's own transaction (best_effort_1pc, broker_only).
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

from django.db import connections, router, transaction
from django.utils import timezone

from .. import codecs, conf, tracing, wire
from ..django_internals import in_block
from ..envelope import serializers
from ..envelope.message import (
    Message,
    check_destination,
    check_duration,
    check_headers,
    check_key,
    new_id,
)
from ..errors import InvalidMessage, TransactionRequired
from ..models import OutboxMessage
from ..models.outbox_store import NewMessage
from .scope import Scope, current_scope
from .storing import store
from .typed_name import TypedName
from .unique import store_unique


def send_message(
    destination: str | TypedName[Any],
    body: object,
    *,
    headers: Mapping[str, str] | None = None,
    message_id: uuid.UUID | None = None,
    key: str | None = None,
    delay: dt.timedelta | None = None,
    expires: dt.timedelta | None = None,
    using: str | None = None,
    broker: str = "default",
    unique: str | None = None,
    on_conflict: Literal["error", "skip"] = "error",
) -> Message:
    """Store one message; it leaves if and only if the open transaction commits.

    `body` is anything JSON can carry (with Decimal, date, time, UUID as strings),
    bytes, or an object of a typed message's class, which is validated. Messages of one
    `key` leave in the order they were stored. `delay` and `expires` count from now, by
    the database's clock. `using` names the database. A pending message holds its
    `unique` key alone, until a relay has it in hand or it is cancelled or expired: with
    `on_conflict` "skip", nothing is stored meanwhile, and the message that has the key
    is returned, which leaves after this transaction.

    Raises TransactionRequired outside a transaction, InvalidMessage for what cannot be
    carried, DuplicateMessage when `message_id` is stored already, AlreadyPending when
    `unique` is held. Nothing is stored then, and the transaction can go on.
    """
    one: dict[str, Any] = {
        "destination": destination,
        "body": body,
        "headers": headers,
        "message_id": message_id,
        "key": key,
        "delay": delay,
        "expires": expires,
    }
    if unique is not None:
        one |= {"unique": unique, "on_conflict": on_conflict}
    return send_messages([one], using=using, broker=broker)[0]


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
    current = current_scope()
    given = list(messages)
    prepared = [_prepare(one, current, broker, settings) for one in given]
    if current is not None and current.enlist is not None:
        now = timezone.now()
        for row in prepared:
            if row.unique:
                raise InvalidMessage(
                    "unique= needs the outbox, and this stage's messages belong to the "
                    'transaction of its broker. Use transaction="outbox".'
                )
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
    if [row for row in prepared if row.unique]:
        with transaction.atomic(using=alias):
            instants, there = store_unique(prepared, alias, derived=derived)
        if current is not None:
            current.stored[alias] = current.stored.get(alias, 0) + len(instants)
        now = timezone.now()
        created = [instants.get(row.message_id, now) for row in prepared]
        found = _messages(given, prepared, created, settings.SERVICE)
        return [there.get(one.id, one) for one in found]
    created = store_ready(
        prepared, alias, new_ids=new_ids and not derived, derived=derived
    )
    return _messages(given, prepared, created, settings.SERVICE)


def store_ready(
    rows: list[NewMessage],
    alias: str,
    *,
    new_ids: bool,
    derived: Collection[uuid.UUID] = (),
) -> list[dt.datetime]:
    """Store rows that need no more checks, and return when each was created.

    `new_ids` says that none of them can be stored already; of the `derived` ids one is,
    when what stored it runs again. Raises DuplicateMessage.
    """
    current = current_scope()
    if in_block(connections[alias]):
        created = store(rows, alias, new_ids=new_ids, derived=derived)
    else:
        # Without REQUIRE_ATOMIC: still all of them or none.
        with transaction.atomic(using=alias):
            created = store(rows, alias, new_ids=new_ids, derived=derived)
    if current is not None:
        current.stored[alias] = current.stored.get(alias, 0) + len(rows)
    return created


def require_transaction(alias: str, destination: str) -> None:
    """Raise TransactionRequired unless a transaction is open on `alias`."""
    if in_block(connections[alias]) or not conf.get().REQUIRE_ATOMIC:
        return
    raise TransactionRequired(
        f"send_message() to {destination!r} needs an open transaction on database "
        f"{alias!r}, so that the message leaves only with your data. Wrap the call and "
        f"your own queries in transaction.atomic(using={alias!r}), use "
        f"outbox_session(), or add django_txmsg.middleware.OutboxMiddleware to "
        f"MIDDLEWARE, which does so for each request. In an async view or a streaming "
        f"response, do so inside "
        f'sync_to_async(). TXMSG["REQUIRE_ATOMIC"] = False gives this up.'
    )


def _prepare(
    given: Mapping[str, Any],
    current: Scope | None,
    broker: str,
    settings: conf.Settings,
) -> NewMessage:
    if not _NEEDED <= given.keys() <= _ARGUMENTS:
        raise InvalidMessage(
            f"A message is a dict with destination and body, and perhaps "
            f"{', '.join(sorted(_ARGUMENTS - _NEEDED))}; "
            f"got {', '.join(sorted(map(str, given)))}."
        )
    body, content_type, body_type = encoded(given["destination"], given["body"])
    if len(body) > settings.MAX_MESSAGE_BYTES:
        raise InvalidMessage(
            f"The body has {len(body)} bytes; at most {settings.MAX_MESSAGE_BYTES} are "
            f'taken (TXMSG["MAX_MESSAGE_BYTES"]). Store it elsewhere and send a link.'
        )
    headers = check_headers(given.get("headers"))
    correlation_id = headers.pop(wire.CORRELATION_ID, "")
    if len(correlation_id) > wire.MAX_CORRELATION_ID:
        raise InvalidMessage(
            f"The header 'correlation-id' is longer than {wire.MAX_CORRELATION_ID}."
        )
    if body_type:
        headers[wire.TYPE] = body_type
    message_id = given.get("message_id")
    if message_id is not None and not isinstance(message_id, uuid.UUID):
        raise InvalidMessage(f"message_id must be a uuid.UUID, not {message_id!r}.")
    if current is not None and current.cause is not None:
        cause = current.cause
        ordinal = next(current.ordinals)
        message_id = message_id or wire.derived_id(
            settings.SERVICE, cause.id, current.stage, ordinal
        )
        correlation_id = correlation_id or cause.correlation_id or str(cause.id)
    message_id = message_id or new_id()
    destination = given["destination"]
    if isinstance(destination, TypedName):
        destination = destination.name
    destination = check_destination(destination)
    tracing.stored(message_id, destination, headers)
    if current is not None and current.cause is not None:
        inherited = wire.traceparent(current.cause.headers)
        if inherited is not None:
            headers.setdefault(wire.TRACEPARENT, inherited)
    delay = check_duration("delay", given.get("delay"))
    row = NewMessage(
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
    if "unique" in given:
        row.unique, row.skips = _unique(given)
    return row


def _unique(given: Mapping[str, Any]) -> tuple[str, bool]:
    unique, on_conflict = given["unique"], given.get("on_conflict", "error")
    if on_conflict not in ("error", "skip"):
        raise InvalidMessage(
            f'on_conflict={on_conflict!r} is neither "error" nor "skip".'
        )
    return check_key(unique), on_conflict == "skip"


def encoded(destination: object, body: object) -> tuple[bytes, str, str]:
    """Return a body's bytes, their content type and their `txmsg-type`, which is empty
    where nothing says what the body is."""
    typed = (
        destination.type_of(body)
        if isinstance(destination, TypedName)
        else codecs.type_of(body)
    )
    if typed is None:
        return *serializers.encode(body), ""
    return typed.encode(body), wire.JSON, typed.header if typed.name else ""


_NEEDED = frozenset({"destination", "body"})
_ARGUMENTS = frozenset(
    {
        *("destination", "body", "headers", "message_id", "key", "delay", "expires"),
        *("unique", "on_conflict"),
    }
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
