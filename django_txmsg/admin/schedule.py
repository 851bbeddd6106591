"""What recurs: each with its ticks, and the buttons that pause and resume it."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import path
from django.views.decorators.http import require_POST

from .. import conf
from ..models import Schedule
from ..monitoring import schedule
from . import display
from .addresses import led
from .audit import audit
from .base import ReadOnlyAdmin

_PAGE = "admin:django_txmsg_schedule_changelist"


@admin.register(Schedule)
class ScheduleAdmin(ReadOnlyAdmin):
    """One page for all that recurs, declared here or known from its row."""

    def get_urls(self) -> list[Any]:
        """Add the buttons' addresses."""
        wrap = self.admin_site.admin_view
        return [
            path(
                "pause/",
                wrap(require_POST(self.pause)),
                name="django_txmsg_schedule_pause",
            ),
            path(
                "resume/",
                wrap(require_POST(self.resume)),
                name="django_txmsg_schedule_resume",
            ),
            *super().get_urls(),
        ]

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show when each is due, and whether it may be."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        context = {
            **self.page_context(request, "Recurring messages"),
            "rows": schedule.read(),
            "may_pause": request.user.has_perm("django_txmsg.pause_schedule"),
        }
        return render(request, "admin/django_txmsg/schedule.html", context)

    def pause(self, request: HttpRequest) -> HttpResponse:
        """Store no message at the ticks of one."""
        return self._set(request, paused=True)

    def resume(self, request: HttpRequest) -> HttpResponse:
        """Let one go on with its next tick."""
        return self._set(request, paused=False)

    def _set(self, request: HttpRequest, *, paused: bool) -> HttpResponse:
        if not request.user.has_perm("django_txmsg.pause_schedule"):
            raise PermissionDenied
        name = request.POST.get("name", "")
        why = request.POST.get("why", "").strip()
        using = schedule.database_of(name)
        if using is None:
            said = f"There is no recurring message {display.cut(name)!r} here."
            messages.error(request, said)
            return led(request, _PAGE)
        rows, service = Schedule.objects.db_manager(using), conf.get().SERVICE
        if paused:
            by = request.user.get_username()
            changed = rows.pause(service, name, by=by, why=why)
        else:
            changed = rows.resume(service, name)
        verb = "Paused" if paused else "Resumed"
        if changed:
            because = f": {why}" if why and paused else "."
            row = rows.get(service=service, name=name)
            audit(request, row, f"{verb} recurring message {name}{because}")
            messages.success(request, f"{verb} {name}.")
        else:
            messages.warning(request, f"{name} is {verb.lower()} already.")
        return led(request, _PAGE)
