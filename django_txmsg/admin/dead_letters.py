"""Dead letters: grouped by error, as a list, and with links to their actions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin
from django.contrib.admin.views.main import SEARCH_VAR
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import path
from django.utils.functional import cached_property
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.views.decorators.http import require_POST

from ..dead_letters import selection
from ..models import DeadLetter
from ..models.bulk_operation import BulkKind
from ..models.dead_letter import Resolution
from . import display
from .addresses import address
from .base import MessageAdmin, MessageList
from .bulk import PERMISSIONS
from .confirm import ConfirmPages
from .copy import CopyPages
from .counting import OLDER
from .dead_letter_filters import FILTERS, DiedFilter
from .filters import read_time
from .groups import GroupPages


class LetterList(MessageList):
    """A list whose filter can be passed to a bulk operation."""

    @cached_property
    def bulk_query(self) -> str:
        """Return the confirmation page's query for all letters that match."""
        return urlencode(bulk_filter(self.params))


@admin.register(DeadLetter)
class DeadLetterAdmin(MessageAdmin):
    """Messages that were given up. Without a query, the page groups them by error."""

    list_display = (
        "state",
        "age",
        "error",
        "place",
        "tries",
        "message",
    )
    list_filter = FILTERS
    list_display_links = ("state", "error", "message")
    search_help_text = "Exact message id, correlation id, key or fingerprint"
    actions = ("redeliver_selected", "discard_selected", "restore_selected")
    change_list_template = "admin/django_txmsg/dead_letters.html"

    def get_queryset(self, request: HttpRequest) -> QuerySet[DeadLetter]:
        """Return the rows without the traceback, which is long."""
        return super().get_queryset(request).defer("traceback")

    def get_changelist(self, request: HttpRequest, **options: Any) -> type[MessageList]:
        """Use the list that knows its bulk operation."""
        return LetterList

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Search for one complete id, as the command and bulk operations do."""
        if not search_term:
            return queryset, False
        return queryset.filter(selection.searched(search_term)), False

    def get_urls(self) -> list[Any]:
        """Add the pages of the actions."""
        wrap = self.admin_site.admin_view
        confirm, copy, groups = ConfirmPages(self), CopyPages(self), GroupPages(self)
        return [
            path("confirm/", wrap(confirm.page), name="django_txmsg_confirm"),
            path("<int:pk>/copy/", wrap(copy.page), name="django_txmsg_copy"),
            path("note/", wrap(require_POST(groups.note)), name="django_txmsg_note"),
            *super().get_urls(),
        ]

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show groups, or the list if there is a query."""
        if request.method == "GET" and request.GET.keys() <= {"sort"}:
            return GroupPages(self).page(request)
        more = {"title": "Dead letters", "deeds": deeds(request)}
        return super().changelist_view(request, {**more, **(extra_context or {})})

    def has_redeliver_permission(self, request: HttpRequest) -> bool:
        """Whether the user may redeliver."""
        return request.user.has_perm(PERMISSIONS[BulkKind.REDELIVER])

    def has_discard_permission(self, request: HttpRequest) -> bool:
        """Whether the user may discard and restore."""
        return request.user.has_perm(PERMISSIONS[BulkKind.DISCARD])

    @admin.action(description="Redeliver…", permissions=["redeliver"])
    def redeliver_selected(
        self, request: HttpRequest, queryset: QuerySet[DeadLetter]
    ) -> HttpResponse:
        """Ask before redelivering the selection."""
        return self._confirm(request, "redeliver", queryset)

    @admin.action(description="Discard…", permissions=["discard"])
    def discard_selected(
        self, request: HttpRequest, queryset: QuerySet[DeadLetter]
    ) -> HttpResponse:
        """Ask before discarding the selection."""
        return self._confirm(request, "discard", queryset)

    @admin.action(description="Restore…", permissions=["discard"])
    def restore_selected(
        self, request: HttpRequest, queryset: QuerySet[DeadLetter]
    ) -> HttpResponse:
        """Ask before restoring the selection."""
        return self._confirm(request, "restore", queryset)

    def _confirm(
        self, request: HttpRequest, kind: str, queryset: QuerySet[DeadLetter]
    ) -> HttpResponse:
        if request.POST.get("select_across") == "1":
            # All that match: the filter itself, since their number has no limit.
            query = bulk_filter(request.GET)
        else:
            query = {"ids": ",".join(request.POST.getlist("_selected_action"))}
        page = address(request, "admin:django_txmsg_confirm")
        return HttpResponseRedirect(f"{page}?{urlencode({'kind': kind, **query})}")

    @admin.display(description="state")
    def state(self, letter: DeadLetter) -> SafeString:
        """Open or resolved, and whether it died again."""
        again = display.badge("failed again") if letter.deaths > 1 else ""
        return format_html("{} {}", display.badge(letter.resolution), again)

    @admin.display(description="message")
    def message(self, letter: DeadLetter) -> SafeString:
        """The message's id."""
        return display.short_id(letter.message_id)

    @admin.display(description="stage")
    def place(self, letter: Any) -> SafeString:
        """The stage that gave up, and the destination, if that is not the stage's
        own."""
        place = letter.stage
        if letter.stage != letter.destination:
            place = f"{letter.stage or '(relay)'} of {letter.destination}"
        return display.named(place, letter.task)

    @admin.display(description="attempts")
    def tries(self, letter: DeadLetter) -> int:
        """The number of attempts."""
        return letter.attempts

    @admin.display(description="age")
    def age(self, letter: DeadLetter) -> SafeString:
        """How long it has been dead."""
        return display.age(letter.created_at)

    @admin.display(description="error")
    def error(self, letter: DeadLetter) -> str:
        """The error."""
        return display.first_line(letter.exception) or letter.reason


def deeds(request: HttpRequest) -> list[tuple[str, str]]:
    """Return the actions that the user may run on all listed dead letters, each with
    its label."""
    state = request.GET.get("resolution")
    every = "all open" if state is None else "all"
    found = {
        Resolution.OPEN: [BulkKind.REDELIVER, BulkKind.DISCARD],
        Resolution.DISCARDED: [BulkKind.RESTORE],
    }.get(Resolution.OPEN if state is None else state, [])  # type: ignore[call-overload]  # any text
    return [
        (kind.value, f"{kind.capitalize()} {every}")
        for kind in found
        if request.user.has_perm(PERMISSIONS[kind])
    ]


def bulk_filter(query: Mapping[str, Any]) -> dict[str, str]:
    """Return a list's query as the filter of a bulk operation. The whole query is used,
    because an operation with fewer conditions would select more rows than the list
    shows."""
    names = [one.parameter_name for one in FILTERS if one is not DiedFilter]
    found = {name: query[name] for name in names if query.get(name) is not None}
    for name in DiedFilter.BOUNDS:
        if text := query.get(name):
            instant = read_time(text)  # if it is none, the confirmation says so
            found[name] = instant.isoformat() if instant else text
    if query.get(OLDER):
        found[OLDER] = query[OLDER]
    if query.get(SEARCH_VAR):
        found["search"] = query[SEARCH_VAR]
    return found
