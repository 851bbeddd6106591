"""The stages: how each does, and the buttons that pause and resume it."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db import router
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import path
from django.views.decorators.http import require_POST

from ..models import DeadLetter, InboxMessage, StageState, Worker
from ..models.dead_letter import Resolution
from ..monitoring import status
from ..stages import all_stages
from . import contract, display
from .addresses import led
from .audit import audit
from .base import ReadOnlyAdmin
from .inbox import attempts_allowed


@admin.register(StageState)
class StageAdmin(ReadOnlyAdmin):
    """One page for all stages, declared here or known from what they left behind."""

    def get_urls(self) -> list[Any]:
        """Add the buttons' addresses."""
        wrap = self.admin_site.admin_view
        return [
            path(
                "pause/",
                wrap(require_POST(self.pause)),
                name="django_txmsg_stage_pause",
            ),
            path(
                "resume/",
                wrap(require_POST(self.resume)),
                name="django_txmsg_stage_resume",
            ),
            path("contract/", wrap(self.contract), name="django_txmsg_contract"),
            *super().get_urls(),
        ]

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show all stages: their waiting and dead messages, and their times."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        picture = status.read(router.db_for_write(StageState))
        declared = {one.name: one for one in all_stages()}
        context = {
            **self.page_context(request, "Stages"),
            "now": picture.now,
            "dead_capped": picture.dead_capped,
            "rows": [
                (
                    place,
                    declared.get(place.name),
                    attempts_allowed().get(place.name),
                    place.workers,
                )
                for _, place in sorted(picture.stages.items())
            ],
            "may_pause": request.user.has_perm("django_txmsg.pause_stage"),
        }
        return render(request, "admin/django_txmsg/stages.html", context)

    def contract(self, request: HttpRequest) -> HttpResponse:
        """Show what this service sends and takes."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        return contract.show(request, self.page_context(request, "Contract"))

    def pause(self, request: HttpRequest) -> HttpResponse:
        """Hold a stage: its consumers finish what they have and take nothing new."""
        return self._set(request, paused=True)

    def resume(self, request: HttpRequest) -> HttpResponse:
        """Let a stage go on."""
        return self._set(request, paused=False)

    def _set(self, request: HttpRequest, *, paused: bool) -> HttpResponse:
        if not request.user.has_perm("django_txmsg.pause_stage"):
            raise PermissionDenied
        name = request.POST.get("stage", "")
        why = request.POST.get("why", "").strip()
        using = router.db_for_write(StageState)
        states = StageState.objects.db_manager(using)
        if paused and not is_known(name, using):
            messages.error(request, f"There is no stage {display.cut(name)!r} here.")
            return led(request, "admin:django_txmsg_stagestate_changelist")
        if paused:
            changed = states.pause(name, by=request.user.get_username(), why=why)
        else:
            changed = states.resume(name)
        verb = "Paused" if paused else "Resumed"
        if changed:
            because = f": {why}" if why and paused else "."
            audit(request, states.get(stage=name), f"{verb} stage {name}{because}")
            messages.success(
                request, f"{verb} stage {name}. Its consumers obey within two seconds."
            )
        else:
            messages.warning(request, f"Stage {name} is {verb.lower()} already.")
        return led(request, "admin:django_txmsg_stagestate_changelist")


def is_known(name: str, using: str) -> bool:
    """Return whether a stage is declared here, is consumed by a process elsewhere, or
    has left something behind."""
    consumed = Worker.objects.using(using).values_list("stages", flat=True)
    return bool(name) and (
        any(one.name == name for one in all_stages())
        or any(name in stages for stages in consumed)
        or InboxMessage.objects.using(using).filter(stage=name).exists()
        or DeadLetter.objects.using(using)
        .filter(stage=name, resolution=Resolution.OPEN)
        .exists()
    )
