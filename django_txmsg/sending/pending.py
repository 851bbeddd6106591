"""Cancels or reschedules a stored message that has not been sent yet."""

from __future__ import annotations

import datetime as dt
import uuid
from contextlib import nullcontext

from django.db import transaction
from django.utils import timezone

from .. import wire
from ..envelope.message import check_duration
from ..errors import MAX_SECONDS, InvalidMessage
from ..models import DeadLetter, OutboxMessage, Run
from ..models.run import WaitsFor
from . import answering
from .scope import alias_of, current_scope, in_scope
from .storing import after_commit


def cancel_message(
    message_id: uuid.UUID, *, why: str = "", using: str | None = None
) -> bool:
    """Cancel a pending message: it is not sent, and its state becomes "cancelled".
    Inside a transaction, the message is cancelled if the transaction commits. `why` is
    stored with the message.

    Returns False, and changes nothing, if the message does not exist, is dispatched or
    dead, or if a relay is sending it now. Also returns False if the message has a key
    and a relay has claimed it before, because later messages of the key must follow it.
    Also returns False for a message without which a run of a flow does not continue: an
    undo, an answer, a time-out, the message of a resume() or later(), or the first
    message of a run that start() has stored.

    If a run of a flow or a flow batch waits for the answer to the message, the answer
    is `Dead("cancelled")`. If a relay has sent the message before and received no
    answer from the broker, the message may arrive although it is cancelled. Raises
    InvalidMessage if the id is not a UUID.
    """
    alias = _alias(message_id, using)
    rows = OutboxMessage.objects.db_manager(alias)
    for headers in rows.filter(message_id=message_id).values_list("headers", flat=True):
        first = wire.original_id(message_id, headers)
        starting = Run.objects.using(alias).filter(
            run_id=first, waits_for=WaitsFor.START
        )
        if wire.continues_run(headers) or starting.exists():
            return False
    current = current_scope()
    # The answer commits with the cancel, even in a stage that sends by its broker.
    apart = nullcontext() if current is None else in_scope(current.apart())
    with transaction.atomic(using=alias, savepoint=False), apart:
        cancelled = rows.cancel([message_id], why=why)
        for row in rows.filter(pk__in=[pk for pk, _ in cancelled]).defer("body"):
            _answer_dead(row, alias)
    return bool(cancelled)


def _answer_dead(row: OutboxMessage, using: str) -> None:
    """Answer a cancelled message if it is a request. If its gather still held it back,
    the answer lets no other request leave: it was not one of those on their way."""
    headers = {**row.headers, wire.CORRELATION_ID: row.correlation_id}
    if wire.TICKET in headers and row.due_at == row.expires_at:
        headers[wire.TICKET] = headers[wire.TICKET].partition("-")[0]
    request = DeadLetter(message_id=row.message_id, broker=row.broker, headers=headers)
    answering.answer_dead(request, "cancelled", using=using)


def reschedule_message(
    message_id: uuid.UUID,
    *,
    delay: dt.timedelta | None = None,
    at: dt.datetime | None = None,
    using: str | None = None,
) -> bool:
    """Change the time at which a pending message will be sent. Pass `delay`, which
    starts now by the database's clock, or the aware datetime `at`. A time in the past
    means now. The message's expiry does not change. Later messages of the same key are
    still sent after this message.

    Returns False, and changes nothing, if the message does not exist, is dispatched or
    dead, or if a relay is sending it now.

    If a relay has sent the message before and received no answer, the message may
    already have arrived, and arrives again when it is due. Raises InvalidMessage if the
    id or the time is not valid.
    """
    if (delay is None) == (at is None):
        raise InvalidMessage("reschedule_message() takes either delay= or at=.")
    if at is not None and (not isinstance(at, dt.datetime) or at.tzinfo is None):
        raise InvalidMessage(f"at must be an aware datetime, not {at!r}.")
    if at is not None and abs(at - timezone.now()).total_seconds() > MAX_SECONDS:
        raise InvalidMessage(f"at is more than a hundred years away: {at!r}.")
    due = at or check_duration("delay", delay)
    assert due is not None
    alias = _alias(message_id, using)
    rows = OutboxMessage.objects.db_manager(alias)
    with transaction.atomic(using=alias, savepoint=False):
        changed = rows.make_due(message_id, due)
        if due == dt.timedelta(0):
            for pk, broker in changed:
                after_commit(alias, broker, due=[pk])
    return bool(changed)


def _alias(message_id: object, using: str | None) -> str:
    if not isinstance(message_id, uuid.UUID):
        raise InvalidMessage(f"message_id must be a uuid.UUID, not {message_id!r}.")
    return alias_of(using)
