"""Hops 1 and 9: `send_message()`, called inside a transaction, stores a message.

`send_message()` inserts a row that commits with your data or not at all. After the
commit, the dispatcher is woken. `send_message()` uses the broker only in a stage whose
messages belong to the broker's transaction (best_effort_1pc, broker_only).
"""

from __future__ import annotations

import datetime as dt
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, get_args

from django.db import connections, transaction
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
from ..envelope.typed_body import BodyType
from ..errors import InvalidMessage, TransactionRequired
from ..models.outbox_store import NewMessage, OnConflict, Origin, UniqueUntil
from .scope import Scope, alias_of, current_scope
from .storing import as_sent, store
from .unique import check_until, store_unique

#: The names of destinations whose consumers know the headers of JMS alone.
foreign_names: set[str] = set()


class Typed(Protocol):
    """A destination with types of bodies: `destination.TypedName`."""

    name: str

    def type_of(self, body: object) -> BodyType:
        """Return the type of a body. Raises InvalidMessage if the destination does not
        have this type."""


if TYPE_CHECKING:

    class TickOptions(TypedDict, total=False):
        """The options of `send_message()` that a recurring message has, too."""

        headers: Mapping[str, str] | None
        key: str | None
        expires: dt.timedelta | None
        broker: str
        unique: str | None
        unique_until: UniqueUntil

    class SendOptions(TickOptions, total=False):
        """The options of `send_message()`, for functions that pass them on."""

        message_id: uuid.UUID | None
        delay: dt.timedelta | None
        using: str | None
        on_conflict: OnConflict


def send_message(
    destination: str | Typed,
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
    on_conflict: OnConflict = "error",
    unique_until: UniqueUntil = "left",
) -> Message:
    """Store one message. The message is sent if and only if the open transaction
    commits. There is one exception: in a stage of mode `best_effort_1pc` or
    `broker_only`, the message is sent if and only if the stage succeeds. In a stage of
    mode `none`, this is also so if the handler has opened no transaction on the
    message's database.

    - `body` is a JSON value (Decimal, date, time and UUID become strings), bytes, or an
      object of a typed message's class, which is validated.
    - Messages with the same `key` are sent in the order in which they were stored.
    - `delay` and `expires` count from now, by the database's clock. But in a stage of
      mode `none`, a message that is stored after the handler has returned counts them
      from then.
    - `using` is the database's alias.
    - Only one pending message can have a `unique` key. The key is free again when a
      relay claims the message, or when the message expires or is cancelled. With
      `unique_until="processed"`, the key is free again when a stage of this service has
      processed or buried the message.
    - `on_conflict` says what to do if the `unique` key is taken: "error" raises
      AlreadyPending, "skip" stores nothing and returns the pending message, and
      "replace" cancels the pending message. A pending message that "skip" returns is
      sent only after this transaction ends.

    Raises TransactionRequired if no transaction is open, InvalidMessage if the message
    cannot be sent, DuplicateMessage if `message_id` is stored already, and
    AlreadyPending. After these errors, nothing is stored, and the transaction can go
    on.
    """
    row = _new_message(
        destination,
        body,
        headers=headers,
        message_id=message_id,
        key=key,
        delay=delay,
        expires=expires,
        broker=broker,
        unique=unique,
        on_conflict=on_conflict,
        unique_until=unique_until,
    )
    return _send([row], using)[0]


def send_messages(
    messages: Iterable[Mapping[str, Any]],
    *,
    using: str | None = None,
    broker: str = "default",
) -> list[Message]:
    """Store many messages in a few INSERTs. Each message is a dict of the arguments of
    `send_message()`.

    All messages are checked before the first is stored. Raises the errors of
    `send_message()`; then none of the messages is stored.
    """
    return _send([_from_dict(one, broker) for one in messages], using)


def send_part(
    destination: str | Typed,
    body: object,
    conversation: Mapping[str, str],
    *,
    correlation_id: str = "",
    using: str | None = None,
    broker: str = "default",
    **more: Any,
) -> Message:
    """Store a message that belongs to a conversation of a flow. `conversation` has the
    headers that identify the conversation; `more` are further arguments of
    send_message(), whose errors this function raises."""
    own = {wire.CORRELATION_ID: correlation_id} if correlation_id else None
    given = {"destination": destination, "body": body, "headers": own, **more}
    return send_parts([(given, conversation)], using=using, broker=broker)[0]


def send_parts(
    parts: Iterable[tuple[Mapping[str, Any], Mapping[str, str]]],
    *,
    using: str | None = None,
    broker: str = "default",
) -> list[Message]:
    """Store many messages of conversations in a few INSERTs. Each part is a pair: a
    dict of the arguments of `send_message()`, and the headers of the message's
    conversation. Raises the errors of `send_message()`."""
    rows: list[NewMessage] = []
    for given, conversation in parts:
        row = _from_dict(given, broker)
        _join(row, conversation)
        rows.append(row)
    return _send(rows, using)


def _join(row: NewMessage, conversation: Mapping[str, str]) -> None:
    """Add a conversation's headers to a message. If the destination is foreign, also
    add the JMS headers with the same meaning."""
    row.headers |= conversation
    if row.destination in foreign_names and wire.is_request(row.headers):
        row.headers[wire.JMS_REPLY_TO] = row.headers[wire.REPLY_TO]
        row.correlation_id = row.headers[wire.TICKET]


def _send(rows: list[NewMessage], using: str | None) -> list[Message]:
    alias, current = alias_of(using), current_scope()
    current = current and current.of_block(alias)
    enlist = None if current is None else current.enlist
    if current is not None and enlist is not None and alias != current.using:
        raise InvalidMessage(
            f"The message is for database {alias!r}, but stage {current.stage!r} sends "
            f"its messages after it has returned, without this database. Send it "
            f"inside outbox_session(using={alias!r}), or omit using=."
        )
    for row in rows:
        _identify(row, current, alias)
    if enlist is not None:
        return _enlist(rows, enlist)
    if not rows:
        return []
    require_transaction(alias, rows[0].destination)
    if any(row.unique for row in rows):
        with transaction.atomic(using=alias):
            return store_unique(rows, alias)
    return list(map(as_sent, rows, store(rows, alias)))


#: These headers of a signal, of an undo and of a delayed task contain an instant, which
#: differs at each attempt of a stage.
_TIMED = {wire.TICKET, wire.UNDOES, wire.TASK_RUN_AFTER}
_INSTANT = re.compile(r"\d{4}-\d\d-\d\dT[^;]*")


def _identify(row: NewMessage, current: Scope | None, alias: str) -> None:
    """Derive the id of a message that a stage sends, and begin the message's trace."""
    cause = None if current is None else current.cause
    if current is not None and cause is not None:
        derived = current.derived_id(alias, partial(_content, row))
        row.message_id = derived if row.origin == "derived" else row.message_id
    row.committed = tracing.created(row.message_id, row.destination, row.headers)
    inherited = None if cause is None else wire.traceparent(cause.headers)
    if inherited is not None:
        row.headers.setdefault(wire.TRACEPARENT, inherited)


def _content(row: NewMessage) -> tuple[object, ...]:
    """Return what tells a message apart from the others of its stage."""
    given = row.message_id if row.origin == "caller" else None
    headers = {k: v for k, v in row.headers.items() if k != wire.TRACEPARENT}
    for name in _TIMED & headers.keys():
        headers[name] = _INSTANT.sub("", headers[name], count=1)
    place = (given, row.broker, row.destination, row.key, row.correlation_id)
    return (*place, sorted(headers.items()), row.body)


def _enlist(
    rows: list[NewMessage], enlist: Callable[[list[NewMessage]], None]
) -> list[Message]:
    """Add messages to the broker's transaction in which the stage runs: all of them, or
    none if one is refused."""
    if any(row.unique for row in rows):
        raise InvalidMessage(
            "A message with unique= must be stored at once, but this stage stores its "
            'messages after it has returned. Use transaction="outbox".'
        )
    now = timezone.now()
    for row in rows:
        if row.expiry is not None:
            row.expires_at = now + dt.timedelta(seconds=row.expiry)
    enlist(rows)
    return [as_sent(row, now) for row in rows]


def require_transaction(alias: str, destination: str) -> None:
    """Raise TransactionRequired unless an atomic block is open on `alias`."""
    if in_block(connections[alias]) or not conf.get().REQUIRE_ATOMIC:
        return
    raise TransactionRequired(
        f"send_message() to {destination!r} needs an open transaction on database "
        f"{alias!r} (an atomic() block, also with autocommit off), so that the message "
        f"leaves only with your data. Wrap the call and "
        f"your own queries in transaction.atomic(using={alias!r}), use "
        f"outbox_session(), or add django_txmsg.middleware.OutboxMiddleware to "
        f"MIDDLEWARE, which does so for each request. In an async view or a streaming "
        f"response, do so inside "
        f'sync_to_async(). TXMSG["REQUIRE_ATOMIC"] = False lifts this requirement.'
    )


def _from_dict(given: Mapping[str, Any], broker: str) -> NewMessage:
    try:
        return _new_message(**given, broker=broker)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # a value is wrong, not an argument's name
        why = str(error).partition("() ")[2] or error
        raise InvalidMessage(
            f"A message is a dict of send_message()'s arguments: {why}."
        ) from None


def _new_message(
    destination: str | Typed,
    body: object,
    *,
    headers: Mapping[str, str] | None = None,
    message_id: uuid.UUID | None = None,
    key: str | None = None,
    delay: dt.timedelta | None = None,
    expires: dt.timedelta | None = None,
    broker: str,
    unique: str | None = None,
    on_conflict: OnConflict = "error",
    unique_until: UniqueUntil = "left",
) -> NewMessage:
    """Return the message that send_message() stores. Raises InvalidMessage."""
    settings, current = conf.get(), current_scope()
    if broker not in settings.BROKERS:
        raise InvalidMessage(
            f'No broker {broker!r} under TXMSG["BROKERS"]; '
            f"known: {', '.join(sorted(settings.BROKERS))}."
        )
    content, content_type, body_type = encoded(destination, body)
    if len(content) > settings.MAX_MESSAGE_BYTES:
        raise InvalidMessage(
            f"The body has {len(content)} bytes; at most {settings.MAX_MESSAGE_BYTES} "
            f'are accepted (TXMSG["MAX_MESSAGE_BYTES"]). Store it elsewhere and send a '
            f"link."
        )
    own_headers = check_headers(headers)
    correlation_id = own_headers.pop(wire.CORRELATION_ID, "")
    if len(correlation_id) > wire.MAX_CORRELATION_ID:
        raise InvalidMessage(
            f"The header 'correlation-id' is longer than {wire.MAX_CORRELATION_ID}."
        )
    if body_type:
        own_headers[wire.TYPE] = body_type
    if message_id is not None and not isinstance(message_id, uuid.UUID):
        raise InvalidMessage(f"message_id must be a uuid.UUID, not {message_id!r}.")
    if on_conflict not in get_args(OnConflict):
        raise InvalidMessage(
            f"on_conflict={on_conflict!r} is not one of "
            f"{', '.join(get_args(OnConflict))}."
        )
    check_until(unique, unique_until)
    origin: Origin = "new" if message_id is None else "caller"
    cause = None if current is None else current.cause
    if current is not None and cause is not None:
        if message_id is None:
            origin = "derived"  # from the cause's, by `_identify()`
        correlation_id = correlation_id or cause.correlation_id or str(cause.id)
    message_id = message_id or new_id()
    return NewMessage(
        message_id=message_id,
        origin=origin,
        broker=broker,
        destination=destination_name(destination),
        key=check_key(key),
        correlation_id=correlation_id,
        session_id=current.session_id if current else None,
        headers=own_headers,
        content_type=content_type,
        body=content,
        given=body,
        delay=_seconds(check_duration("delay", delay)) or 0.0,
        expiry=_seconds(check_duration("expires", expires)),
        unique=check_key(unique),
        on_conflict=on_conflict,
        unique_until=unique_until,
    )


def destination_name(destination: Any) -> str:
    """Return the name of a destination. Only a typed destination is asked for its
    `name`: an enum's member has a `name`, too, and its value is the destination. Raises
    InvalidMessage."""
    typed = hasattr(destination, "type_of")
    return check_destination(destination.name if typed else destination)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A body encoded as JSON, and its `txmsg-type`."""

    body: bytes
    type: str


def encoded(destination: object, body: object) -> tuple[bytes, str, str]:
    """Return a body's bytes, their content type and their `txmsg-type`, which is empty
    for an untyped body."""
    if isinstance(body, Encoded):
        return body.body, wire.JSON, body.type
    typed = getattr(destination, "type_of", codecs.type_of)(body)
    if typed is None:
        return *serializers.encode(body), ""
    return typed.encode(body), wire.JSON, typed.header if typed.name else ""


def _seconds(duration: dt.timedelta | None) -> float | None:
    return None if duration is None else duration.total_seconds()
