"""Records the actions of operators, and lists them. The page "May I?" shows what the
user may do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from django.apps import apps
from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db import router, transaction
from django.db.models import Model
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from ..errors import TxmsgError
from ..models import AuditEntry, BulkOperation
from ..models.monitoring import Deed, Done
from . import changes, display
from .base import ReadOnlyAdmin, address, operator, plain
from .filters import BetweenFilter, PlaceFilter, filter_of

#: The apps with pages of ours.
APPS = ("django_txmsg", "txmsg_spark")


@contextmanager
def audited(using: str) -> Iterator[None]:
    """Begin a transaction for an action and its audit entries. If Django's admin log is
    in another database, that database commits first. So every committed action has its
    log entries."""
    log = router.db_for_write(LogEntry)
    with transaction.atomic(using=using), transaction.atomic(using=log):
        yield


def audit(
    request: HttpRequest, subject: Model, deed: Deed, text: str, *, count: int = 1
) -> None:
    """Record the user's action on the row `subject`, in the audit and in Django's admin
    log. Call this within `audited()`. `count` is the number of rows that the page
    showed to the user."""
    user: Any = request.user
    operation = subject if isinstance(subject, BulkOperation) else None
    AuditEntry.objects.db_manager(subject._state.db).record(
        operator(request), text, deed=deed, count=count, operation=operation
    )
    LogEntry.objects.create(
        user_id=user.pk,
        content_type_id=ContentType.objects.get_for_model(subject).pk,
        object_id=str(subject.pk),
        object_repr=plain(str(subject)[:200]),
        action_flag=CHANGE,
        change_message=plain(text),
    )


def perform(
    request: HttpRequest,
    using: str,
    change: Callable[[], Done | None],
    refusal: str,
) -> None:
    """Call `change` in a transaction with its audit entry, and show the result to the
    user. If `change` returns None, nothing was changed, and the user reads `refusal`.
    If it raises an error about the user's input, the user reads the error."""
    try:
        with audited(using):
            done = change()
            if done is not None:
                audit(request, *done)
    except (TxmsgError, ValueError) as error:
        messages.error(request, f"Nothing was changed: {error}")
    else:
        if done is None:
            messages.warning(request, refusal)
        else:
            messages.success(request, done[2])


@admin.register(AuditEntry)
class AuditAdmin(ReadOnlyAdmin):
    """The list of operators' actions, newest first."""

    list_display = ("when", "by", "deed", "shown", "done", "what")
    list_display_links = None
    list_filter = (
        filter_of(PlaceFilter, "deed", parameter_name="deed"),
        filter_of(PlaceFilter, "operator", parameter_name="by"),
        filter_of(BetweenFilter, "time", column="at"),
    )
    list_select_related = ("operation",)
    search_fields = ("by", "text")
    search_help_text = "Part of a name, or of what was done"
    get_search_results = admin.ModelAdmin.get_search_results

    def get_urls(self) -> list[Any]:
        """Add the URLs of the pages "May I?" and "What changed"."""
        return [
            self.at("may-i/", partial(may_i, self), "may"),
            self.at("changes/", partial(changes.show, self), "changes"),
            *super().get_urls(),
        ]

    when = display.column("when", display.ago, "at")

    what = display.column("what and why", str, "text")

    shown = display.column("shown", display.exact, "count")

    @admin.display(description="done")
    def done(self, entry: AuditEntry) -> SafeString | str:
        """The number of changed rows and, for a bulk operation, its state."""
        if entry.done is None:
            return "-"
        state = display.badge(entry.operation.state) if entry.operation else ""
        return format_html("{} {}", display.exact(entry.done), state)


def may_i(admin: ReadOnlyAdmin, request: HttpRequest) -> HttpResponse:
    """Show the page "May I?". Every user of the admin site may see it."""
    found = [
        one
        for model in apps.get_models()
        if model._meta.app_label in APPS and admin.admin_site.is_registered(model)
        for one in _allowances(admin, request, model)
    ]
    context = {
        "parts": [
            ("You may", [one for one in found if one["granted"]]),
            ("You may not", [one for one in found if not one["granted"]]),
        ],
    }
    return admin.show(request, "permissions", "May I?", context)


def _allowances(
    admin: ReadOnlyAdmin, request: HttpRequest, model: type[Model]
) -> Iterator[dict[str, Any]]:
    """Yield each permission for one model's list: its name, what it allows, whether the
    user has it, and the address of the list, or "" if the user may not see the list."""
    label, name = model._meta.app_label, model._meta.model_name
    rows = model._meta.verbose_name_plural
    named = [(f"view_{name}", f"Can view {rows}"), *model._meta.permissions]
    of_model = admin.admin_site.get_model_admin(model)
    if isinstance(of_model, ReadOnlyAdmin) and of_model.deletes:
        named.append((f"delete_{name}", f"Can delete {rows}"))
    sees = of_model.has_view_permission(request)
    page = address(request, f"admin:{label}_{name}_changelist") if sees else ""
    for codename, what in named:
        permission = f"{label}.{codename}"
        granted = request.user.has_perm(permission)
        what = str(what).removeprefix("Can ")
        yield {"permission": permission, "what": what, "granted": granted, "page": page}
