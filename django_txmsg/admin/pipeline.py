"""Runs of the data pipeline, the archive's positions, and what `follow` measures."""

from __future__ import annotations

import datetime as dt
import json

from django.contrib import admin
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString

from ..spark.models import ArchiveMark, PipelineAlert, PipelineRun, RunState
from . import display
from .base import ReadOnlyAdmin


@admin.register(PipelineRun)
class PipelineRunAdmin(ReadOnlyAdmin):
    """The runs: who ran which job, when, with which options, and with which result."""

    list_display = ("job", "outcome", "service", "row_count", "took", "begun", "run_by")
    list_filter = ("job", "state")
    ordering = ("-started_at",)
    fields = (
        "job", "outcome", "service", "run_by", "lake", "row_count", "took", "begun",
        "chosen", "counted", "error",
    )  # fmt: skip
    readonly_fields = fields

    @admin.display(description="outcome")
    def outcome(self, run: PipelineRun) -> str:
        """How the run ended. A killed run cannot record its end, so its lock is
        checked."""
        return "interrupted" if run.interrupted else run.get_state_display()

    @admin.display(description="rows")
    def row_count(self, run: PipelineRun) -> str:
        """The number of rows that the run moved, judged or stored."""
        return f"{run.rows:,}"

    @admin.display(description="took")
    def took(self, run: PipelineRun) -> str:
        """How long the run took, or has taken so far. Unknown for a run that was
        killed, or has not begun."""
        if run.interrupted or run.state == RunState.REQUESTED:
            return "-"
        spent = (run.finished_at or timezone.now()) - run.started_at
        return str(dt.timedelta(seconds=round(spent.total_seconds())))

    @admin.display(description="started")
    def begun(self, run: PipelineRun) -> SafeString:
        """When it began."""
        return display.ago(run.started_at)

    @admin.display(description="options")
    def chosen(self, run: PipelineRun) -> SafeString:
        """The options of the run."""
        return format_html("<pre>{}</pre>", json.dumps(run.options, indent=2))

    @admin.display(description="counts")
    def counted(self, run: PipelineRun) -> SafeString:
        """The counts of the run."""
        return format_html("<pre>{}</pre>", json.dumps(run.counts, indent=2))


@admin.register(ArchiveMark)
class ArchiveMarkAdmin(ReadOnlyAdmin):
    """The archive's position, by table and lake."""

    list_display = ("source", "lake", "purged_through", "row_count", "changed")
    list_filter = ("source",)
    ordering = ("source", "id")
    fields = (
        "source", "lake", "lake_id", "purged_through", "begun_through", "row_count",
        "changed",
    )  # fmt: skip
    readonly_fields = fields

    @admin.display(description="rows")
    def row_count(self, mark: ArchiveMark) -> str:
        """The number of rows that were moved from the database to this lake."""
        return f"{mark.rows:,}"

    @admin.display(description="moved")
    def changed(self, mark: ArchiveMark) -> SafeString:
        """When the position last advanced."""
        return display.ago(mark.changed_at)


@admin.register(PipelineAlert)
class PipelineAlertAdmin(ReadOnlyAdmin):
    """The last measurements of `pipeline follow`."""

    list_display = ("name", "service", "firing", "summary", "began", "measured")
    list_filter = ("firing",)
    ordering = ("-firing", "service", "name")
    fields = (
        "name", "service", "firing", "value", "bound", "summary", "began", "measured",
        "told",
    )  # fmt: skip
    readonly_fields = fields

    @admin.display(description="began to fire")
    def began(self, alert: PipelineAlert) -> SafeString | str:
        """When it last began to fire."""
        if alert.since is None:
            return "-"
        return display.ago(alert.since)

    @admin.display(description="measured")
    def measured(self, alert: PipelineAlert) -> SafeString:
        """When it was last measured."""
        return display.ago(alert.checked_at)
