"""The base classes of all lists. Rows cannot be edited. A search matches only
complete ids."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

from django.contrib import admin, messages
from django.contrib.admin.views.main import ChangeList
from django.contrib.auth import get_permission_codename
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import router
from django.db.models import Case, QuerySet, When
from django.db.models.fields.json import KeyTextTransform
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.views.decorators.http import require_POST

from .. import wire
from . import display
from .counting import CappedList, CappedPaginator

#: A message's page, by its id. Its address can be pasted into a ticket.
MESSAGE = "admin:django_txmsg_message"

View = Callable[..., Any]

#: Most rows that a search by a column without an index may find.
FOUND = 500


def address(request: HttpRequest, page: str, *args: object) -> str:
    """Return the URL of a page on the admin site that received the request."""
    here = request.resolver_match.namespace if request.resolver_match else None
    return reverse(page, args=args, current_app=here)


def led(request: HttpRequest, page: str, *args: object) -> HttpResponseRedirect:
    """Return a redirect to a page on the admin site that received the request."""
    return HttpResponseRedirect(address(request, page, *args))


class MessageList(CappedList):
    """A list whose rows link to the pages of their messages."""

    model_admin: Any

    def url_for_result(self, result: Any) -> str:
        """Return the URL of the page of the row's message."""
        return str(self.model_admin.page_of(result.message_id))


class ReadOnlyAdmin(admin.ModelAdmin):  # type: ignore[type-arg]  # not generic at run time
    """A list in which users cannot add or edit rows. Only methods of the models change
    a row's state."""

    list_per_page = 50
    list_max_show_all = 0
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER  # our filters count, up to a cap
    paginator = CappedPaginator
    sortable_by: ClassVar[Any] = ()
    ordering: ClassVar[Any] = ("-id",)
    actions: Any = None
    change_list_template = "admin/django_txmsg/change_list.html"
    #: Whether users with the permission may delete rows.
    deletes: ClassVar[bool] = False

    class Media:
        css: ClassVar[dict[str, list[str]]] = {"all": ["django_txmsg/admin.css"]}

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the rows of the database that is written. A replica that lags behind
        would not have the row of a button that was just pressed, and a router may read
        from a database without messages."""
        rows: QuerySet[Any] = super().get_queryset(request)
        return rows.using(router.db_for_write(self.model))

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return False, because rows cannot be added here."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return False, because rows cannot be edited here."""
        return False

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return True if the user has the permission to view the model. The permission
        to change the model allows nothing here."""
        meta = self.opts
        codename = get_permission_codename("view", meta)
        return request.user.has_perm(f"{meta.app_label}.{codename}")

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return True if the user may delete rows. Only a list that sets `deletes`
        allows this."""
        return self.deletes and super().has_delete_permission(request, obj)

    def lookup_allowed(
        self, lookup: str, value: Any, request: HttpRequest | None = None
    ) -> bool:
        """Allow only the lookups of the list's filters. With any other lookup, a user
        could guess a masked value or a body, character by character."""
        filters: Any = self.list_filter
        return lookup in {name for one in filters for name in _lookups(one)}

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Search for one complete id, using an index."""
        if search_term and self.search_fields:
            queryset = self.found(queryset, search_term)
        return queryset, False

    def found(self, rows: QuerySet[Any], text: str) -> QuerySet[Any]:
        """Return the rows that the search text finds."""
        raise NotImplementedError

    def get_changelist(self, request: HttpRequest, **options: Any) -> type[ChangeList]:
        """Return the list class that counts rows only up to a cap."""
        return CappedList

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the list. Its title is the model's name, because Django's title asks the
        user to select a row."""
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
        """Return the URL pattern of a page of this admin site."""
        name = f"django_txmsg_{name}"
        return path(route, self.admin_site.admin_view(view), name=name)

    def button(self, route: str, view: View, name: str) -> URLPattern:
        """Return the URL pattern of a button. The URL accepts only POST, because a
        button changes something."""
        return self.at(route, require_POST(view), name)

    def page_of(self, message_id: uuid.UUID) -> str:
        """Return the URL of the page of a message."""
        return reverse(MESSAGE, args=[message_id], current_app=self.admin_site.name)

    def link(self, message_id: uuid.UUID) -> SafeString:
        """Return the end of a message id, as a link to the message's page."""
        shown = display.short_id(message_id)
        return format_html('<a href="{}">{}</a>', self.page_of(message_id), shown)

    def led_to_list(self, request: HttpRequest) -> HttpResponseRedirect:
        """Redirect to the list of this model."""
        rows = f"admin:{self.opts.app_label}_{self.opts.model_name}_changelist"
        return led(request, rows)

    def show(
        self, request: HttpRequest, page: str, title: str, context: dict[str, Any]
    ) -> HttpResponse:
        """Return the response with one of our pages. `page` names its template."""
        shared = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "title": title,
            "media": self.media,
        }
        return render(request, f"admin/django_txmsg/{page}.html", shared | context)


class RowPageAdmin(ReadOnlyAdmin):
    """A list in which each row has a page of its own instead of Django's form."""

    def change_view(
        self, request: HttpRequest, object_id: str, *args: Any, **options: Any
    ) -> HttpResponse:
        """Show a row's page. If the row does not exist, show a warning and the list."""
        insist(self.has_view_permission(request))
        row = self.get_object(request, object_id)
        if row is None:
            name = self.opts.verbose_name
            messages.warning(request, f"There is no {name} {object_id} here.")
            return self.led_to_list(request)
        return self.row_page(request, row)

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> Any:
        """Return the row, or None if it does not exist."""
        try:
            return self.get_queryset(request).get(**{from_field or "pk": object_id})
        except (self.model.DoesNotExist, ValidationError, ValueError):
            return None

    def row_page(self, request: HttpRequest, row: Any) -> HttpResponse:
        """Return the response with a row's page."""
        raise NotImplementedError


class MessageAdmin(RowPageAdmin):
    """A list of messages. Only a message's own page shows its body and headers. They
    are masked, and shown only to users with the permission."""

    # The first column too: on a phone, the others are off the screen.
    list_display_links: Any = ("state", "message")
    search_fields = ("message_id",)
    #: The columns by which a search finds rows without that message id.
    found_by: ClassVar[tuple[str, ...]] = ("correlation_id",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Select the rows without bodies and headers. Only the task's name is read from
        the headers."""
        rows: QuerySet[Any] = super().get_queryset(request)
        name = KeyTextTransform(wire.TASK, "headers")
        task = When(destination__contains=wire.OF_TASKS, then=name)
        rows = rows.defer("body", "headers").annotate(task=Case(task))
        return rows

    def found(self, rows: QuerySet[Any], text: str) -> QuerySet[Any]:
        """Return the rows with this message id, or with this text in a column of
        `found_by`."""
        return find(rows, text, *self.found_by)

    message = display.column("message", display.short_id, "message_id")

    @admin.display(description="flow")
    def flow(self, row: Any) -> SafeString | str:
        """The message's correlation id, which all messages of one flow share."""
        name = row.correlation_id
        return display.mono_cut(name, most=13) if name else "-"

    def get_changelist(self, request: HttpRequest, **options: Any) -> type[ChangeList]:
        """Return the list class whose rows link to the pages of their messages."""
        return MessageList

    def row_page(self, request: HttpRequest, row: Any) -> HttpResponse:
        """Redirect to the page of the row's message."""
        return led(request, MESSAGE, row.message_id)


def insist(allowed: bool) -> None:
    """Raise PermissionDenied unless `allowed` is true."""
    if not allowed:
        raise PermissionDenied


def may(request: HttpRequest, *permissions: str) -> bool:
    """Return whether the user has all these permissions of our app."""
    # Not has_perms(): Django's admin does not ask a project's own user model for it.
    return all(request.user.has_perm(f"django_txmsg.{one}") for one in permissions)


def sees_messages(request: HttpRequest) -> bool:
    """Return whether the user may open the pages of messages. A page shows only the
    rows of the tables that the user may see."""
    tables = ("outboxmessage", "inboxmessage", "deadletter")
    return any(may(request, f"view_{one}") for one in tables)


def operator(request: HttpRequest) -> str:
    """Return the user's name, cut to the length of the columns that record it. A
    project's own user model may have a name that is not text, such as a UUID."""
    return str(request.user.get_username())[:255]


def given(request: HttpRequest, field: str = "why") -> str:
    """Return the user's input in a form field (by default the reason), without NUL and
    surrounding spaces."""
    return plain(request.POST.get(field, "")).strip()


def _lookups(of: Any) -> tuple[str, ...]:
    """Return the query parameters of a filter in `list_filter`."""
    if isinstance(of, str):
        return of, f"{of}__exact", f"{of}__isnull"
    if isinstance(of, tuple):  # admin.EmptyFieldListFilter
        return (f"{of[0]}__isempty",)
    return of.parameter_name, *getattr(of, "BOUNDS", ())


def plain(text: str) -> str:
    """Return a text without its NUL characters, because PostgreSQL rejects NUL."""
    return text.replace("\x00", "")


def find(rows: QuerySet[Any], text: str, *columns: str) -> QuerySet[Any]:
    """Return the rows whose message id equals the text. If there are none, return the
    rows in which one of the columns equals the text.

    For each comparison, a separate query first finds the primary keys. This keeps the
    list's own queries cheap.
    """
    text = text.strip()
    pks: set[int] = set()
    with suppress(ValueError):
        same = rows.filter(message_id=uuid.UUID(text))
        pks.update(same.values_list("pk", flat=True)[:FOUND])
    for column in columns:
        if not pks:
            same = rows.filter(**{column: text}).order_by()
            pks.update(same.values_list("pk", flat=True)[:FOUND])
    return rows.filter(pk__in=pks)
