"""The list of the outbox. The URLs of message pages begin with this list's URL."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import OuterRef, Q, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString

from .. import conf, rules
from ..consuming import message_acts
from ..models import DeadLetter, InboxMessage, OutboxMessage
from ..models.fields import Holds
from ..models.outbox import PENDING
from ..rules import dead_letters, inbox, outbox
from . import display, message
from .base import MessageAdmin
from .filters import BetweenFilter, PlaceFilter, StateFilter
from .inbox import has, is_overdue


class OutboxStateFilter(StateFilter):
    """Filters by state: pending, overdue, in flight, dispatched, dead or cancelled."""

    labels: ClassVar[dict[str, str]] = {"dead": "refused or expired"}
    uncounted = frozenset({"in flight", "overdue"})

    @staticmethod
    def conditions() -> dict[str, Q]:
        """Return the query condition of each state, by the state's name."""
        return {
            "pending": PENDING,
            "overdue": Q(is_overdue(outbox.DUE)),
            "in flight": PENDING & Q(Holds(rules.LEASED, now=Now())),
            "dispatched": Q(Holds(outbox.DISPATCHED)),
            "dead": Q(Holds(outbox.DEAD)),
            "cancelled": Q(Holds(outbox.CANCELLED)),
        }


class DestinationFilter(PlaceFilter):
    """Filters by destination."""

    title = parameter_name = "destination"


@admin.register(OutboxMessage)
class OutboxAdmin(MessageAdmin):
    """The list of stored messages, newest first. It does not load bodies."""

    list_display = (
        "state", "outcome", "age", "place", "message", "due", "tries", "flow",
    )  # fmt: skip
    list_filter = (OutboxStateFilter, DestinationFilter, BetweenFilter)
    search_help_text = "Exact message id, correlation id or key"
    found_by = ("correlation_id", "key")

    def get_urls(self) -> list[Any]:
        """Add the URLs of a message's page and of its buttons."""
        one = "<uuid:message_id>/"
        return [
            self.at(one, partial(message.page, self), "message"),
            self.at(f"{one}body/<str:table>/<int:pk>/", message.body, "body"),
            *(
                self.button(f"{one}{name}/", partial(message.act, name), name)
                for name in message_acts.ACTS
            ),
            *super().get_urls(),
        ]

    def get_queryset(self, request: HttpRequest) -> QuerySet[OutboxMessage]:
        """Add to each row whether it is overdue, and the states of its message at the
        stages."""
        rows: QuerySet[OutboxMessage] = super().get_queryset(request)
        here: Any = InboxMessage.objects.filter(message_id=OuterRef("message_id"))
        letters = DeadLetter.objects.filter(message_id=OuterRef("message_id"))
        return rows.annotate(
            overdue=is_overdue(outbox.DUE),
            died=has(letters.filter(Holds(dead_letters.OPEN))),
            waits=has(here.filter(Holds(inbox.OPEN))),
            processed=has(here.filter(Holds(inbox.PROCESSED))),
        )

    @admin.display(description="at its stages")
    def outcome(self, row: Any) -> SafeString | str:
        """The message's state at its stages, if they use this database: dead, received
        or processed."""
        if row.died:
            return display.badge("dead")
        if row.waits:
            return display.badge("received")
        return display.badge("processed") if row.processed else "-"

    state = display.column(
        "state",
        lambda row: display.badge("overdue" if row.overdue else row.state),
    )

    place = display.column(
        "destination", lambda row: display.named(row.destination, row.task)
    )

    @admin.display(description="next attempt")
    def due(self, row: OutboxMessage) -> SafeString | str:
        """The due time of a pending message."""
        if row.dispatched_at is not None or row.dead_at is not None:
            return "-"
        return display.ago(row.due_at)

    @admin.display(description="message")
    def message(self, row: OutboxMessage) -> SafeString:
        """The message's id, and a badge if the message was stored again."""
        badge = display.badge("again") if outbox.is_again(row.replay_id) else ""
        return format_html("{} {}", display.short_id(row.message_id), badge)

    @admin.display(description="failed attempts")
    def tries(self, row: OutboxMessage) -> SafeString | str:
        """The number of failed dispatches, the number of allowed dispatches, and the
        last error."""
        if not row.attempts:
            return "-"
        return display.tried(
            f"{row.attempts} of {conf.get().RELAY.MAX_ATTEMPTS}", row.last_error
        )

    age = display.column("age", display.age, "created_at")
