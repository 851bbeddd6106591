"""The word for a received message, with what stage and dead letter say of it."""

from __future__ import annotations

from django.db.models import Exists, OuterRef, QuerySet
from django.utils import timezone

from ..models import DeadLetter, InboxMessage, StageState
from ..models.dead_letter import Resolution
from ..monitoring.waiting import OVERDUE


def with_state(rows: QuerySet[InboxMessage]) -> QuerySet[InboxMessage]:
    """Add whether a row's stage is paused, and its dead letter discarded."""
    paused = StageState.objects.filter(stage=OuterRef("stage"), paused_at__isnull=False)
    discarded = DeadLetter.objects.filter(
        message_id=OuterRef("message_id"),
        stage=OuterRef("stage"),
        resolution=Resolution.DISCARDED,
    )
    return rows.annotate(held=Exists(paused), discarded=Exists(discarded))


def is_held(row: InboxMessage) -> bool:
    """Return whether a row of with_state() waits for its stage to be resumed."""
    return bool(getattr(row, "held", False))


def shown_state(row: InboxMessage) -> str:
    """Return the word for a row of with_state()."""
    if row.due_at is not None:
        if row.waits_for is not None:
            return "in line"
        if row.needs_version is not None:
            return "needs newer code"
        late = timezone.now() - row.due_at > OVERDUE and not is_held(row)
        return "overdue" if late else "redelivering"
    if row.dead_at is not None and getattr(row, "discarded", False):
        return "discarded"
    return str(row.state.value)
