"""What all lists share: rows cannot be edited, and the search finds complete ids
only."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, ClassVar

from django.contrib import admin, messages
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.db.models import Case, QuerySet, When
from django.db.models.fields.json import KeyTextTransform
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern, path, reverse
from django.utils.safestring import SafeString
from django.views.decorators.http import require_POST

from .. import wire
from . import display
from .addresses import MESSAGE, led
from .counting import CappedList, CappedPaginator

View = Callable[..., Any]

#: Most rows that a search by a column without an index may find.
FOUND = 500


class MessageList(CappedList):
    """A list whose rows link to their message's page."""

    def url_for_result(self, result: Any) -> str:
        """Return the page of the row's message, by its id."""
        site = self.model_admin.admin_site.name
        return reverse(MESSAGE, args=[result.message_id], current_app=site)


class ReadOnlyAdmin(admin.ModelAdmin):  # type: ignore[type-arg]  # not generic at run time
    """The admin adds, edits and deletes no rows, because only the models change
    states."""

    list_per_page = 50
    list_max_show_all = 0
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER  # our filters count, up to a cap
    paginator = CappedPaginator
    sortable_by: ClassVar[Any] = ()
    actions: Any = None
    change_list_template = "admin/django_txmsg/change_list.html"
    #: Whether users with the permission may delete rows.
    deletes: ClassVar[bool] = False

    class Media:
        css: ClassVar[dict[str, list[str]]] = {"all": ["django_txmsg/admin.css"]}

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Rows cannot be added here."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Rows cannot be edited here."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Rows of few tables can be deleted here. Pruning deletes rows that are older
        than the retention."""
        return self.deletes and super().has_delete_permission(request, obj)

    def lookup_allowed(
        self, lookup: str, value: Any, request: HttpRequest | None = None
    ) -> bool:
        """Allow only the list's filters. With any other lookup, a user could guess a
        masked value, or a body, character by character."""
        filters: Any = self.list_filter
        return lookup in {name for one in filters for name in _lookups(one)}

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Search for one complete id, so that an index finds it."""
        if search_term and self.search_fields:
            queryset = self.found(queryset, search_term)
        return queryset, False

    def found(self, rows: QuerySet[Any], text: str) -> QuerySet[Any]:
        """Return the rows with this id."""
        raise NotImplementedError

    def get_changelist(self, request: HttpRequest, **options: Any) -> type[ChangeList]:
        """Return the list class that shows where counting stopped."""
        return CappedList

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Set the list's title to what it contains, because nothing is selected to be
        changed."""
        if any("\x00" in value for value in request.GET.values()):
            query = request.GET.copy()
            for name, values in query.lists():
                query.setlist(name, [plain(value) for value in values])
            request.GET = query  # type: ignore[assignment]  # as Django itself does
        title = str(self.opts.verbose_name_plural).capitalize()
        answer: HttpResponse = super().changelist_view(
            request, {"title": title, **(extra_context or {})}
        )
        return answer

    def at(self, route: str, view: View, name: str) -> URLPattern:
        """Return the address of a page of this admin site."""
        name = f"django_txmsg_{name}"
        return path(route, self.admin_site.admin_view(view), name=name)

    def button(self, route: str, view: View, name: str) -> URLPattern:
        """Return the address of a button, which changes something and takes no GET."""
        return self.at(route, require_POST(view), name)

    def led_to_list(self, request: HttpRequest) -> HttpResponseRedirect:
        """Redirect to the list of this model."""
        rows = f"admin:{self.opts.app_label}_{self.opts.model_name}_changelist"
        return led(request, rows)

    def page_context(self, request: HttpRequest, title: str) -> dict[str, Any]:
        """Return the context that all pages of the console share."""
        return {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "title": title,
            "media": self.media,
        }


class RowPageAdmin(ReadOnlyAdmin):
    """A list whose rows have pages of ours."""

    #: What the user reads where a row does not exist, by default the model's name.
    noun: ClassVar[str] = ""

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Show a row's page. If there is no such row, tell the user."""
        insist(self.has_view_permission(request))
        row = self.get_object(request, object_id)
        if row is None:
            noun = self.noun or self.opts.verbose_name
            messages.warning(request, f"There is no {noun} {object_id} here.")
            return self.led_to_list(request)
        return self.row_page(request, row)

    def row_page(self, request: HttpRequest, row: Any) -> HttpResponse:
        """Return the page of a row."""
        raise NotImplementedError


class MessageAdmin(RowPageAdmin):
    """A list of messages. Details are only on the page of a message, where bodies and
    headers are masked and need permissions."""

    # The first column too: on a phone, the others are off the screen.
    list_display_links: Any = ("state", "message")
    search_fields = ("message_id",)
    ordering = ("-id",)
    #: The columns by which a search finds rows without that message id.
    found_by: ClassVar[tuple[str, ...]] = ("correlation_id",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Do not load the long columns, except for the name of a task."""
        rows: QuerySet[Any] = super().get_queryset(request)
        name = KeyTextTransform(wire.TASK, "headers")
        task = When(destination__contains=wire.OF_TASKS, then=name)
        rows = rows.defer("body", "headers").annotate(task=Case(task))
        return rows

    def found(self, rows: QuerySet[Any], text: str) -> QuerySet[Any]:
        """Return the rows with this id."""
        return find(rows, text, *self.found_by)

    @admin.display(description="message")
    def message(self, row: Any) -> SafeString:
        """The message's id."""
        return display.short_id(row.message_id)

    @admin.display(description="flow")
    def flow(self, row: Any) -> SafeString | str:
        """The correlation id that the message shares with others."""
        if not row.correlation_id:
            return "-"
        return display.mono(display.cut(row.correlation_id, 13), row.correlation_id)

    def get_changelist(self, request: HttpRequest, **options: Any) -> type[ChangeList]:
        """Link rows to their message's page."""
        return MessageList

    def row_page(self, request: HttpRequest, row: Any) -> HttpResponse:
        """Redirect to the message's page."""
        return led(request, MESSAGE, row.message_id)


def insist(allowed: bool) -> None:
    """Raise PermissionDenied unless the user is allowed to do this."""
    if not allowed:
        raise PermissionDenied


def given(request: HttpRequest, field: str = "why") -> str:
    """Return what the user has entered into a field of a form, by default the
    reason."""
    return plain(request.POST.get(field, "")).strip()


def _lookups(of: Any) -> tuple[str, ...]:
    """Return the parameters of one of a list's filters."""
    if isinstance(of, str):
        return of, f"{of}__exact", f"{of}__isnull"
    if isinstance(of, tuple):  # admin.EmptyFieldListFilter
        return (f"{of[0]}__isempty",)
    return of.parameter_name, *getattr(of, "BOUNDS", ())


def plain(text: str) -> str:
    """Return a user's input without NUL, which PostgreSQL can neither store nor
    find."""
    return text.replace("\x00", "")


def find(rows: QuerySet[Any], text: str, *columns: str) -> QuerySet[Any]:
    """Return the rows whose message id, or one of these columns, equals the text.

    The matching primary keys are found first, by one query, so that the list's own
    queries are cheap.
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
