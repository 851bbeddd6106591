"""The list of processes that relay and consume, with their heartbeats."""

from __future__ import annotations

from django.contrib import admin
from django.utils import timezone
from django.utils.html import format_html_join
from django.utils.safestring import SafeString

from ..models import Worker
from . import display
from .base import ReadOnlyAdmin


@admin.register(Worker)
class WorkerAdmin(ReadOnlyAdmin):
    """The running processes. A process that stopped in an orderly way is not listed."""

    list_display = (
        "state", "kind", "service", "version", "host", "pid", "consumes", "in_flight",
        "heartbeat", "started",
    )  # fmt: skip
    change_list_template = "admin/django_txmsg/workers.html"
    list_filter = ("kind",)
    list_display_links = None
    ordering = ("kind", "host", "pid")

    @admin.display(description="state")
    def state(self, worker: Worker) -> SafeString:
        """Alive, or silent for too long."""
        return display.badge("alive" if worker.lives(timezone.now()) else "silent")

    @admin.display(description="stages")
    def consumes(self, worker: Worker) -> SafeString | str:
        """The stages that the process consumes."""
        if not worker.stages:
            return "-"
        names = ((name,) for name in worker.stages)
        return format_html_join(", ", "<code>{}</code>", names)

    @admin.display(description="heartbeat")
    def heartbeat(self, worker: Worker) -> SafeString:
        """Its last heartbeat."""
        return display.ago(worker.heartbeat_at)

    @admin.display(description="running for")
    def started(self, worker: Worker) -> SafeString:
        """How long it has been running."""
        return display.age(worker.started_at)
