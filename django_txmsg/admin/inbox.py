"""The list of the inbox: messages that stages have received, with their states."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import OuterRef, Q, QuerySet, Subquery, Value
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString

from ..models import DeadLetter, InboxMessage
from ..models.dead_letter import Resolution
from ..models.fields import Holds, Later
from ..monitoring.waiting import OVERDUE
from ..rules import Rule, inbox
from ..stages import all_stages
from . import display
from .base import MessageAdmin
from .filters import BetweenFilter, PlaceFilter, StateFilter, filter_of


def is_overdue(due: Rule = inbox.DUE) -> Holds:
    """Return a condition that is true for an overdue row. A row is overdue if the rule
    `due` was already true two minutes ago."""
    return Holds(due, now=Later(-OVERDUE.total_seconds()))


def has(rows: QuerySet[Any]) -> Subquery:
    """Return an expression that is true if the subquery finds a row. The database
    evaluates the expression for each row of a list. With `Exists`, PostgreSQL might
    read the whole table, because its planner does not know that the list shows only a
    few rows."""
    return Subquery(rows.order_by().values(found=Value(True))[:1])


def with_state(rows: QuerySet[InboxMessage]) -> QuerySet[InboxMessage]:
    """Add three values to each row: whether the row's stage is paused, whether the row
    is overdue, and whether the row's dead letter is discarded."""
    discarded = DeadLetter.objects.filter(
        message_id=OuterRef("message_id"),
        stage=OuterRef("stage"),
        resolution=Resolution.DISCARDED,
    )
    return rows.annotate(
        held=Holds(inbox.PAUSED), overdue=is_overdue(), discarded=has(discarded)
    )


def shown_state(row: InboxMessage) -> str:
    """Return the state that pages show for a row from `with_state()`."""
    if row.due_at is not None:
        if row.waits_for is not None:
            return "blocked"
        if row.needs_version is not None:
            return "needs newer code"
        if getattr(row, "overdue", False):
            return "overdue"
        return "redelivering" if row.slot is None else "waits for its rate"
    if row.dead_at is not None and getattr(row, "discarded", False):
        return "discarded"
    return row.state


class InboxStateFilter(StateFilter):
    """Filters by state: redelivering (or waits for its rate), blocked, overdue, newer
    (waits for newer code), processed or dead."""

    @staticmethod
    def conditions() -> dict[str, Q]:
        """Return the query condition of each choice."""
        return {
            "redelivering": Q(Holds(inbox.PARKED & ~inbox.BLOCKED)),
            "blocked": Q(Holds(inbox.BLOCKED)),
            "overdue": Q(is_overdue()),
            "newer": Q(Holds(inbox.NEEDS_NEWER_CODE)),
            "processed": Q(Holds(inbox.PROCESSED)),
            "dead": Q(Holds(inbox.DEAD)),
        }


class StageFilter(PlaceFilter):
    """Filters by stage. The choices are the stages declared here, and the stages of the
    newest rows."""

    title = parameter_name = "stage"

    known = staticmethod(lambda: [one.name for one in all_stages()])


@admin.register(InboxMessage)
class InboxAdmin(MessageAdmin):
    """The list of received messages, newest first."""

    list_display = (
        "state", "age", "place", "message", "due", "tries", "critical", "flow",
    )  # fmt: skip
    list_filter = (
        InboxStateFilter,
        StageFilter,
        filter_of(BetweenFilter, "time of receipt", column="last_received_at"),
    )
    search_help_text = "Exact message id or correlation id"

    # Redelivering: parked, neither blocked nor overdue, and waiting neither for newer
    # code nor for the stage's rate.
    state = display.column("state", lambda row: display.badge(shown_state(row)))

    # The task's name is shown as long as the row has its headers.
    place = display.column("stage", lambda row: display.named(row.stage, row.task))

    @admin.display(description="next attempt")
    def due(self, row: Any) -> SafeString | str:
        """The time of a parked message's next attempt, or what the message waits
        for."""
        if row.due_at is None:
            return "-"
        if row.waits_for is not None:
            return format_html("after {} of its key", self.link(row.waits_for))
        if row.needs_version is not None:
            return f"with {row.needs_type} {row.needs_version}"
        return "when resumed" if row.held else display.ago(row.due_at)

    def get_queryset(self, request: HttpRequest) -> QuerySet[InboxMessage]:
        """Add the values from other tables that determine a row's state."""
        return with_state(super().get_queryset(request))

    @admin.display(description="attempts")
    def tries(self, row: InboxMessage) -> SafeString:
        """The number of attempts, the number of allowed attempts, the number of
        deliveries, and the last error."""
        allowed = {one.name: one.policy.max_attempts for one in all_stages()}
        most = allowed.get(row.stage)
        text = f"{row.attempts} of {most}" if most else str(row.attempts)
        if row.deliveries > 1:
            text += f", delivered {row.deliveries} times"
        # One that waited, for its stage's rate for example, has not failed.
        failed = row.processed_at is None or row.attempts > 1
        return display.tried(text, row.last_error if failed else "")

    @admin.display(description="critical time")
    def critical(self, row: InboxMessage) -> str:
        """The time from storing the message to processing it."""
        if row.processed_at is None or row.created_at is None:
            return "-"
        return display.duration(row.processed_at - row.created_at)

    age = display.column("received", display.age, "first_received_at")
