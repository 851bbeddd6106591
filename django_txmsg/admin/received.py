"""The state that pages show for a received message. It depends on the message's inbox
row, its stage and its dead letter."""

from __future__ import annotations

from typing import Any

from django.db.models import OuterRef, QuerySet, Subquery, Value

from ..models import DeadLetter, InboxMessage
from ..models.dead_letter import Resolution
from ..models.fields import Holds, Later
from ..monitoring.waiting import OVERDUE
from ..rules import inbox
from ..rules.rule import Rule


def is_overdue(due: Rule = inbox.DUE) -> Holds:
    """Return the condition that a row should have been tried again, or sent, by now. It
    was `due` then already."""
    return Holds(due, now=Later(-OVERDUE.total_seconds()))


def has(rows: QuerySet[Any]) -> Subquery:
    """Return whether such a row exists, looked up for each row of a list. With
    `Exists`, PostgreSQL may read the whole table, because its planner does not know
    that a list shows only the first rows."""
    return Subquery(rows.order_by().values(found=Value(True))[:1])


def with_state(rows: QuerySet[InboxMessage]) -> QuerySet[InboxMessage]:
    """Add whether a row's stage is paused, the row is overdue, and its dead letter
    discarded."""
    discarded = DeadLetter.objects.filter(
        message_id=OuterRef("message_id"),
        stage=OuterRef("stage"),
        resolution=Resolution.DISCARDED,
    )
    return rows.annotate(
        held=Holds(inbox.PAUSED), overdue=is_overdue(), discarded=has(discarded)
    )


def is_held(row: InboxMessage) -> bool:
    """Return whether a row of with_state() waits for its stage to be resumed."""
    return bool(getattr(row, "held", False))


def shown_state(row: InboxMessage) -> str:
    """Return the shown state for a row of with_state()."""
    if row.due_at is not None:
        if row.waits_for is not None:
            return "blocked"
        if row.needs_version is not None:
            return "needs newer code"
        return "overdue" if getattr(row, "overdue", False) else "redelivering"
    if row.dead_at is not None and getattr(row, "discarded", False):
        return "discarded"
    return str(row.state.value)
