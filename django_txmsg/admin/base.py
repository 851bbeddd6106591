"""What all lists share: rows nobody edits, counts that stop, filters that count."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.views.main import ChangeList
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.db.models import Model, Q, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils.functional import cached_property
from django.utils.safestring import SafeString

from ..monitoring import status
from . import display

#: The most rows that a list counts; more are "1,000+". Finding a row by a filter that
#: has no index may take reading a hundred others.
CAP = 1_000

#: The rows that a search by something without an index may find.
FOUND = 500

#: A message's page, by its id. Its address can be pasted into a ticket.
MESSAGE = "admin:django_txmsg_message"


class CappedPaginator(Paginator):  # type: ignore[type-arg]  # not generic at run time
    """Pages whose rows are counted up to a cap only."""

    @cached_property
    def count(self) -> int:
        """How many rows there are, or one more than the cap."""
        # In the list's own order, newest first: the oldest may not be in memory.
        rows: Any = self.object_list
        counted: int = rows[: CAP + 1].values("pk").count()
        return counted


class CappedList(ChangeList):
    """A list that does not pretend to have counted all of its rows."""

    def get_results(self, request: HttpRequest) -> None:
        """Say how many were found beside the search only where that is known."""
        super().get_results(request)
        if self.result_count > CAP:
            self.full_result_count = self.result_count


class MessageList(CappedList):
    """A list whose rows lead to their message's page."""

    def url_for_result(self, result: Any) -> str:
        """Return the page of the row's message, by its id."""
        site = self.model_admin.admin_site.name
        return reverse(MESSAGE, args=[result.message_id], current_app=site)


class ReadOnlyAdmin(admin.ModelAdmin):  # type: ignore[type-arg]  # not generic at run time
    """Rows own their transitions; the admin adds, edits and deletes none."""

    list_per_page = 50
    list_max_show_all = 0
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER  # our filters count, but not without end
    paginator = CappedPaginator
    sortable_by: ClassVar[Any] = ()
    actions: Any = None
    change_list_template = "admin/django_txmsg/change_list.html"

    class Media:
        css: ClassVar[dict[str, list[str]]] = {"all": ["django_txmsg/admin.css"]}

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Nobody adds rows here."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Nobody edits rows here."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Nobody deletes rows here: pruning does, past the retention."""
        return False

    def lookup_allowed(
        self, lookup: str, value: Any, request: HttpRequest | None = None
    ) -> bool:
        """Narrow a list by its filters only: with any other lookup one could feel for
        what is masked, or for a body, a character at a time."""
        filters: Any = self.list_filter
        return lookup in {
            name
            for one in filters
            for name in (
                (one, f"{one}__exact", f"{one}__isnull")
                if isinstance(one, str)
                else (one.parameter_name,)
            )
        }

    def get_changelist(self, request: HttpRequest, **options: Any) -> type[ChangeList]:
        """Bring the list that knows where counting stops."""
        return CappedList

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Name the list by what is in it: nothing is to be selected for a change."""
        title = str(self.opts.verbose_name_plural).capitalize()
        answer: HttpResponse = super().changelist_view(
            request, {"title": title, **(extra_context or {})}
        )
        return answer

    def page_context(self, request: HttpRequest, title: str) -> dict[str, Any]:
        """Return what every page of ours has in common."""
        return {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "title": title,
            "media": self.media,
        }


class MessageAdmin(ReadOnlyAdmin):
    """A list of rows that are seen on their message's page, and nowhere else: bodies
    and headers are shown there by right and masked."""

    list_display_links: Any = ("message",)
    search_fields = ("message_id",)
    ordering = ("-id",)
    #: The columns by which a search finds what has not such a message id.
    found_by: ClassVar[tuple[str, ...]] = ("correlation_id",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Leave the long columns where they are."""
        rows: QuerySet[Any] = super().get_queryset(request)
        return rows.defer("body", "headers")

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Find by one exact id."""
        if not search_term:
            return queryset, False
        return find(queryset, search_term, *self.found_by), False

    @admin.display(description="flow")
    def flow(self, row: Any) -> SafeString | str:
        """What the message belongs to."""
        if not row.correlation_id:
            return "-"
        return display.mono(display.cut(row.correlation_id, 13), row.correlation_id)

    def get_changelist(self, request: HttpRequest, **options: Any) -> type[ChangeList]:
        """Let rows lead to their message's page."""
        return MessageList

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Lead to the message's page."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        row = self.get_object(request, object_id)
        if row is None:
            name = self.opts.verbose_name
            messages.warning(request, f"There is no {name} {object_id} here.")
            rows = f"admin:{self.opts.app_label}_{self.opts.model_name}_changelist"
            return led(request, rows)
        return led(request, MESSAGE, row.message_id)


class CountingFilter(admin.SimpleListFilter):
    """A filter with the number behind each choice."""

    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterable[Any]:
        """Return the choices, each with how many rows it would show."""
        for value, label, count in self.counted(request, model_admin):
            shown = (
                label if count is None else f"{label} ({display.capped(count, CAP)})"
            )
            yield value, shown

    def counted(
        self, request: HttpRequest, model_admin: Any
    ) -> Iterator[tuple[str, str, int | None]]:
        """Return value, label and count of each choice."""
        raise NotImplementedError

    def has_output(self) -> bool:
        """Show the filter even where there is one choice: its count is worth it. One
        that is set narrows the list, whether or not its value is among the choices."""
        return bool(self.lookup_choices) or self.value() is not None


class StateFilter(CountingFilter):
    """By the states of a row, counted to the cap."""

    title = "state"
    parameter_name = "state"

    @staticmethod
    def conditions() -> dict[str, Q]:
        """Return what each choice means."""
        raise NotImplementedError

    def counted(
        self, request: HttpRequest, model_admin: Any
    ) -> Iterator[tuple[str, str, int | None]]:
        """Count each state."""
        rows = model_admin.get_queryset(request)
        for name, condition in self.conditions().items():
            yield name, name, count(rows.filter(condition))

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Narrow the list."""
        condition = self.conditions().get(self.value() or "")
        return queryset if condition is None else queryset.filter(condition)


class PlaceFilter(CountingFilter):
    """By the column of the parameter's name, as far as the newest rows tell."""

    @staticmethod
    def recent(using: str) -> dict[str, int]:
        """Return the choices, each with its number among the newest rows."""
        raise NotImplementedError

    def counted(
        self, request: HttpRequest, model_admin: Any
    ) -> Iterator[tuple[str, str, int | None]]:
        """Count each among the newest."""
        return among_newest(self.recent(model_admin.get_queryset(request).db))

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Narrow the list."""
        if not self.value():
            return queryset
        return queryset.filter(**{str(self.parameter_name): self.value()})


def among_newest(counts: dict[str, int]) -> Iterator[tuple[str, str, None]]:
    """Return choices counted among the newest rows: "12+" where there are more."""
    more = "+" if sum(counts.values()) >= status.RECENT else ""
    for name, number in sorted(counts.items()):
        yield name, f"{name} ({number:,}{more})", None


def listed(count: int) -> str:
    """Return a list's number of rows, or the cap and a plus."""
    return display.capped(count, CAP)


def count(rows: QuerySet[Any]) -> int:
    """Count rows up to the cap."""
    return rows.order_by()[: CAP + 1].values("pk").count()


def address(request: HttpRequest, page: str, *args: object) -> str:
    """Return a page's address on the admin site that the request came to: a project
    may have several."""
    here = request.resolver_match.namespace if request.resolver_match else None
    return reverse(page, args=args, current_app=here)


def led(request: HttpRequest, page: str, *args: object) -> HttpResponseRedirect:
    """Answer by leading to a page of the same admin site."""
    return HttpResponseRedirect(address(request, page, *args))


def find(rows: QuerySet[Any], text: str, *columns: str) -> QuerySet[Any]:
    """Return the rows with exactly this message id or one of these columns.

    The ids are found first and once: the list's own queries then cost nothing.
    """
    text = text.strip()
    pks: set[int] = set()
    try:
        wanted = uuid.UUID(text)
    except ValueError:
        pass
    else:
        pks.update(rows.filter(message_id=wanted).values_list("pk", flat=True)[:FOUND])
    for column in columns:
        if not pks:
            same = rows.filter(**{column: text}).order_by()
            pks.update(same.values_list("pk", flat=True)[:FOUND])
    return rows.filter(pk__in=pks)


def audit(request: HttpRequest, subject: Model, text: str) -> None:
    """Write into the admin's log who did what."""
    user: Any = request.user
    LogEntry.objects.create(
        user_id=user.pk,
        content_type_id=ContentType.objects.get_for_model(subject).pk,
        object_id=str(subject.pk),
        object_repr=str(subject)[:200],
        action_flag=CHANGE,
        change_message=text,
    )
