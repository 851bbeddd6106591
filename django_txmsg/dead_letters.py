"""The side track's end: burying messages, and what an operator does with them.

A buried message keeps its original headers and bytes. Everything here is what both
the admin and `manage.py dead_letters` call.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from django.db import connections, transaction
from django.db.models import F, QuerySet
from django.db.models.functions import Now

from . import conf, outbox, serializers, signals, wire
from .errors import InvalidMessage, TxmsgError
from .failure import Failure
from .message import check_headers
from .models import DeadLetter, InboxMessage
from .models.dead_letters import Resolution
from .models.outbox import Claimed, NewMessage


@dataclass
class Tally:
    """What an operation did. `skipped` maps a dead letter's id to the reason."""

    done: int = 0
    skipped: dict[int, str] = field(default_factory=dict)


def bury(
    *,
    using: str,
    message_id: uuid.UUID,
    stage: str,
    broker: str,
    destination: str,
    headers: Mapping[str, str],
    body: bytes,
    reason: str,
    failure: Failure,
    attempts: int,
) -> DeadLetter:
    """Keep a message that is given up on, inside the caller's transaction.

    A message that was redelivered and comes back is the same dead letter, open again
    and one death older.
    """
    text_headers = {
        _storable(name): _storable(value) for name, value in headers.items()
    }
    values: dict[str, Any] = {
        "broker": broker,
        "destination": _storable(destination)[:255],
        "correlation_id": text_headers.get(wire.CORRELATION_ID, "")[:255],
        "headers": text_headers,
        "content_type": text_headers.get(wire.CONTENT_TYPE, "")[:255],
        "reason": reason,
        "exception": failure.exception,
        "traceback": failure.traceback,
        "fingerprint": failure.fingerprint,
        "attempts": attempts,
        "message_created_at": _created(headers),
    }
    letters = DeadLetter.objects.using(using)
    letter: DeadLetter
    known = letters.filter(message_id=message_id, stage=stage).order_by("-id").first()
    if known is not None and bytes(known.body) == body:
        letters.filter(pk=known.pk).update(
            **values,
            deaths=F("deaths") + 1,
            created_at=Now(),
            resolution=Resolution.OPEN,
            resolved_at=None,
            resolved_by="",
        )
        known.refresh_from_db(using=using)
        letter = known
    else:
        letter = letters.create(message_id=message_id, stage=stage, body=body, **values)
    connections[using].on_commit(_announcement(letter, failure.exception), robust=True)
    return letter


def bury_outgoing(
    row: Claimed, using: str, broker: str, reason: str, error: str
) -> DeadLetter:
    """Keep a message that could not leave: expired, or refused by the broker."""
    service = conf.get().SERVICE
    return bury(
        using=using,
        message_id=row.message_id,
        stage="",
        broker=broker,
        destination=row.destination,
        headers=outbox.wire_headers(row, service, row.created),
        body=row.body,
        reason=reason,
        failure=Failure.because(reason, error),
        attempts=row.attempts + 1,
    )


def redeliver(
    letters: QuerySet[DeadLetter],
    *,
    by: str = "",
    force: bool = False,
    batch_size: int = 500,
    on_batch: Callable[[Tally], None] | None = None,
) -> Tally:
    """Put open dead letters back through the outbox with their own ids.

    The stage's inbox starts to count anew. A message that its stage has processed in
    the meantime is skipped and reported, unless `force`: then it is processed again.
    Works in batches, each a transaction, and calls `on_batch` after each.
    """
    return _in_batches(
        letters.filter(resolution=Resolution.OPEN),
        lambda batch, tally: redeliver_batch(
            batch, tally, using=letters.db, by=by, force=force
        ),
        batch_size,
        on_batch,
    )


def discard(
    letters: QuerySet[DeadLetter],
    *,
    by: str = "",
    batch_size: int = 500,
    on_batch: Callable[[Tally], None] | None = None,
) -> Tally:
    """Close open dead letters and do nothing else. They can be restored."""
    return _in_batches(
        letters.filter(resolution=Resolution.OPEN),
        lambda batch, tally: discard_batch(batch, tally, using=letters.db, by=by),
        batch_size,
        on_batch,
    )


def restore(
    letters: QuerySet[DeadLetter],
    *,
    batch_size: int = 500,
    on_batch: Callable[[Tally], None] | None = None,
) -> Tally:
    """Open discarded dead letters again."""
    return _in_batches(
        letters.filter(resolution=Resolution.DISCARDED),
        lambda batch, tally: restore_batch(batch, tally, using=letters.db),
        batch_size,
        on_batch,
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
        message_id=outbox.new_id(),
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
        outbox.store([copy], using, new_ids=True)
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


def redeliver_batch(
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


def discard_batch(
    batch: list[DeadLetter], tally: Tally, *, using: str, by: str = ""
) -> None:
    """Discard open dead letters that the caller's transaction has locked."""
    tally.done += _resolve(batch, using, Resolution.DISCARDED, by)


def restore_batch(batch: list[DeadLetter], tally: Tally, *, using: str) -> None:
    """Open discarded dead letters that the caller's transaction has locked."""
    tally.done += (
        DeadLetter.objects.using(using)
        .filter(pk__in=[one.pk for one in batch], resolution=Resolution.DISCARDED)
        .update(resolution=Resolution.OPEN, resolved_at=None, resolved_by="")
    )


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
        outbox.after_commit(using, broker, pks, rows)


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


def _in_batches(
    letters: QuerySet[DeadLetter],
    work: Callable[[list[DeadLetter], Tally], None],
    batch_size: int,
    on_batch: Callable[[Tally], None] | None,
) -> Tally:
    """Work through `letters` by ascending id, locking one batch at a time."""
    tally = Tally()
    last = 0
    skip_locked = connections[letters.db].features.has_select_for_update_skip_locked
    while True:
        with transaction.atomic(using=letters.db):
            page = letters.filter(pk__gt=last).order_by("pk")
            if skip_locked:
                page = page.select_for_update(skip_locked=True)
            batch = list(page[:batch_size])
            if not batch:
                return tally
            last = batch[-1].pk
            work(batch, tally)
        if on_batch is not None:
            on_batch(tally)


def _announcement(letter: DeadLetter, error: str) -> Callable[[], None]:
    def announce_burial() -> None:
        signals.announce(
            signals.message_buried,
            id=letter.message_id,
            destination=letter.destination,
            stage=letter.stage,
            attempt=letter.attempts,
            reason=letter.reason,
            error=error.partition("\n")[0],
        )

    return announce_burial


def _created(headers: Mapping[str, str]) -> dt.datetime | None:
    try:
        return wire.parse_instant(headers[wire.CREATED])
    except (KeyError, ValueError):
        return None


def _storable(text: str) -> str:
    """JSON columns of PostgreSQL hold neither NUL nor lone surrogates."""
    cleaned = text.replace("\x00", "\\x00")
    return cleaned.encode("utf-8", "backslashreplace").decode()
