"""The state of a received message as shown on pages. It depends on the inbox row, the
stage and the dead letter."""

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
    """Return the condition that a row is overdue. A row is overdue if the rule `due`
    was already true two minutes ago."""
    return Holds(due, now=Later(-OVERDUE.total_seconds()))


def has(rows: QuerySet[Any]) -> Subquery:
    """Return an expression that is true if the subquery finds a row. The database
    evaluates the expression for each row of a list. With `Exists`, PostgreSQL might
    read the whole table, because its planner does not know that the list shows only a
    few rows."""
    return Subquery(rows.order_by().values(found=Value(True))[:1])


def with_state(rows: QuerySet[InboxMessage]) -> QuerySet[InboxMessage]:
    """Add three values to each row: whether its stage is paused, whether it is overdue,
    and whether its dead letter is discarded."""
    discarded = DeadLetter.objects.filter(
        message_id=OuterRef("message_id"),
        stage=OuterRef("stage"),
        resolution=Resolution.DISCARDED,
    )
    return rows.annotate(
        held=Holds(inbox.PAUSED), overdue=is_overdue(), discarded=has(discarded)
    )


def is_held(row: InboxMessage) -> bool:
    """Return True if the stage of a row from `with_state()` is paused."""
    return bool(getattr(row, "held", False))


def shown_state(row: InboxMessage) -> str:
    """Return the state that pages show for a row from `with_state()`."""
    if row.due_at is not None:
        if row.waits_for is not None:
            return "blocked"
        if row.needs_version is not None:
            return "needs newer code"
        return "overdue" if getattr(row, "overdue", False) else "redelivering"
    if row.dead_at is not None and getattr(row, "discarded", False):
        return "discarded"
    return str(row.state.value)
