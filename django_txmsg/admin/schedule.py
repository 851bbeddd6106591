"""Recurring messages: each with its ticks, and the buttons that pause and resume it."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import Model
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from .. import conf
from ..models import Schedule
from ..monitoring import schedule
from .pausing import PausableAdmin


@admin.register(Schedule)
class ScheduleAdmin(PausableAdmin):
    """One page for all recurring messages, declared here or known from their rows."""

    kind, noun = "schedule", "recurring message"

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show when each is due, and whether it is paused."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        context = {
            **self.page_context(request, "Recurring messages"),
            "rows": schedule.read(),
            "may_pause": self.may_pause(request),
        }
        return render(request, "admin/django_txmsg/schedule.html", context)

    def database(self, name: str) -> str:
        """Return the database that its messages are stored in."""
        using = schedule.database_of(name)
        if using is None:
            raise LookupError(name)
        return using

    def change(self, name: str, *, paused: bool, by: str, why: str) -> Model | None:
        """Pause a recurring message, or let it continue with its next tick."""
        using, service = self.database(name), conf.get().SERVICE
        rows = Schedule.objects.db_manager(using)
        changed = (
            rows.pause(service, name, by=by, why=why)
            if paused
            else rows.resume(service, name)
        )
        return rows.get(service=service, name=name) if changed else None
