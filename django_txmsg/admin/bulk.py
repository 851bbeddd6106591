"""Bulk operations: their list, their progress, and the buttons that pause, resume and
cancel them. Also the page that asks for confirmation before an action on dead letters.
It shows their number, age and places, and the consequences of the action.

The same page serves one dead letter, a selection, a group, or all dead letters that
match a filter. A small operation is finished before the response. A large operation
runs in the background, and has a page with its progress.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from django.contrib import admin, messages
from django.db import router
from django.http import HttpRequest, HttpResponse, QueryDict
from django.utils import timezone

from .. import conf
from ..dead_letters import bulk, selection
from ..dead_letters.selection import Changed, Shown, filter_text
from ..errors import TxmsgError
from ..models import BulkOperation, DeadLetter
from ..models.bulk_operation import PAST, BulkKind, BulkState
from ..models.fields import clock
from ..models.monitoring import Deed
from ..monitoring import attendance
from . import display
from .audit import audit, audited, perform
from .base import MESSAGE, RowPageAdmin, given, insist, led, operator, plain

PERMISSIONS = {
    BulkKind.REDELIVER: "django_txmsg.redeliver_deadletter",
    BulkKind.DISCARD: "django_txmsg.discard_deadletter",
    BulkKind.RESTORE: "django_txmsg.discard_deadletter",
    BulkKind.GO_BACK: "django_txmsg.go_back_run",
}

#: Most messages that are processed before the page answers, and most seconds that it
#: waits for them.
AT_ONCE, PATIENCE = 200, 5.0


@admin.register(BulkOperation)
class BulkAdmin(RowPageAdmin):
    """The list of bulk operations, running and past."""

    list_display = (
        "status", "kind", "progress", "skipped", "filters", "by", "age",
    )  # fmt: skip
    list_filter = ("state", "kind")
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
        service = operation.filter.get("service", "")
        title = f"{operation.get_kind_display().capitalize()} in bulk"
        context = {
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
            "opens": request.user.has_perm(
                f"django_txmsg.view_{operation.noun.replace(' ', '')}"
            ),
            "service": service,
            "idle": operation.state == BulkState.RUNNING
            and not attendance.read_living(using, clock(using)).consumes(service),
            "skipped_why": sorted(operation.skipped_why.items()),
        }
        return self.show(request, "bulk", title, context)

    def move(self, verb: str, request: HttpRequest, pk: int) -> HttpResponse:
        """Pause, resume or cancel an operation. `verb` names the action."""
        operation = self.get_object(request, str(pk))
        if operation is None:
            messages.warning(request, f"There is no bulk operation {pk} here.")
            return self.led_to_list(request)
        insist(request.user.has_perm(PERMISSIONS[BulkKind(operation.kind)]))
        using, past = operation._state.db, {"cancel": "cancelled"}.get(verb, f"{verb}d")
        refusal = f"The operation has ended, or was {past} before."
        perform(request, using, partial(bulk.move, verb, pk, using), refusal)
        return led(request, "admin:django_txmsg_bulkoperation_change", pk)

    status = display.column("state", display.badge, "state")

    progress = display.column("done", lambda one: f"{one.done:,} of {one.total:,}")

    filters = display.column("filter", filter_text, "filter")

    age = display.column("asked for", display.ago, "created_at")


def start(
    request: HttpRequest,
    kind: BulkKind,
    filters: dict[str, Any],
    using: str,
    **options: Any,
) -> BulkOperation:
    """Start the bulk operation that the user has confirmed, with the rate and the
    reason from the form.

    Raises TxmsgError. Raises ValueError if the rate is not a number.
    """
    rate, why = given(request, "rate"), given(request)
    with audited(using):
        operation = bulk.start(
            kind,
            filters,
            using=using,
            by=operator(request),
            why=why,
            rate=float(rate) if rate else None,
            **options,
        )
        text = bulk.described(operation, filters, why)
        audit(request, operation, Deed(kind.value), text)
    return operation


def confirm(admin: RowPageAdmin, request: HttpRequest) -> HttpResponse:
    """Ask for confirmation (GET), or start the operation (POST)."""
    given = request.POST if request.method == "POST" else request.GET
    if given.get("kind") not in PAST:  # other kinds are not about dead letters
        return admin.led_to_list(request)
    kind = BulkKind(given["kind"])
    may = request.user.has_perm(PERMISSIONS[kind])
    insist(may and admin.has_view_permission(request))
    try:
        filters = read_filter(given)
        if request.method == "POST":
            try:
                return _start(admin, request, kind, filters)
            except Changed as error:
                messages.warning(request, f"{error} Look at the new numbers.")
        return _ask(admin, request, kind, filters)
    except (TxmsgError, ValueError) as error:
        messages.error(request, str(error))
        return admin.led_to_list(request)


def _ask(
    admin: RowPageAdmin, request: HttpRequest, kind: BulkKind, filters: dict[str, Any]
) -> HttpResponse:
    using = router.db_for_write(DeadLetter)
    letters = selection.matching(kind, filters, using=using)
    shown = Shown.of(letters)
    letters = shown.bound(letters)
    facts = selection.summary(letters)
    if not facts.count:
        messages.warning(
            request,
            f"There is nothing to {kind}: the selected dead letters are resolved "
            "already.",
        )
        return admin.led_to_list(request)
    count = facts.count
    same = count == 1 or "fingerprint" in filters
    newest = letters.only("exception", "reason").order_by("-pk").first()
    title = f"{kind.capitalize()} {count:,} message{'s' * (count != 1)}?"
    context = {
        "shown": str(shown),
        "kind": kind.value,
        "facts": facts,
        "error": (newest.exception or newest.reason) if newest and same else "",
        "filters": filter_text(filters),
        "fields": hidden_fields(filters),
        "memory": conf.get().RETENTION.INBOX,
        "background": count > AT_ONCE,
    }
    return admin.show(request, "confirm", title, context)


def _start(
    admin: RowPageAdmin, request: HttpRequest, kind: BulkKind, filters: dict[str, Any]
) -> HttpResponse:
    using, token = router.db_for_write(DeadLetter), request.POST.get("shown")
    tolerates = int(request.POST.get("tolerates") or 0)
    first = request.POST.get("first") == "1" and kind == BulkKind.REDELIVER
    operation = start(
        request,
        kind,
        filters,
        using,
        force=request.POST.get("force") == "1",
        shown=Shown.parse(token) if token else None,
        tolerates=max(tolerates, 0) if first else None,
    )
    if operation.total <= AT_ONCE and operation.rate is None and not first:
        bulk.finish(operation, patience=PATIENCE)
    if operation.state != BulkState.DONE:
        page = "admin:django_txmsg_bulkoperation_change"
        return led(request, page, operation.pk)
    text, tell = operation.result, messages.success
    if operation.skipped:
        why = next(iter(operation.skipped_why.values()), "")
        text += f" {operation.skipped} skipped: {why}."
        tell = messages.warning
    tell(request, text)
    if operation.total == 1:
        letters = DeadLetter.objects.using(using)
        if letter := letters.filter(pk=operation.cursor).first():
            return led(request, MESSAGE, letter.message_id)
    return admin.led_to_list(request)


def read_filter(given: QueryDict) -> dict[str, Any]:
    """Return the filter of dead letters from a query string or form.

    Raises ValueError if an id is not a number, and TxmsgError if there are too many.
    """
    filters: dict[str, Any] = {
        name: plain(str(given[name]))
        for name in selection.FILTERS
        if name not in ("ids", "again")
        if name in given
    }
    if given.get("again"):
        filters["again"] = True
    if "ids" in given:
        filters["ids"] = [int(one) for one in str(given["ids"]).split(",") if one]
        selection.insist_on_few_ids(filters)
    return filters


def hidden_fields(filters: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the names and values of the hidden form fields that hold a filter."""
    return [
        (name, ",".join(map(str, value)) if name == "ids" else str(value))
        for name, value in filters.items()
    ]
