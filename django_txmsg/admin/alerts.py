"""The list of alerts, newest first."""

from __future__ import annotations

from django.contrib import admin
from django.utils.safestring import SafeString

from ..models import Alert
from . import display
from .base import ReadOnlyAdmin


@admin.register(Alert)
class AlertAdmin(ReadOnlyAdmin):
    """The list of alerts: each with its text, its beginning and its end."""

    list_display = ("state", "kind", "text", "began", "ended", "service")
    list_display_links = None
    list_filter = ("kind",)
    ordering = ("-id",)

    state = display.column("state", display.badge, "status")

    began = display.column("began", display.ago, "since")

    @admin.display(description="ended")
    def ended(self, alert: Alert) -> SafeString | str:
        """When the alert ended."""
        return "-" if alert.ended_at is None else display.ago(alert.ended_at)
