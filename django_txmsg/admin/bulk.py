"""Bulk operations: their list, their progress, and the buttons that pause, resume and
cancel them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from django.contrib import admin, messages
from django.db import router
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone

from ..dead_letters import bulk
from ..models import BulkOperation
from ..models.bulk_operation import BulkKind, BulkState
from ..models.fields import clock
from ..models.monitoring import Deed
from ..monitoring import attendance
from . import display
from .audit import audit, audited
from .base import RowPageAdmin, given, insist, led

PERMISSIONS = {
    BulkKind.REDELIVER: "django_txmsg.redeliver_deadletter",
    BulkKind.DISCARD: "django_txmsg.discard_deadletter",
    BulkKind.RESTORE: "django_txmsg.discard_deadletter",
    BulkKind.GO_BACK: "django_txmsg.go_back_run",
}


def filter_text(filters: dict[str, Any]) -> str:
    """Return a filter as text for people."""
    if not filters:
        return "all"
    parts = []
    for name, value in filters.items():
        if name == "ids":
            parts.append(f"{len(value)} selected")
        elif name == "again":
            parts.append("failed again")
        else:
            parts.append(f"{name} {value or '(relay)'}")
    return ", ".join(parts)


@admin.register(BulkOperation)
class BulkAdmin(RowPageAdmin):
    """The list of bulk operations, running and past."""

    list_display = (
        "status", "kind", "progress", "skipped", "filters", "by", "age",
    )  # fmt: skip
    list_filter = ("state", "kind")
    ordering = ("-id",)
    change_list_template = "admin/django_txmsg/bulk_operations.html"

    def get_urls(self) -> list[Any]:
        """Add the URLs of the buttons."""
        return [
            self.button(f"<int:pk>/{verb}/", partial(self.move, verb), f"bulk_{verb}")
            for verb in ("pause", "resume", "cancel")
        ] + super().get_urls()

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return True if the user may watch bulk operations. A user who may start one
        kind of bulk operation may watch all."""
        user: Any = request.user
        may_start = any(user.has_perm(name) for name in set(PERMISSIONS.values()))
        return may_start or super().has_view_permission(request, obj)

    def row_page(self, request: HttpRequest, row: BulkOperation) -> HttpResponse:
        """Show the progress of an operation. The page reloads automatically."""
        operation, using = row, row._state.db or "default"
        handled = operation.done + operation.skipped
        ended = operation.finished_at or timezone.now()
        seconds = max((ended - operation.created_at).total_seconds(), 0.001)
        rate = handled / seconds
        left = max(operation.total - handled, 0)
        context = {
            **self.page_context(
                request, f"{operation.get_kind_display().capitalize()} in bulk"
            ),
            "operation": operation,
            "handled": handled,
            "percent": 100
            if operation.state == BulkState.DONE or not operation.total
            else min(99, int(100 * handled / operation.total)),
            "speed": f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}",
            "left": display.duration(left / rate) if rate and left else "",
            "lasted": display.duration(seconds),
            "filters": filter_text(operation.filter),
            "may": request.user.has_perm(PERMISSIONS[BulkKind(operation.kind)]),
            "idle": operation.state == BulkState.RUNNING
            and not attendance.read_living(using, clock(using)).consumed,
            "skipped_why": sorted(operation.skipped_why.items()),
        }
        return render(request, "admin/django_txmsg/bulk.html", context)

    def move(self, verb: str, request: HttpRequest, pk: int) -> HttpResponse:
        """Pause, resume or cancel an operation. `verb` names the action."""
        operations = BulkOperation.objects.db_manager(
            router.db_for_write(BulkOperation)
        )
        operation = operations.filter(pk=pk).first()
        if operation is None:
            messages.warning(request, f"There is no bulk operation {pk} here.")
            return self.led_to_list(request)
        insist(request.user.has_perm(PERMISSIONS[BulkKind(operation.kind)]))
        with audited(operations.db):
            moved = getattr(operations, verb)(pk)
            if moved:
                said = f"{verb.capitalize()}: {operation}."
                audit(request, operation, Deed.OPERATION, said)
        if not moved:
            messages.warning(
                request, f"The operation has ended, or was {verb}d before."
            )
        return led(request, "admin:django_txmsg_bulkoperation_change", pk)

    status = display.column("state", display.badge, "state")

    @admin.display(description="done")
    def progress(self, operation: BulkOperation) -> str:
        """The number of processed messages, and the total."""
        return f"{operation.done:,} of {operation.total:,}"

    filters = display.column("filter", filter_text, "filter")

    age = display.column("asked for", display.ago, "created_at")


def start(
    request: HttpRequest,
    kind: BulkKind,
    filters: dict[str, Any],
    using: str,
    said: Callable[[BulkOperation], str],
    **options: Any,
) -> BulkOperation:
    """Start the bulk operation that the user has confirmed, with the rate and the
    reason from the form. The function `said` returns the text for the audit.

    Raises TxmsgError. Raises ValueError if the rate is not a number.
    """
    rate, why = given(request, "rate"), given(request)
    with audited(using):
        operation = bulk.start(
            kind,
            filters,
            using=using,
            by=request.user.get_username(),
            why=why,
            rate=float(rate) if rate else None,
            **options,
        )
        because = f"; why: {why}" if why else ""
        text = f"{said(operation)}; filter: {filter_text(filters)}{because}."
        audit(request, operation, Deed(kind.value), text)
    return operation
