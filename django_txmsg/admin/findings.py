"""What `reconcile` has found: how old it is, and who has acknowledged it and why."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.db import router
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils import timezone
from django.utils.dateparse import parse_datetime
from django.utils.html import format_html
from django.utils.safestring import SafeString

from ..models.fields import clock
from ..spark.models import Finding
from . import display
from .addresses import MESSAGE
from .audit import audit, audited
from .base import ReadOnlyAdmin, find, given


@admin.register(Finding)
class FindingAdmin(ReadOnlyAdmin):
    """Findings, which users acknowledge with a note. The next run of `reconcile`
    removes a finding that is resolved, unless it was acknowledged."""

    list_display = (
        "verdict", "message", "destination", "sender", "consumer", "sent", "age",
        "seen", "acknowledged",
    )  # fmt: skip
    list_filter = ("verdict", ("acknowledged_at", admin.EmptyFieldListFilter))
    search_fields = ("message_id",)
    search_help_text = "Exact message id or destination"
    ordering = ("-found_at", "id")
    actions = ("acknowledge", "reopen")
    fields = (
        "verdict", "message", "destination", "sender", "consumer", "sent", "age",
        "seen", "service", "acknowledged",
    )  # fmt: skip
    readonly_fields = fields

    def has_acknowledge_permission(self, request: HttpRequest) -> bool:
        """Whether the user may acknowledge findings, and reopen them."""
        return request.user.has_perm("txmsg_spark.acknowledge_finding")

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Search for one complete message id, or for a destination."""
        if not search_term:
            return queryset, False
        return find(queryset, search_term, "destination"), False

    @admin.action(description="Acknowledge…", permissions=["acknowledge"])
    def acknowledge(
        self, request: HttpRequest, chosen: QuerySet[Finding]
    ) -> HttpResponse | None:
        """Ask for a note, then store it with the selected findings."""
        findings = chosen.filter(acknowledged_at=None)
        note = given(request, "note")
        if "note" not in request.POST:
            return self._ask(request, findings)
        shown = findings
        as_of = parse_datetime(request.POST.get("as_of", ""))
        if as_of is not None:
            shown = findings.filter(found_at__lte=as_of)
            if str(shown.count()) != request.POST.get("count"):
                text = (
                    "Nothing is done yet: what you were shown has changed. Look again."
                )
                messages.warning(request, text)
                return self._ask(request, findings)
        if not note:
            messages.error(request, "Say why: an acknowledgement needs a note.")
            return self._ask(request, findings)
        count = self._say(
            request, shown, f"Acknowledged: {note}",
            acknowledged_at=timezone.now(), note=note,
            acknowledged_by=request.user.get_username()[:255],
        )  # fmt: skip
        messages.success(request, f"Acknowledged {count:,} findings.")
        return None

    @admin.action(description="Open again", permissions=["acknowledge"])
    def reopen(self, request: HttpRequest, chosen: QuerySet[Finding]) -> None:
        """Remove acknowledgements."""
        findings = chosen.exclude(acknowledged_at=None)
        count = self._say(
            request, findings, "Opened again.",
            acknowledged_at=None, acknowledged_by="", note="",
        )  # fmt: skip
        messages.success(request, f"{count:,} findings are open again.")

    def _ask(self, request: HttpRequest, findings: QuerySet[Finding]) -> HttpResponse:
        as_of = clock(router.db_for_write(Finding))
        findings = findings.filter(found_at__lte=as_of)
        count = findings.count()
        context = {
            **self.page_context(
                request, f"Acknowledge {count:,} finding{'s' * (count != 1)}?"
            ),
            "count": count,
            "as_of": as_of.isoformat(),
            "some": findings[:20],
            "box": ACTION_CHECKBOX_NAME,
            "chosen": request.POST.getlist(ACTION_CHECKBOX_NAME),
            "across": request.POST.get("select_across", "0"),
        }
        return render(request, "admin/django_txmsg/acknowledge.html", context)

    def _say(
        self,
        request: HttpRequest,
        findings: QuerySet[Finding],
        text: str,
        **changes: Any,
    ) -> int:
        """Change findings, and write an entry into Django's admin log."""
        using = router.db_for_write(Finding)  # the list may be read from a replica
        with audited(using):
            rows = findings.using(using).select_for_update().order_by("pk")
            chosen = list(rows)
            for finding in chosen:
                audit(request, finding, text)
            keys = [finding.pk for finding in chosen]
            for start in range(0, len(keys), 500):
                part = keys[start : start + 500]
                Finding.objects.using(using).filter(pk__in=part).update(**changes)
        return len(chosen)

    @admin.display(description="message")
    def message(self, finding: Finding) -> SafeString:
        """The message, with a link to its page."""
        site = self.admin_site.name
        page = reverse(MESSAGE, args=[finding.message_id], current_app=site)
        return format_html(
            '<a href="{}">{}</a>', page, display.short_id(finding.message_id)
        )

    @admin.display(description="sent")
    def sent(self, finding: Finding) -> SafeString:
        """When it was sent."""
        return display.ago(finding.sent_at) if finding.sent_at else display.mono("?")

    @admin.display(description="found")
    def age(self, finding: Finding) -> SafeString:
        """How long the finding has been known."""
        return display.ago(finding.found_at)

    @admin.display(description="last seen")
    def seen(self, finding: Finding) -> SafeString:
        """When a run of `reconcile` last found it."""
        return display.ago(finding.seen_at)

    @admin.display(description="acknowledged")
    def acknowledged(self, finding: Finding) -> SafeString:
        """Who acknowledged it, when, and the note."""
        if finding.acknowledged_at is None:
            return display.badge("new")
        return format_html(
            "{}<br><small>{}, {}</small>",
            finding.note, finding.acknowledged_by, display.ago(finding.acknowledged_at),
        )  # fmt: skip
