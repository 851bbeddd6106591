"""Cancels or reschedules a stored message that has not been sent yet."""

from __future__ import annotations

import datetime as dt
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

from django.db import OperationalError, connections, transaction
from django.db.models import Q
from django.db.models.functions import Now
from django.utils import timezone

from .. import wire
from ..envelope.message import check_duration
from ..errors import MAX_SECONDS, InvalidMessage
from ..models import DeadLetter, InboxMessage, OutboxMessage, Run
from ..models.fields import limit_waits
from ..models.run import WaitsFor
from ..rules.outbox import REDELIVERED
from ..runtime import database_health
from . import answering
from .scope import alias_of, current_scope, in_scope
from .storing import after_commit

log = logging.getLogger("django_txmsg.flows")

#: Longest wait, in seconds, for a stage that is processing a cancelled request.
PATIENCE = 1.0

_receivers: list[Callable[[str, str, str], Mapping[str, bool]]] = []


def received_by(receivers: Callable[[str, str, str], Mapping[str, bool]]) -> None:
    """Register a function that returns the stages of this project that receive what is
    sent to a destination, each with whether its inbox row is locked while the handler
    runs. The function is called with the destination, its broker, and the database that
    the stages use."""
    _receivers.append(receivers)


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
    is `Dead("cancelled")`, unless a stage is processing the message, or only its replay
    is cancelled. If a relay has sent the message before and received no answer from the
    broker, the message may arrive although it is cancelled. If it is a request, the
    stages of this project that use this database drop it then. Raises InvalidMessage if
    the id is not a UUID.
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
    """Answer a cancelled message if it is a request, but not if it is the replay of a
    request: that request has left before, and may still be answered. If its gather
    still held it back, the answer lets no other request leave: it was not one of those
    on their way."""
    replayed = row.replay_id and not row.replay_id.startswith(REDELIVERED)
    if replayed or not wire.is_request(row.headers):
        return
    headers = {**row.headers, wire.CORRELATION_ID: row.correlation_id}
    if row.due_at == row.expires_at:
        headers[wire.TICKET] = headers[wire.TICKET].partition("-")[0]
    place, broker = row.destination, row.broker
    request = DeadLetter(
        message_id=row.message_id, broker=broker, destination=place, headers=headers
    )
    stages: dict[str, bool] = {}
    for one in _receivers:
        stages |= one(place, broker, using)
    unlocked = [name for name, locked in stages.items() if not locked]
    begun = InboxMessage.objects.using(using).filter(
        Q(due_at=None) | Q(lease_until__gte=Now()), message_id=row.message_id,
        stage__in=unlocked, processed_at=None, dead_at=None, attempts__gt=0,
    )  # fmt: skip
    if begun.exists():
        log.info("request %s has arrived: its stage will answer", row.message_id)
        return
    try:
        with transaction.atomic(using=using), _limited_waits(using):
            answering.answer_dead(request, "cancelled", using=using, receivers=stages)
    except InvalidMessage as error:  # its broker is no longer in BROKERS, say
        log.warning("request %s is cancelled unanswered: %s", row.message_id, error)
    except OperationalError as error:
        if not database_health.gave_up_waiting(error):
            raise
        log.info("request %s has arrived: its stage will answer", row.message_id)


@contextmanager
def _limited_waits(using: str) -> Iterator[None]:
    """Limit how long the statements in this block wait for a lock, but not the later
    statements of the caller's transaction."""
    connection = connections[using]
    if connection.vendor != "postgresql":
        yield
        return
    with connection.cursor() as cursor:
        cursor.execute("SHOW lock_timeout")
        usual = cursor.fetchone()
        limit_waits(connection, PATIENCE)
        yield
        cursor.execute("SELECT set_config('lock_timeout', %s, true)", usual)


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
