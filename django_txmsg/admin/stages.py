"""The stages: their state, and the buttons that pause and resume them."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db import router
from django.db.models import Model
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import path

from ..models import StageState
from ..monitoring import status
from ..monitoring.known_stages import is_known
from ..stages import all_stages
from . import contract
from .inbox import attempts_allowed
from .pausing import PausableAdmin


@admin.register(StageState)
class StageAdmin(PausableAdmin):
    """One page for all stages, declared here or known from their rows."""

    kind, noun, called, field = "stage", "stage", "stage", "stage"
    follows = " Its consumers obey within two seconds."

    def get_urls(self) -> list[Any]:
        """Add the contract's address."""
        wrap = self.admin_site.admin_view
        return [
            path("contract/", wrap(self.contract), name="django_txmsg_contract"),
            *super().get_urls(),
        ]

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show all stages: their waiting and dead messages, and their times."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        picture = status.read()
        declared = {one.name: one for one in all_stages()}
        context = {
            **self.page_context(request, "Stages"),
            "now": picture.now,
            "rows": [
                (
                    place,
                    declared.get(place.name),
                    attempts_allowed().get(place.name),
                    place.workers,
                )
                for _, place in sorted(picture.stages.items())
            ],
            "may_pause": self.may_pause(request),
        }
        return render(request, "admin/django_txmsg/stages.html", context)

    def contract(self, request: HttpRequest) -> HttpResponse:
        """Show what this service sends and receives."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        return contract.show(request, self.page_context(request, "Contract"))

    def change(self, name: str, *, paused: bool, by: str, why: str) -> Model | None:
        """Pause a stage, or resume it: its consumers finish messages in progress and
        take no new ones."""
        using = router.db_for_write(StageState)
        states = StageState.objects.db_manager(using)
        if paused and not is_known(name, using):
            raise LookupError(name)
        changed = states.pause(name, by=by, why=why) if paused else states.resume(name)
        return states.get(stage=name) if changed else None
