"""The lists of alerts, worker processes and idempotency keys. Their rows have no pages
of their own. This module also has the page "Running now", which shows the messages in
progress."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.contrib import admin, messages
from django.db import router
from django.db.models import QuerySet
from django.db.models.functions import Length, Now
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html_join
from django.utils.safestring import SafeString

from ..models import Alert, IdempotencyKey, Worker
from ..models.fields import clock
from ..models.monitoring import Deed
from ..monitoring import attendance
from ..monitoring.alerting import said_unwatched
from ..stages import all_stages
from . import display
from .audit import audit, audited
from .base import ReadOnlyAdmin, insist
from .filters import BetweenFilter


@admin.register(Alert)
class AlertAdmin(ReadOnlyAdmin):
    """The list of alerts. Each row shows the alert's text, and when it began and
    ended."""

    list_display = ("state", "kind", "text", "began", "ended", "service")
    list_display_links = None
    list_filter = ("kind",)

    state = display.column("state", display.badge, "status")

    began = display.column("began", display.ago, "since")

    ended = display.column("ended", display.ago, "ended_at")

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the list. If no relay watches the open alerts, say so."""
        unwatched = said_unwatched(router.db_for_write(Alert))
        if unwatched and self.has_view_permission(request):
            messages.warning(request, unwatched)
        return super().changelist_view(request, extra_context)


@admin.register(Worker)
class WorkerAdmin(ReadOnlyAdmin):
    """The list of worker processes. A process deletes its row when it stops
    normally."""

    list_display = (
        "state", "kind", "service", "version", "host", "process", "consumes",
        "in_flight", "heartbeat", "started",
    )  # fmt: skip
    change_list_template = "admin/django_txmsg/workers.html"
    list_filter = ("kind",)
    list_display_links = None
    ordering = ("kind", "host", "pid")

    def get_urls(self) -> list[Any]:
        """Add the URL of the page "Running now"."""
        return [self.at("running/", self.running, "running"), *super().get_urls()]

    def running(self, request: HttpRequest) -> HttpResponse:
        """Show the messages that handlers are processing, and the stages that no worker
        runs."""
        insist(self.has_view_permission(request))
        using = router.db_for_write(Worker)
        now = clock(using)
        present = attendance.read(using, now)
        context = {
            "now": now,
            "live": "live" in request.GET,
            "unattended": present.unattended([one.name for one in all_stages()]),
            "running": present.running,
            "living": {worker.pk for worker in present.living},
        }
        return self.show(request, "running", "Running now", context)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Worker]:
        """Return the workers, each with the database's current time."""
        rows: QuerySet[Worker] = super().get_queryset(request)
        return rows.annotate(now=Now())

    # Silent: its last heartbeat is too old.
    state = display.column(
        "state", lambda one: display.badge("alive" if one.lives(one.now) else "silent")
    )

    # Text: Django would separate the thousands.
    process = display.column("pid", str, "pid")

    @admin.display(description="stages")
    def consumes(self, worker: Worker) -> SafeString | str:
        """The stages that the process consumes."""
        if not worker.stages:
            return "-"
        names = ((name,) for name in worker.stages)
        return format_html_join(", ", "<code>{}</code>", names)

    heartbeat = display.column(
        "heartbeat", lambda one: display.ago(one.heartbeat_at, one.now)
    )

    started = display.column(
        "running for", lambda one: display.age(one.started_at, one.now)
    )


@admin.register(IdempotencyKey)
class IdempotencyAdmin(ReadOnlyAdmin):
    """The list of idempotency keys and their callers. The list does not show the stored
    responses, because they belong to the callers. If a client repeats a request after
    an operator has deleted the request's key, the request is executed again."""

    list_display = ("shown", "who", "status_code", "size", "age")
    list_filter = (BetweenFilter,)
    list_display_links = None
    search_fields = ("key",)
    search_help_text = "Exact key"
    actions = ()
    deletes = True

    def get_queryset(self, request: HttpRequest) -> QuerySet[IdempotencyKey]:
        """Return all keys, but do not load their stored responses."""
        rows: QuerySet[IdempotencyKey] = super().get_queryset(request)
        return rows.defer("body", "headers").annotate(length=Length("body"))

    def found(self, rows: QuerySet[Any], text: str) -> QuerySet[Any]:
        """Search for one complete key."""
        return rows.filter(key=text)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return True if the user may see the list. Return False for a single row,
        because a row's page would show the response."""
        return obj is None and super().has_view_permission(request)

    def delete_model(self, request: HttpRequest, obj: IdempotencyKey) -> None:
        """Delete a key, and record this in the audit."""
        with audited(router.db_for_write(IdempotencyKey)):
            text = f"Deleted idempotency key {obj.key} of {obj.caller}."
            audit(request, obj, Deed.DELETE, text)
            obj.delete()

    def delete_queryset(
        self, request: HttpRequest, queryset: QuerySet[IdempotencyKey]
    ) -> None:
        """Delete the selected keys, and record each of them in the audit."""
        with audited(router.db_for_write(IdempotencyKey)):
            for row in queryset:
                self.delete_model(request, row)

    shown = display.column("key", partial(display.mono_cut, most=60), "key")

    # The stored digest of the caller.
    who = display.column("caller", partial(display.mono_cut, most=24), "caller")

    size = display.column("response", display.amount, "length")

    age = display.column("age", display.age, "created_at")
