"""Dead letters: grouped by error, or as a list, with links to their actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin
from django.contrib.admin.views.main import SEARCH_VAR
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.functional import cached_property
from django.utils.html import format_html
from django.utils.safestring import SafeString

from ..dead_letters import selection
from ..models import DeadLetter
from ..models.bulk_operation import BulkKind
from ..models.dead_letter import Resolution
from ..monitoring import dead
from . import display
from .base import MessageAdmin, MessageList, address
from .bulk import PERMISSIONS, confirm
from .copy import copy
from .counting import CAP, OLDER, count, listed
from .filters import BetweenFilter, CountingFilter, filter_of, read_time
from .groups import affected, groups, note

# The filters of the dead letters' list, and the single query that counts for them.

#: The most choices of a filter. Those with the most dead letters are offered.
MOST_CHOICES = 100


class DeadFilter(CountingFilter):
    """A filter whose choices show how many dead letters of the chosen resolution (by
    default, open ones) they have."""

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        """Yield the choices, each with its number of dead letters. All filters of a
        page share one query."""
        counts = counts_of_choices(request, model_admin)[str(self.parameter_name)]
        for value, number in counts.items():
            yield value, f"{value or '(relay)'} ({number})"


class FingerprintFilter(DeadFilter):
    """Filters by error. Each choice shows the error text of its newest dead letter."""

    title = "error"
    parameter_name = "fingerprint"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        """Yield the errors with their numbers of dead letters."""
        counts = counts_of_choices(request, model_admin)
        letters = model_admin.get_queryset(request).filter(
            pk__in=[counts["newest"][value] for value in counts["fingerprint"]]
        )
        exceptions = dict(letters.values_list("fingerprint", "exception").order_by())
        for value, number in counts["fingerprint"].items():
            text = display.cut(display.first_line(exceptions.get(value, "")), 60)
            yield value, f"{text or value} ({number})"


class ResolutionFilter(DeadFilter):
    """Filters by resolution, such as open or discarded."""

    title = parameter_name = "resolution"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        """Yield the resolutions with their numbers of dead letters."""
        rows = model_admin.get_queryset(request)
        for state in Resolution.values:
            number = listed(count(rows.filter(resolution=state)))
            yield state, f"{state} ({number})"


class AgainFilter(admin.SimpleListFilter):
    """A filter for dead letters that were redelivered and have died again."""

    title = "failed again"
    parameter_name = "again"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        """Return the only choice."""
        return [("1", "failed again")]

    def queryset(
        self, request: HttpRequest, queryset: QuerySet[DeadLetter]
    ) -> QuerySet[DeadLetter]:
        """Select the dead letters that have died more than once, if the user has chosen
        this."""
        return queryset.filter(deaths__gt=1) if self.value() else queryset


class DiedFilter(BetweenFilter):
    """Filters by the time of the last burial."""

    title = "time of death"


FILTERS = (
    ResolutionFilter,
    filter_of(DeadFilter, "stage", parameter_name="stage"),
    filter_of(DeadFilter, "destination", parameter_name="destination"),
    filter_of(DeadFilter, "reason", parameter_name="reason"),
    AgainFilter,
    FingerprintFilter,
    DiedFilter,
)


def counts_of_choices(
    request: HttpRequest, model_admin: Any
) -> dict[str, dict[str, Any]]:
    """Count the dead letters of the chosen resolution (by default, the open ones) by
    stage, by destination, by fingerprint and by reason, the largest count first. All
    filters of a page use the result of one query. The entry "newest" maps each
    fingerprint to the primary key of its newest dead letter.

    An index has the values of open dead letters only. So of the others, only the newest
    are counted.
    """
    kept: dict[str, dict[str, Any]] | None = getattr(request, "_txmsg_counts", None)
    if kept is not None:
        return kept
    using = model_admin.get_queryset(request).db
    names, more = ("stage", "destination", "fingerprint", "reason"), ""
    resolution = request.GET.get("resolution", Resolution.OPEN)
    found: list[tuple[Any, int, int]]  # a dead letter or a group, its count and newest
    if resolution == Resolution.OPEN:
        found = [(one, one.count, one.example) for one in dead.by_error(using)]
    else:
        letters = DeadLetter.objects.using(using).filter(resolution=resolution)
        newest = letters.only(*names).order_by("-pk")[:CAP]
        found = [(one, 1, one.pk) for one in newest]
        more = "+" if len(found) == CAP else ""
    kept = {"newest": {}}
    for name in names:
        counts: Counter[str] = Counter()
        for one, number, _ in found:
            counts[getattr(one, name)] += number
        kept[name] = {v: f"{n:,}{more}" for v, n in counts.most_common(MOST_CHOICES)}
    for one, _, example in sorted(found, key=lambda each: each[2]):
        kept["newest"][one.fingerprint] = example
    request._txmsg_counts = kept  # type: ignore[attr-defined]  # kept on the request
    return kept


class LetterList(MessageList):
    """A list of dead letters. Its filter can become the filter of a bulk operation."""

    @cached_property
    def bulk_query(self) -> str:
        """The query string of the confirmation page for all dead letters that match the
        list's filter."""
        return urlencode(bulk_filter(self.params))


def _asking(kind: BulkKind, permission: str) -> Any:
    """Return an admin action that asks for confirmation of this bulk operation."""

    @admin.action(description=f"{kind.capitalize()}…", permissions=[permission])
    def ask(_: object, request: HttpRequest, rows: QuerySet[Any]) -> HttpResponse:
        """Redirect to the confirmation page for the selected dead letters."""
        query = {"ids": ",".join(request.POST.getlist("_selected_action"))}
        if request.POST.get("select_across") == "1":
            # All that match: the filter itself, since their number has no limit.
            query = bulk_filter(request.GET)
        chosen = urlencode({"kind": kind.value, **query})
        page = address(request, "admin:django_txmsg_confirm")
        return HttpResponseRedirect(f"{page}?{chosen}")

    return ask


@admin.register(DeadLetter)
class DeadLetterAdmin(MessageAdmin):
    """Dead letters. Without a query string, the page groups them by error."""

    list_display = ("state", "age", "error", "place", "tries", "message")
    list_filter = FILTERS
    list_display_links = ("state", "error", "message")
    search_help_text = "Exact message id, correlation id, key or fingerprint"
    actions = ("redeliver_selected", "discard_selected", "restore_selected")
    change_list_template = "admin/django_txmsg/dead_letters.html"

    def get_queryset(self, request: HttpRequest) -> QuerySet[DeadLetter]:
        """Return the dead letters without their tracebacks, which are long."""
        return super().get_queryset(request).defer("traceback")

    def get_changelist(self, request: HttpRequest, **options: Any) -> type[MessageList]:
        """Return the list class that provides the query of a bulk operation."""
        return LetterList

    def found(self, rows: QuerySet[Any], text: str) -> QuerySet[Any]:
        """Search the same columns as `manage.py dead_letters` and bulk operations."""
        return rows.filter(selection.searched(text))

    def get_urls(self) -> list[Any]:
        """Add the URLs of the actions."""
        return [
            self.at("confirm/", partial(confirm, self), "confirm"),
            self.at("<int:pk>/copy/", partial(copy, self), "copy"),
            self.button("note/", partial(note, self), "note"),
            self.at("affected/", partial(affected, self), "affected"),
            *super().get_urls(),
        ]

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the list if there is a query string. Otherwise show the groups."""
        if request.method == "GET" and not request.GET:
            return groups(self, request)
        more = {"title": "Dead letters", "deeds": deeds(request)}
        return super().changelist_view(request, {**more, **(extra_context or {})})

    def has_redeliver_permission(self, request: HttpRequest) -> bool:
        """Whether the user may redeliver."""
        return request.user.has_perm(PERMISSIONS[BulkKind.REDELIVER])

    def has_discard_permission(self, request: HttpRequest) -> bool:
        """Whether the user may discard and restore."""
        return request.user.has_perm(PERMISSIONS[BulkKind.DISCARD])

    redeliver_selected = _asking(BulkKind.REDELIVER, "redeliver")
    discard_selected = _asking(BulkKind.DISCARD, "discard")
    restore_selected = _asking(BulkKind.RESTORE, "discard")

    @admin.display(description="state")
    def state(self, letter: DeadLetter) -> SafeString:
        """The resolution, and a badge if the message has died more than once."""
        again = display.badge("failed again") if letter.deaths > 1 else ""
        return format_html("{} {}", display.badge(letter.resolution), again)

    @admin.display(description="stage")
    def place(self, letter: Any) -> SafeString:
        """The stage, relay or broker that gave up the message. If the destination has
        another name than the stage, the destination is added."""
        place = dead.place(letter.stage, letter.destination, letter.reason)
        if letter.stage not in ("", letter.destination):
            place += f" of {letter.destination}"
        return display.named(place, letter.task)

    tries = display.column("attempts", int, "attempts")

    age = display.column("last death", display.ago, "created_at")

    error = display.column(
        "error", lambda one: display.first_line(one.exception) or one.reason
    )


def deeds(request: HttpRequest) -> list[tuple[str, str]]:
    """Return the kind and the label of each bulk action that the user may run on all
    dead letters that match the list's filter."""
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
    """Convert a list's query to the filter of a bulk operation. All conditions are
    kept, because with fewer conditions the operation would select more rows than the
    list shows."""
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
