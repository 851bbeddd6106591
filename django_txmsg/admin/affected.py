"""The page and the CSV export that show which keys, flows and tenants the selected dead
letters affect."""

from __future__ import annotations

from django.contrib import messages
from django.db import router
from django.http import HttpRequest, HttpResponseBase, StreamingHttpResponse
from django.shortcuts import render

from ..dead_letters import affected, selection
from ..dead_letters.selection import Shown
from ..errors import TxmsgError
from ..models import DeadLetter
from ..models.bulk_operation import BulkKind
from ..models.monitoring import Deed
from .audit import audit, audited
from .base import ReadOnlyAdmin, insist
from .bulk import filter_text
from .confirm import hidden_fields, read_filter

EXPORT = "django_txmsg.export_deadletter"


def page(admin: ReadOnlyAdmin, request: HttpRequest) -> HttpResponseBase:
    """Show who is affected by the open dead letters that match a filter (GET), or
    export these dead letters as CSV (POST)."""
    exports, may_export = request.method == "POST", request.user.has_perm(EXPORT)
    insist(admin.has_view_permission(request) and (may_export or not exports))
    using = router.db_for_write(DeadLetter)
    try:
        filters = read_filter(request.POST if exports else request.GET)
        letters = selection.matching(BulkKind.DISCARD, filters, using=using)
        shown = Shown.of(letters)
    except (TxmsgError, ValueError) as error:
        messages.error(request, str(error))
        return admin.led_to_list(request)
    letters, said = shown.bound(letters), filter_text(filters)
    newest = letters.order_by("-pk").first()
    if newest is None:
        messages.warning(request, "No open dead letter matches.")
        return admin.led_to_list(request)
    if exports:
        with audited(using):
            text = f"Exported {shown.count:,} dead letters as CSV; filter: {said}."
            audit(request, newest, Deed.EXPORT, text, count=shown.count)
        name = {"Content-Disposition": 'attachment; filename="dead-letters.csv"'}
        lines = affected.as_csv(letters)
        return StreamingHttpResponse(lines, content_type="text/csv", headers=name)
    context = {
        **admin.page_context(request, "Who is affected"),
        "count": shown.count,
        "parts": affected.read(letters),
        "filters": said,
        "fields": hidden_fields(filters),
        "may_export": may_export,
    }
    return render(request, "admin/django_txmsg/affected.html", context)
