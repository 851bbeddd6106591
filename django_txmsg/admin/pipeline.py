"""Lists of pipeline runs, archive positions, and the alerts of `pipeline follow`."""

from __future__ import annotations

import datetime as dt

from django.contrib import admin
from django.utils import timezone

from ..spark.models import ArchiveMark, PipelineAlert, PipelineRun, RunState
from . import display
from .base import ReadOnlyAdmin
from .counting import WholePaginator


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
