"""After a roll-back: buries messages that wait for code that will not be deployed."""

from __future__ import annotations

import datetime as dt
import uuid

from django.db import transaction
from django.db.models.functions import Now

from ..envelope.failure import Failure
from ..models import InboxMessage
from ..models.fields import Holds
from ..rules import inbox, rule
from ..stages import all_stages
from . import burial

#: The reason of such dead letters.
REASON = "needs_newer_code"
_BATCH = 100


def bury_unread(using: str, stage: str = "") -> int:
    """Bury the parked messages that need newer code, of one stage or of all, in bounded
    transactions; return how many. If redelivered, they wait as before."""
    rows = InboxMessage.objects.using(using)
    waiting = (
        rows.filter(Holds(inbox.NEEDS_NEWER_CODE))
        .filter(Holds(rule.NOT_LEASED, now=Now()))
        .order_by("id")
    )
    if stage:
        waiting = waiting.filter(stage=stage)
    brokers = {one.name: one.broker for one in all_stages()}
    buried, last = 0, 0
    while found := list(waiting.filter(pk__gt=last)[:_BATCH]):
        last = found[-1].pk
        with transaction.atomic(using=using):
            for row in found:
                # Newer code may have claimed it meanwhile, or be processing it now.
                token = uuid.uuid4()
                held = {"lease_token": token, "lease_until": Now() + _LEASE}
                free = waiting.filter(pk=row.pk).select_for_update(skip_locked=True)
                if rows.filter(pk__in=free.values("pk")).update(**held):
                    _bury(row, token, using, brokers.get(row.stage, "default"))
                    buried += 1
    return buried


_LEASE = dt.timedelta(minutes=1)


def _bury(row: InboxMessage, token: uuid.UUID, using: str, broker: str) -> None:
    rows = InboxMessage.objects.db_manager(using)
    rows.mark_dead(row.pk, row.last_error, token)
    burial.bury(
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
