"""Lists of the pipeline: runs, archive positions, the alerts of `pipeline follow`, and
the findings of `reconcile`, with their ages and acknowledgements."""

from __future__ import annotations

import datetime as dt
import uuid
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.db import router
from django.db.models import QuerySet, Value
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString

from .. import conf
from ..models.fields import OneOf, clock
from ..models.monitoring import Deed
from ..spark.models import ArchiveMark, Finding, PipelineAlert, PipelineRun, RunState
from . import display
from .audit import audit, audited
from .base import ReadOnlyAdmin, find, given, operator, sees_messages
from .counting import WholePaginator
from .filters import read_time


@admin.register(PipelineRun)
class PipelineRunAdmin(ReadOnlyAdmin):
    """The list of pipeline runs, with user, options and result."""

    list_display = ("job", "outcome", "service", "row_count", "took", "begun", "run_by")
    list_filter = ("job", "state")
    ordering = ("-started_at",)
    paginator = WholePaginator
    fields = (
        "job", "outcome", "service", "run_by", "lake", "row_count", "took", "begun",
        "chosen", "counted", "error",
    )  # fmt: skip

    @admin.display(description="outcome")
    def outcome(self, run: PipelineRun) -> str:
        """The run's state. The state is "interrupted" if the process was killed and
        could not record the end of the run."""
        return "interrupted" if run.interrupted else run.get_state_display()

    row_count = display.column("rows", display.exact, "rows")

    @admin.display(description="took")
    def took(self, run: PipelineRun) -> str:
        """The duration of the run, or its duration so far. "-" if the run was
        interrupted or has not begun."""
        if run.interrupted or run.state == RunState.REQUESTED:
            return "-"
        spent = (run.finished_at or timezone.now()) - run.started_at
        return str(dt.timedelta(seconds=round(spent.total_seconds())))

    begun = display.column("started", display.ago, "started_at")

    chosen = display.column("options", display.as_json, "options")

    counted = display.column("counts", display.as_json, "counts")


@admin.register(ArchiveMark)
class ArchiveMarkAdmin(ReadOnlyAdmin):
    """The list of archive positions: how far each table was archived into each lake."""

    list_display = ("source", "lake", "purged_through", "row_count", "changed")
    list_filter = ("source",)
    ordering = ("source", "id")
    fields = (
        "source", "lake", "lake_id", "purged_through", "begun_through", "row_count",
        "changed",
    )  # fmt: skip

    row_count = display.column("rows", display.exact, "rows")

    changed = display.column("moved", display.ago, "changed_at")


@admin.register(PipelineAlert)
class PipelineAlertAdmin(ReadOnlyAdmin):
    """The list of alerts of `pipeline follow`, each with its last measured value."""

    list_display = ("name", "service", "firing", "summary", "began", "measured")
    list_filter = ("firing",)
    ordering = ("-firing", "service", "name")
    fields = (
        "name", "service", "firing", "value", "bound", "summary", "began", "measured",
        "told",
    )  # fmt: skip

    began = display.column("began to fire", display.ago, "since")

    measured = display.column("measured", display.ago, "checked_at")


@admin.register(Finding)
class FindingAdmin(ReadOnlyAdmin):
    """The list of findings. Users can acknowledge a finding with a note, or have its
    message replayed. The next run of `reconcile` deletes a resolved finding, unless it
    was acknowledged."""

    list_display = (
        "verdict", "message", "destination", "sender", "consumer", "sent", "age",
        "seen", "acknowledged",
    )  # fmt: skip
    list_filter = ("verdict", ("acknowledged_at", admin.EmptyFieldListFilter))
    search_fields = ("message_id",)
    search_help_text = "Exact message id or destination"
    ordering = ("-found_at", "id")
    paginator = WholePaginator
    actions = ("acknowledge", "reopen", "replay")
    fields = (
        "verdict", "message", "destination", "sender", "consumer", "sent", "age",
        "seen", "service", "acknowledged",
    )  # fmt: skip

    def has_acknowledge_permission(self, request: HttpRequest) -> bool:
        """Whether the user may acknowledge and reopen findings."""
        return request.user.has_perm("txmsg_spark.acknowledge_finding")

    def has_replay_permission(self, request: HttpRequest) -> bool:
        """Whether the user may request a replay."""
        return request.user.has_perm("txmsg_spark.replay_finding")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the findings, and whether the user may open their messages."""
        opens = Value(sees_messages(request))
        rows: QuerySet[Any] = super().get_queryset(request).annotate(opens=opens)
        return rows

    def found(self, rows: QuerySet[Any], text: str) -> QuerySet[Any]:
        """Search for a complete message id or a complete destination."""
        return find(rows, text, "destination")

    @admin.action(description="Acknowledge…", permissions=["acknowledge"])
    def acknowledge(
        self, request: HttpRequest, chosen: QuerySet[Finding]
    ) -> HttpResponse | None:
        """Ask for a note (first POST), then store it with the selected findings (second
        POST)."""
        findings = chosen.filter(acknowledged_at=None)
        note = given(request, "note")
        shown = self._shown(request, findings) if "note" in request.POST else None
        if shown is not None and not note:
            messages.error(request, "Say why: an acknowledgement needs a note.")
        if shown is None or not note:
            return self._ask(request, findings, "acknowledge")
        count = self._say(
            request, shown, Deed.ACKNOWLEDGE, f"Acknowledged: {note}",
            acknowledged_at=timezone.now(), note=note,
            acknowledged_by=operator(request),
        )  # fmt: skip
        messages.success(request, f"Acknowledged {count:,} findings.")
        return None

    @admin.action(description="Open again", permissions=["acknowledge"])
    def reopen(self, request: HttpRequest, chosen: QuerySet[Finding]) -> None:
        """Remove the acknowledgements of the selected findings."""
        findings = chosen.exclude(acknowledged_at=None)
        count = self._say(
            request, findings, Deed.REOPEN, "Opened again.",
            acknowledged_at=None, acknowledged_by="", note="",
        )  # fmt: skip
        messages.success(request, f"{count:,} findings are open again.")

    @admin.action(description="Replay…", permissions=["replay"])
    def replay(
        self, request: HttpRequest, chosen: QuerySet[Finding]
    ) -> HttpResponse | None:
        """Ask for confirmation, then request a replay of the selected messages.
        `pipeline follow` carries out the request, because this process does not run
        Spark."""
        findings = chosen.filter(acknowledged_at=None, sender__in=conf.get().services)
        shown = None
        if "confirmed" in request.POST:
            shown = self._shown(request, findings)
        if shown is None:
            others = chosen.count() - findings.count()
            # Without a consumer, the relay has given up: a replay sends the message.
            dead = findings.filter(verdict="dead").exclude(consumer="").count()
            return self._ask(request, findings, "replay", others=others, dead=dead)
        using = router.db_for_write(Finding)
        with audited(using):
            found = list(shown.select_for_update().order_by("pk"))
            ids = sorted({str(finding.message_id) for finding in found})
            if not ids:
                messages.warning(request, "No message was selected for a replay.")
                return None
            # A page that is submitted twice makes one request.
            page = f"{request.user.pk}/{request.POST.get('as_of')}/{ids}"
            run, created = PipelineRun.objects.using(using).get_or_create(
                id=uuid.uuid5(uuid.NAMESPACE_OID, page),
                defaults={
                    "job": "replay", "service": conf.get().SERVICE,
                    "state": RunState.REQUESTED,
                    "run_by": operator(request),
                    "options": {
                        "requested_at": clock(using).isoformat(), "message_ids": ids
                    },
                },
            )  # fmt: skip
            for finding in found if created else ():
                said = f"Replay requested: run {run.pk}."
                audit(request, finding, Deed.REPLAY, said)
        text = (
            f"Requested a replay of {len(ids):,} message{'s' * (len(ids) != 1)}. "
            "`pipeline follow` runs it after its next round. If none is running: "
            f"manage.py pipeline replay --request {run.pk}"
        )
        messages.success(request, text)
        return None

    def _shown(
        self, request: HttpRequest, findings: QuerySet[Finding]
    ) -> QuerySet[Finding] | None:
        """Return the findings that the confirmation page showed. If others match now,
        warn the user and return None."""
        if "as_of" not in request.POST:
            return findings
        as_of = read_time(request.POST["as_of"])
        if as_of is not None:
            shown = findings.filter(found_at__lte=as_of)
            if _mark(shown) == request.POST.get("mark"):
                return shown
        text = "Nothing is done yet: what you were shown has changed. Look again."
        messages.warning(request, text)
        return None

    def _ask(
        self,
        request: HttpRequest,
        findings: QuerySet[Finding],
        action: str,
        **context: Any,
    ) -> HttpResponse:
        as_of = clock(router.db_for_write(Finding))
        findings = findings.filter(found_at__lte=as_of)
        count = findings.count()
        title = f"{action.capitalize()} {count:,} finding{'s' * (count != 1)}?"
        context |= {
            "count": count,
            "as_of": as_of.isoformat(),
            "mark": _mark(findings),
            "some": findings[:20],
            "box": ACTION_CHECKBOX_NAME,
            "chosen": request.POST.getlist(ACTION_CHECKBOX_NAME),
            "across": request.POST.get("select_across", "0"),
        }
        return self.show(request, action, title, context)

    def _say(
        self,
        request: HttpRequest,
        findings: QuerySet[Finding],
        deed: Deed,
        text: str,
        **changes: Any,
    ) -> int:
        """Change these findings, and add an audit entry for each. Return the number of
        findings."""
        using = router.db_for_write(Finding)
        with audited(using):
            chosen = list(findings.select_for_update().order_by("pk"))
            for finding in chosen:
                audit(request, finding, deed, text)
            keys = OneOf("pk", [finding.pk for finding in chosen])
            Finding.objects.using(using).filter(keys).update(**changes)
        return len(chosen)

    @admin.display(description="message")
    def message(self, finding: Any) -> SafeString:
        """The message's id, with a link to its page if the user may open the page."""
        shown = self.link if finding.opens else display.short_id
        return shown(finding.message_id)

    sent = display.column("sent", display.ago, "sent_at")

    age = display.column("found", display.ago, "found_at")

    seen = display.column("last seen", display.ago, "seen_at")

    @admin.display(description="acknowledged")
    def acknowledged(self, finding: Finding) -> SafeString:
        """The note, with the user and the time of the acknowledgement."""
        if finding.acknowledged_at is None:
            return display.badge("new")
        return format_html(
            "{}<br><small>{}, {}</small>",
            finding.note, finding.acknowledged_by, display.ago(finding.acknowledged_at),
        )  # fmt: skip


def _mark(findings: QuerySet[Finding]) -> str:
    """Return a text that tells these findings from any others."""
    count = total = 0
    for pk in findings.values_list("pk", flat=True).iterator():
        count, total = count + 1, (total + pk.int) % 2**128
    return f"{count}.{total}"
