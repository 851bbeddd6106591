"""The list of alerts, newest first."""

from __future__ import annotations

from django.contrib import admin

from ..models import Alert
from . import display
from .base import ReadOnlyAdmin


@admin.register(Alert)
class AlertAdmin(ReadOnlyAdmin):
    """The list of alerts. Each row shows the alert's text, and when it began and
    ended."""

    list_display = ("state", "kind", "text", "began", "ended", "service")
    list_display_links = None
    list_filter = ("kind",)
    ordering = ("-id",)

    state = display.column("state", display.badge, "status")

    began = display.column("began", display.ago, "since")

    ended = display.column("ended", display.ago, "ended_at")
