"""The inbox's list: what stages here have received, and how it went."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest
from django.utils.safestring import SafeString

from .. import status
from ..models import InboxMessage
from ..stages import all_stages
from ..waiting import OVERDUE
from . import display
from .base import CountingFilter, MessageAdmin, among_newest, count, find
from .outbox import StoredFilter


class StateFilter(CountingFilter):
    """Received, redelivering, overdue, processed or dead."""

    title = "state"
    parameter_name = "state"

    @staticmethod
    def conditions() -> dict[str, Q]:
        """Return what each choice means."""
        return {
            "redelivering": Q(due_at__isnull=False),
            "overdue": Q(due_at__lt=Now() - OVERDUE),
            "processed": Q(processed_at__isnull=False),
            "dead": Q(dead_at__isnull=False),
        }

    def counted(
        self, request: HttpRequest, model_admin: Any
    ) -> Iterator[tuple[str, str, int | None]]:
        """Count each state."""
        rows = model_admin.get_queryset(request)
        for name, condition in self.conditions().items():
            yield name, name, count(rows.filter(condition))

    def queryset(
        self, request: HttpRequest, queryset: QuerySet[InboxMessage]
    ) -> QuerySet[InboxMessage]:
        """Narrow the list."""
        condition = self.conditions().get(self.value() or "")
        return queryset if condition is None else queryset.filter(condition)


class StageFilter(CountingFilter):
    """The stages declared here and those among the newest rows."""

    title = "stage"
    parameter_name = "stage"

    def counted(
        self, request: HttpRequest, model_admin: Any
    ) -> Iterator[tuple[str, str, int | None]]:
        """Count each stage among the newest."""
        using = model_admin.get_queryset(request).db
        counts = dict.fromkeys((declared.name for declared in all_stages()), 0)
        return among_newest(counts | status.recent_stages(using))

    def queryset(
        self, request: HttpRequest, queryset: QuerySet[InboxMessage]
    ) -> QuerySet[InboxMessage]:
        """Narrow the list."""
        return queryset.filter(stage=self.value()) if self.value() else queryset


class ReceivedFilter(StoredFilter):
    """By the last receipt."""

    title = "received"
    column = "last_received_at"


@admin.register(InboxMessage)
class InboxAdmin(MessageAdmin):
    """Messages received, newest first."""

    list_display = ("state", "age", "stage", "message", "tries", "critical", "flow")
    list_filter = (StateFilter, StageFilter, ReceivedFilter)
    list_display_links = ("message",)
    search_fields = ("message_id",)
    search_help_text = "Exact message id or correlation id"
    ordering = ("-id",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[InboxMessage]:
        """Leave the long columns where they are."""
        rows: QuerySet[InboxMessage] = super().get_queryset(request)
        return rows.defer("body", "headers")

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Find by one exact id."""
        if not search_term:
            return queryset, False
        return find(queryset, search_term, "correlation_id"), False

    @admin.display(description="state")
    def state(self, row: InboxMessage) -> SafeString:
        """The row's state; parked messages are being redelivered."""
        return display.badge("redelivering" if row.due_at else row.state.value)

    @admin.display(description="message")
    def message(self, row: InboxMessage) -> SafeString:
        """The message's id."""
        return display.short_id(row.message_id)

    @admin.display(description="flow")
    def flow(self, row: InboxMessage) -> SafeString | str:
        """What the message belongs to."""
        if not row.correlation_id:
            return "-"
        return display.mono(display.cut(row.correlation_id, 13), row.correlation_id)

    @admin.display(description="attempts")
    def tries(self, row: InboxMessage) -> SafeString:
        """Attempts of so many that there may be, copies, and the last error."""
        most = attempts_allowed().get(row.stage)
        text = f"{row.attempts} of {most}" if most else str(row.attempts)
        if row.deliveries > 1:
            text += f", delivered {row.deliveries} times"
        return display.tried(text, row.last_error)

    @admin.display(description="critical time")
    def critical(self, row: InboxMessage) -> str:
        """From stored to processed."""
        if row.processed_at is None or row.created_at is None:
            return "-"
        return display.duration(row.processed_at - row.created_at)

    @admin.display(description="received")
    def age(self, row: InboxMessage) -> SafeString:
        """When it came first."""
        return display.age(row.first_received_at)


def attempts_allowed() -> dict[str, int]:
    """Return how many attempts each stage makes at most."""
    return {one.name: one.policy.max_attempts for one in all_stages()}
