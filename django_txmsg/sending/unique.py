"""Checks, in hop 1, whether a message with the same `unique` key is already pending.

A partial unique index of the outbox reserves the key from the row's INSERT until a
relay claims the row, or until the message is cancelled or expires. With
`unique_until="processed"`, a row keeps its key even after dispatch. The next
transaction that wants the key then looks in the inbox to see whether the dispatched
message was processed. So relays and consumers do no extra work.

Suppose that transaction A has stored a message with the key and is still open.
Transaction B, which wants the same key, waits until A ends. If B then skips its own
message, B locks A's pending message until B ends. Before B ends, A's message can be
neither sent nor cancelled, so its receiver sees the changes of both transactions. A's
message also expires no sooner than B's message would have expired.

If B's message replaces A's pending message instead, B cancels A's message in the
transaction that stores B's message.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Sequence
from typing import get_args

from .. import wire
from ..envelope import serializers
from ..envelope.message import Message
from ..errors import AlreadyPending, DuplicateMessage, InvalidMessage
from ..models import OutboxMessage
from ..models.outbox import HOLDING
from ..models.outbox_store import NewMessage, UniqueUntil
from .scope import current_scope
from .storing import after_commit, already_stored, as_sent, set_apart, store

#: How often to try: the message that holds a key may leave between the INSERT and the
#: query for it, which frees the key.
_TRIES = 20

#: Return the databases in which stages here record what they process of a destination
#: of a broker.
_recorders: list[Callable[[str, str], Collection[str]]] = []


def recorded_by(recorder: Callable[[str, str], Collection[str]]) -> None:
    """Register a function that returns the databases in which stages of this project
    record what they process. The function is called with a destination and its
    broker."""
    _recorders.append(recorder)


def store_unique(rows: Sequence[NewMessage], alias: str) -> list[Message]:
    """Insert rows of which some have a unique key.

    Returns one message for each row: the stored message, or the pending message with
    the same key if the row was skipped. Raises AlreadyPending or DuplicateMessage; then
    nothing is stored.
    """
    for row in rows:
        if row.unique_until == "processed":
            check_recorded(row.destination, row.broker, alias)
    there: dict[uuid.UUID, Message] = {}
    for _ in range(_TRIES):
        holders = _first_of_each(rows)
        kept = [
            row
            for row in rows
            if row.message_id not in there and row.message_id not in holders
        ]
        try:
            instants = store(kept, alias) if kept else []
        except DuplicateMessage:
            there |= _in_their_place(kept, alias)
            continue
        there |= {
            row.message_id: as_sent(row, at)
            for row, at in zip(kept, instants, strict=True)
        }
        ids = [row.message_id for row in rows]
        return [there[holders.get(message_id, message_id)] for message_id in ids]
    raise AlreadyPending(
        f"The unique keys of {len(rows)} messages were freed and taken again "
        f"{_TRIES} times while they were stored. Try again."
    )


def _first_of_each(rows: Sequence[NewMessage]) -> dict[uuid.UUID, uuid.UUID]:
    """Find rows of the same call that have the same unique key. Return a dict: it maps
    the id of each message that is not stored to the id of the message that is stored
    instead. Raises AlreadyPending if a row with a repeated key has
    `on_conflict="error"`."""
    first: dict[str, NewMessage] = {}
    holders: dict[uuid.UUID, uuid.UUID] = {}
    for row in rows:
        holder = first.setdefault(row.unique, row) if row.unique else row
        if holder is not row:
            if row.on_conflict == "error":
                raise _conflict(row, holder)
            if row.on_conflict == "replace":
                replaced = [*holders, holder.message_id]
                holders |= {
                    one: row.message_id
                    for one in replaced
                    if holders.get(one, one) == holder.message_id
                }
                first[row.unique] = row
                continue
            if row.expiry is None or holder.expiry is None:
                holder.expiry = None
            else:
                holder.expiry = max(row.expiry, holder.expiry)
            holders[row.message_id] = holder.message_id
    return holders


def _in_their_place(rows: Sequence[NewMessage], alias: str) -> dict[uuid.UUID, Message]:
    """Return a dict: it maps the id of each skipped row to the stored message that
    takes the row's place. If the same message is already stored under the row's id,
    that message takes the row's place. Otherwise, the message that holds the row's key
    does. A row that the next try can store is missing from the dict.

    This function also cancels each pending message that a row with
    `on_conflict="replace"` replaces. Raises AlreadyPending or DuplicateMessage if a row
    can be neither stored nor skipped.
    """
    known = OutboxMessage.objects.using(alias)
    pending = OutboxMessage.objects.db_manager(alias)
    current = current_scope()
    cause = None if current is None or current.cause is None else current.cause.id
    pending.free([row.unique for row in rows if row.unique], cause)
    wanted = {
        row.unique: row.expiry if row.on_conflict == "skip" else 0.0
        for row in rows
        if row.unique and row.on_conflict != "replace"
    }
    held = pending.hold(wanted)
    holders = {one.unique_key: one for one in known.filter(HOLDING, pk__in=held)}
    ids = [row.message_id for row in rows]
    stored = {
        one.message_id: one for one in known.filter(message_id__in=ids, replay_id="")
    }
    derived = [row for row in rows if row.origin == "derived"]
    apart = set_apart([row for row in derived if row.message_id in stored], alias)
    found: dict[uuid.UUID, Message] = {}
    for row in rows:
        if row in apart:
            continue  # to be stored in the next try
        if row.message_id in stored:
            if row.origin != "derived":
                raise already_stored([row.message_id])
            found[row.message_id] = message_of(stored[row.message_id])
        elif row.on_conflict == "replace":
            # Not locked before: two transactions that both had would deadlock here.
            for one in known.filter(HOLDING, unique_key=row.unique):
                why = f"replaced by {row.message_id}"
                if (
                    not pending.cancel([one.message_id], why=why)
                    and one.unique_until_processed
                ):
                    raise _conflict(row, one)
        elif row.unique in holders:
            holder = holders[row.unique]
            if row.on_conflict == "error":
                raise _conflict(row, holder)
            found[row.message_id] = message_of(holder)
            # A dispatcher may have skipped it, because it was locked.
            after_commit(alias, holder.broker, due=[holder.pk])
    return found


def check_until(unique: str | None, until: str) -> None:
    """Raise InvalidMessage if `unique_until` has an unknown value."""
    if until not in get_args(UniqueUntil):
        raise InvalidMessage(
            f"unique_until={until!r} is none of {', '.join(get_args(UniqueUntil))}."
        )
    if until == "processed" and unique is None:
        raise InvalidMessage('unique_until="processed" needs a unique= key.')


def check_recorded(destination: str, broker: str, alias: str) -> None:
    """Check that, in the database `alias`, a stage of this project records each message
    to this destination that it has processed. Raise InvalidMessage if no stage does so,
    or if the destination is a topic."""
    if wire.is_topic(destination):
        why = "is a topic, which several stages process"
    elif not any(alias in find(destination, broker) for find in _recorders):
        why = f"has no stage here that records what it processes in database {alias!r}"
    else:
        return
    raise InvalidMessage(
        f'unique_until="processed" needs to see when a message is processed, and '
        f"{destination!r} {why}. Leave it out, and the key is held until the "
        f"message has left."
    )


def _conflict(row: NewMessage, holder: NewMessage | OutboxMessage) -> AlreadyPending:
    left = isinstance(holder, OutboxMessage) and holder.dispatched_at is not None
    why = "is not processed yet" if left else "has not left"
    replaced = left or row.on_conflict == "replace"
    cancel = "" if replaced else ', or "replace" to cancel it'
    return AlreadyPending(
        f"Message {holder.message_id} has the unique key {row.unique!r} and {why}, so "
        f'none is stored to {row.destination!r}. Use on_conflict="skip" to go on with '
        f"that one{cancel}.",
        holder.message_id,
    )


def message_of(row: OutboxMessage) -> Message:
    """Return a stored row as a message."""
    return Message(
        id=row.message_id,
        destination=row.destination,
        body=serializers.decode(bytes(row.body), row.content_type),
        headers=row.headers,
        key=row.key or None,
        created_at=row.created_at,
        correlation_id=row.correlation_id or None,
    )
