"""Recurring messages: each with its ticks, and the buttons that pause and resume it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db import router
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import path
from django.views.decorators.http import require_POST

from .. import conf
from ..errors import ConfigurationError, TxmsgError
from ..models import Schedule
from ..monitoring import pausing, schedule
from ..scheduling import made
from .addresses import led
from .audit import audit, audited
from .base import plain
from .pausing import PausableAdmin


@admin.register(Schedule)
class ScheduleAdmin(PausableAdmin):
    """One page for all recurring messages, declared here or known from their rows."""

    kind, noun = "schedule", "recurring message"
    change = staticmethod(pausing.set_recurring)
    database = staticmethod(pausing.database_of_recurring)

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
            "may_make": self._may_make(request),
        }
        return render(request, "admin/django_txmsg/schedule.html", context)

    def get_urls(self) -> list[Any]:
        """Add the addresses at which a recurring message is made and removed."""
        return [
            path(
                f"{verb}/",
                self.admin_site.admin_view(require_POST(view)),
                name=f"django_txmsg_schedule_{verb}",
            )
            for verb, view in (("make", self.make), ("remove", self.remove))
        ] + super().get_urls()

    def make(self, request: HttpRequest) -> HttpResponse:
        """Let a message recur from now on."""
        name, expression, destination, body, tz = (
            plain(request.POST.get(field, "")).strip()
            for field in ("name", "expression", "destination", "body", "tz")
        )

        def change() -> None:
            given = json.loads(body or "null")
            made.make_recurring(name, expression, destination, given, tz=tz or None)

        said = made.said(name, expression, destination)
        return self._change(request, name, said, change)

    def remove(self, request: HttpRequest) -> HttpResponse:
        """Remove a message that was made at run time."""
        name = plain(request.POST.get("name", ""))

        def change() -> None:
            if not made.remove_recurring(name):
                raise ConfigurationError(f"{name!r} was not made here.")

        return self._change(request, name, f"Removed recurring message {name}.", change)

    def _change(
        self, request: HttpRequest, name: str, said: str, change: Callable[[], None]
    ) -> HttpResponse:
        if not self._may_make(request):
            raise PermissionDenied
        using = router.db_for_write(Schedule)
        rows = Schedule.objects.using(using).filter(
            service=conf.get().SERVICE, name=name
        )
        try:
            with audited(using):
                before = rows.first()
                change()
                audit(request, rows.first() or before or Schedule(name=name), said)
            messages.success(request, said)
        except (TxmsgError, ValueError) as error:
            messages.error(request, f"Nothing was changed: {error}")
        return led(request, "admin:django_txmsg_schedule_changelist")

    @staticmethod
    def _may_make(request: HttpRequest) -> bool:
        return bool(request.user.has_perm("django_txmsg.make_schedule"))
