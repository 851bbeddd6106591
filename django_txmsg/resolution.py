"""From the grave: what an operator does with dead letters, a locked batch at a time.

`bulk.py` has the batches, for the admin and for `manage.py dead_letters` alike.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from django.db import transaction
from django.db.models.functions import Now

from . import serializers, storing, wire
from .errors import InvalidMessage, TxmsgError
from .message import check_headers, new_id
from .models import DeadLetter, InboxMessage
from .models.dead_letters import Resolution
from .models.new_message import NewMessage

#: Beginnings of the names of headers that a broker or this package adds.
_BROKERS_OWN = (
    "txmsg-",
    "x-dead-letter",
    "x-death",
    "x-first-death",
    "x-last-death",
    "x-delivery-count",
    "x-acquired-count",
    "amq",
    "jms",
    "timestamp",
    "priority",
    "subscription",
    "breadcrumbid",
    "originaldestination",
    "dlqdeliveryfailurecause",
    "destination-type",
    "durable",
    "user-id",
)


@dataclass
class Tally:
    """What an operation did. `skipped` maps a dead letter's id to the reason."""

    done: int = 0
    skipped: dict[int, str] = field(default_factory=dict)


def redeliver(
    batch: list[DeadLetter],
    tally: Tally,
    *,
    using: str,
    by: str = "",
    force: bool = False,
) -> None:
    """Redeliver open dead letters that the caller's transaction has locked."""
    inbox = InboxMessage.objects.using(using)
    pairs = {(one.message_id, one.stage) for one in batch if one.stage}
    known = {
        (row.message_id, row.stage): row
        for row in inbox.filter(message_id__in={mid for mid, _ in pairs}).only(
            "message_id", "stage", "processed_at", "dead_at"
        )
        if (row.message_id, row.stage) in pairs
    }
    chosen, reset = [], []
    for letter in batch:
        row = known.get((letter.message_id, letter.stage))
        if row is not None and row.processed_at is not None and not force:
            tally.skipped[letter.pk] = (
                f"stage {letter.stage!r} has processed message {letter.message_id} "
                f"in the meantime"
            )
            continue
        chosen.append(letter)
        if row is not None:
            reset.append(row.pk)
    if not chosen:
        return
    inbox.filter(pk__in=reset).update(
        attempts=0, dead_at=None, processed_at=None, due_at=None, last_error=""
    )
    _store_again(chosen, using)
    tally.done += _resolve(chosen, using, Resolution.REDELIVERED, by)


def discard(batch: list[DeadLetter], tally: Tally, *, using: str, by: str = "") -> None:
    """Discard open dead letters that the caller's transaction has locked."""
    tally.done += _resolve(batch, using, Resolution.DISCARDED, by)


def restore(batch: list[DeadLetter], tally: Tally, *, using: str) -> None:
    """Open discarded dead letters that the caller's transaction has locked."""
    tally.done += (
        DeadLetter.objects.using(using)
        .filter(pk__in=[one.pk for one in batch], resolution=Resolution.DISCARDED)
        .update(resolution=Resolution.OPEN, resolved_at=None, resolved_by="")
    )


def redeliver_copy(
    letter: DeadLetter,
    *,
    headers: Mapping[str, str],
    body: bytes,
    by: str = "",
) -> uuid.UUID:
    """Send an edited copy under a new id, linked to the original, and close that.

    Raises InvalidMessage for headers that cannot travel or a JSON body that does not
    parse, TxmsgError when the dead letter is not open any more.
    """
    using = letter._state.db or "default"
    content_type = letter.content_type or wire.BYTES
    try:
        serializers.decode(body, content_type)
    except TxmsgError as error:
        raise InvalidMessage(
            f"The edited body is no {content_type}: {error}"
        ) from error
    copy = NewMessage(
        message_id=new_id(),
        broker=letter.broker,
        destination=letter.destination,
        key=letter.headers.get(wire.KEY, ""),
        correlation_id=letter.correlation_id,
        headers=_own_headers(check_headers(user_headers(headers))),
        content_type=content_type,
        body=body,
    )
    with transaction.atomic(using=using):
        if not _resolve(
            [letter], using, Resolution.REPLACED, by, replaced_by=copy.message_id
        ):
            raise TxmsgError(f"Dead letter {letter.pk} is not open any more.")
        storing.store([copy], using, new_ids=True)
    return copy.message_id


def user_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return what of a message's headers its sender wrote, without ours and the
    broker's."""
    return {
        name: value
        for name, value in headers.items()
        if name.lower() not in wire.RESERVED_HEADERS
        and not name.lower().startswith(_BROKERS_OWN)
    }


def _store_again(letters: list[DeadLetter], using: str) -> None:
    """Put dead letters into the outbox with their own ids, set-wise: a redelivery of
    many must not carry every body through Python."""
    stored = DeadLetter.objects.db_manager(using).store_again(
        [
            {
                "id": one.pk,
                "key": one.headers.get(wire.KEY, ""),
                "headers": _own_headers(one.headers),
                "replay_id": f"dead-letter-{one.pk}-{one.deaths}",
            }
            for one in letters
        ]
    )
    by_message = {one.message_id: one for one in letters}
    by_broker: dict[str, tuple[list[int], list[Any]]] = {}
    for pk, message_id in stored:
        letter = by_message[message_id]
        pks, rows = by_broker.setdefault(letter.broker, ([], []))
        pks.append(pk)
        rows.append(letter)
    for broker, (pks, rows) in by_broker.items():
        storing.after_commit(using, broker, pks, rows)


def _own_headers(headers: Mapping[str, str]) -> dict[str, str]:
    own = user_headers(headers)
    own.pop(wire.CORRELATION_ID, None)  # a column of its own
    return own


def _resolve(
    batch: Iterable[DeadLetter],
    using: str,
    resolution: Resolution,
    by: str,
    **more: Any,
) -> int:
    return (
        DeadLetter.objects.using(using)
        .filter(pk__in=[one.pk for one in batch], resolution=Resolution.OPEN)
        .update(resolution=resolution, resolved_at=Now(), resolved_by=by[:255], **more)
    )
