"""Buries messages after their last attempt.

A buried message keeps its original headers and bytes until an operator resolves it
(`resolution.py`).
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from django.db import connections, transaction
from django.db.models import F
from django.db.models.functions import Now

from .. import conf, rules, signals, wire
from ..envelope.failure import Failure, storable
from ..models import DeadLetter, InboxMessage
from ..models.dead_letter import Resolution
from ..models.fields import Holds, clock
from ..models.outbox_claim import Claimed
from ..rules import inbox
from ..rules.dead_letters import BODY_TOO_LONG
from ..sending import answering
from ..stages import all_stages


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
    """Store a message as a dead letter, inside the caller's transaction. If the message
    is a request, the requester is notified (`answering.answer_dead()`).

    If a redelivered message dies again, its dead letter is reopened, with one more
    death.
    """
    text_headers = {storable(name): storable(value) for name, value in headers.items()}
    values: dict[str, Any] = {
        "broker": broker,
        "destination": storable(destination)[:255],
        "correlation_id": text_headers.get(wire.CORRELATION_ID, "")[:255],
        "headers": text_headers,
        "content_type": text_headers.get(wire.CONTENT_TYPE, "")[:255],
        "reason": reason,
        "exception": failure.exception,
        "traceback": failure.traceback,
        "fingerprint": failure.fingerprint,
        "attempts": attempts,
        "message_created_at": wire.created(headers),
    }
    letters = DeadLetter.objects.using(using)
    letter: DeadLetter
    # Locked: if pruning has just deleted it, another one is created.
    same = letters.filter(message_id=message_id, stage=stage).select_for_update()
    known = same.order_by("-id").first()
    # A cut body stays cut, whatever the handler has made of it.
    cut = letters.filter(message_id=message_id, reason=BODY_TOO_LONG)
    if any(bytes(kept) == body for (kept,) in cut.values_list("body")):
        values["reason"] = BODY_TOO_LONG
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
    answering.answer_dead(letter, reason, using=using)
    connections[using].on_commit(_announcement(letter, failure.exception), robust=True)
    return letter


def bury_outgoing(
    row: Claimed, using: str, broker: str, reason: str, error: str
) -> DeadLetter:
    """Store a dead letter for a message that could not be sent: it expired, or the
    broker rejected it."""
    service = row.service or conf.get().SERVICE
    return bury(
        using=using,
        message_id=uuid.UUID(row.message_id),
        stage="",
        broker=broker,
        destination=row.destination,
        headers=wire.headers_of(row, service, row.created),
        body=row.body,
        reason=reason,
        failure=Failure.because(reason, error),
        attempts=row.attempts + 1,
    )


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


# After a roll-back: buries messages that wait for code that will not be deployed.

#: The reason of such dead letters.
REASON = "needs_newer_code"
_BATCH = 100


def bury_unread(using: str, stage: str = "") -> int:
    """Bury the messages of `stage`, or of all stages, that are parked because they need
    newer code. Each transaction has a limited size. Returns the number of buried
    messages. If an operator redelivers such a message, it waits for the newer code
    again. A revoked message ends without a dead letter, and is not counted.

    At an ordered stage, skip a message whose predecessor is neither processed nor dead:
    the messages behind it would overtake the predecessor. But if the predecessor has
    not arrived ORDER_PATIENCE after the message, it counts as lost."""
    rows = InboxMessage.objects.using(using)
    waiting = (
        rows.filter(Holds(inbox.NEEDS_NEWER_CODE))
        .filter(Holds(rules.NOT_LEASED, now=Now()))
        .order_by("id")
    )
    if stage:
        waiting = waiting.filter(stage=stage)
    brokers = {one.name: one.broker for one in all_stages()}
    ordered = {one.name for one in all_stages() if one.ordered}
    since = clock(using) - dt.timedelta(seconds=conf.get().ORDER_PATIENCE)
    buried, last = 0, 0
    while found := list(waiting.filter(pk__gt=last)[:_BATCH]):
        last = found[-1].pk
        with transaction.atomic(using=using):
            for row in found:
                before = wire.after(row.headers or {})
                if before is not None and row.stage in ordered:
                    earlier = rows.filter(message_id=before[0], stage=row.stage)
                    ends = earlier.values_list("processed_at", "dead_at").first()
                    coming = ends is None and row.first_received_at > since
                    if coming or ends == (None, None):
                        continue
                # Newer code may have claimed it meanwhile, or be processing it now.
                token = uuid.uuid4()
                held = {"lease_token": token, "lease_until": Now() + _LEASE}
                free = waiting.filter(pk=row.pk).select_for_update(skip_locked=True)
                if rows.filter(pk__in=free.values("pk")).update(**held):
                    broker = brokers.get(row.stage, "default")
                    buried += _bury(row, token, using, broker)
    return buried


_LEASE = dt.timedelta(minutes=1)


def _bury(row: InboxMessage, token: uuid.UUID, using: str, broker: str) -> bool:
    """Mark a row as dead, and return whether it has a dead letter. A revoked message
    has none, because nobody waits for its answer."""
    row.refresh_from_db(fields=["revoked_at"])  # perhaps revoked since it was found
    revoked = row.revoked_at is not None
    rows = InboxMessage.objects.db_manager(using)
    rows.mark_dead(row.pk, row.last_error, token, revoked=revoked)
    if not revoked:
        bury(
            using=using,
            message_id=row.message_id,
            stage=row.stage,
            broker=broker,
            destination=row.destination,
            headers=row.headers or {},
            body=bytes(row.body or b""),
            reason=REASON,
            failure=Failure.because(REASON, row.last_error),
            attempts=row.attempts,
        )
    # Messages that wait for it in an ordered stage recheck whether it is passed.
    InboxMessage.order.db_manager(using).wake(row.stage, [row.message_id])
    return not revoked
