"""The list of idempotency keys. Users can delete keys here."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db import router
from django.db.models import QuerySet
from django.db.models.functions import Length
from django.http import HttpRequest
from django.utils.safestring import SafeString

from ..models import IdempotencyKey
from ..models.monitoring import Deed
from . import display
from .audit import audit, audited
from .base import ReadOnlyAdmin
from .filters import AgeFilter


@admin.register(IdempotencyKey)
class IdempotencyAdmin(ReadOnlyAdmin):
    """Idempotency keys and their callers. The stored responses are not shown, because
    they belong to the callers. After a key is deleted, the same request is executed
    again."""

    list_display = ("shown", "who", "status_code", "size", "age")
    list_filter = (AgeFilter,)
    list_display_links = None
    search_fields = ("key",)
    search_help_text = "Exact key"
    ordering = ("-id",)
    actions = ()
    deletes = True

    def get_queryset(self, request: HttpRequest) -> QuerySet[IdempotencyKey]:
        """Return the keys without the stored responses."""
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

    @admin.display(description="key")
    def shown(self, row: IdempotencyKey) -> SafeString:
        """The key."""
        return display.mono(display.cut(row.key, 60), row.key)

    @admin.display(description="caller")
    def who(self, row: IdempotencyKey) -> SafeString:
        """The stored digest of the caller."""
        return display.mono(display.cut(row.caller, 24), row.caller)

    size = display.column("response", display.size, "length")

    age = display.column("age", display.age, "created_at")
