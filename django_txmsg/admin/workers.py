"""The list of worker processes, and a page of the messages in progress."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.utils.html import format_html_join
from django.utils.safestring import SafeString

from ..models import Worker
from ..monitoring import running, status
from . import display
from .base import ReadOnlyAdmin, insist


@admin.register(Worker)
class WorkerAdmin(ReadOnlyAdmin):
    """The list of worker processes. A process deletes its row when it stops
    normally."""

    list_display = (
        "state", "kind", "service", "version", "host", "pid", "consumes", "in_flight",
        "heartbeat", "started",
    )  # fmt: skip
    change_list_template = "admin/django_txmsg/workers.html"
    list_filter = ("kind",)
    list_display_links = None
    ordering = ("kind", "host", "pid")

    def get_urls(self) -> list[Any]:
        """Add the URL of the page "Running now"."""
        return [self.at("running/", self.running, "running"), *super().get_urls()]

    def running(self, request: HttpRequest) -> HttpResponse:
        """Show the messages that handlers are processing, the number of claimed
        messages, and the stages that no worker runs."""
        insist(self.has_view_permission(request))
        picture = status.read()
        present = picture.attendance
        found = [
            *(
                (name, "sending", one.waiting)
                for name, one in picture.destinations.items()
            ),
            *(
                (name, "redelivery", one.waiting)
                for name, one in picture.stages.items()
            ),
            *((name, "delivery", one) for name, one in picture.queues.items()),
        ]
        context = {
            **self.page_context(request, "Running now"),
            "now": picture.now,
            "live": "live" in request.GET,
            "unattended": picture.unattended,
            "running": running.read([*present.living, *present.lost]),
            "living": {worker.pk for worker in present.living},
            "claimed": [
                (name, what, one.in_flight)
                for name, what, one in found
                if one.in_flight
            ],
        }
        return render(request, "admin/django_txmsg/running.html", context)

    @admin.display(description="state")
    def state(self, worker: Worker) -> SafeString:
        """The worker's state. The state is "silent" if the last heartbeat is too old,
        and otherwise "alive"."""
        return display.badge("alive" if worker.lives(timezone.now()) else "silent")

    @admin.display(description="stages")
    def consumes(self, worker: Worker) -> SafeString | str:
        """The stages that the process consumes."""
        if not worker.stages:
            return "-"
        names = ((name,) for name in worker.stages)
        return format_html_join(", ", "<code>{}</code>", names)

    heartbeat = display.column("heartbeat", display.ago, "heartbeat_at")

    started = display.column("running for", display.age, "started_at")
