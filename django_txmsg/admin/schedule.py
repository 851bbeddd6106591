"""The page of recurring messages, with buttons to pause, resume, make and remove
them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib import admin, messages
from django.db import router
from django.http import HttpRequest, HttpResponse

from .. import conf
from ..envelope import serializers
from ..errors import ConfigurationError, TxmsgError
from ..models import Schedule
from ..models.monitoring import Deed
from ..monitoring import pausing, schedule
from ..scheduling import made
from .audit import audit, audited
from .base import given, insist
from .pausing import PausableAdmin


@admin.register(Schedule)
class ScheduleAdmin(PausableAdmin):
    """The page of recurring messages: those declared in this process, and those that
    exist only in the database."""

    kind, noun = "schedule", "recurring message"
    title = "Recurring messages"
    change_list_template = "admin/django_txmsg/schedule.html"
    change = staticmethod(pausing.set_recurring)
    database = staticmethod(schedule.database_of)

    def rows(self, request: HttpRequest) -> dict[str, Any]:
        """Return the recurring messages, and whether the user may make new ones."""
        return {"rows": schedule.read(), "may_make": self._may_make(request)}

    def get_urls(self) -> list[Any]:
        """Add the URLs that make and remove a recurring message."""
        return [
            self.button("make/", self.make, "schedule_make"),
            self.button("remove/", self.remove, "schedule_remove"),
            *super().get_urls(),
        ]

    def make(self, request: HttpRequest) -> HttpResponse:
        """Make a recurring message from the form's values."""
        name, expression, destination, body, tz = (
            given(request, field)
            for field in ("name", "expression", "destination", "body", "tz")
        )

        def change() -> None:
            value = serializers.loads(body or "null")
            made.make_recurring(name, expression, destination, value, tz=tz or None)

        said = made.said(name, expression, destination)
        return self._change(request, name, Deed.MAKE, said, change)

    def remove(self, request: HttpRequest) -> HttpResponse:
        """Remove a recurring message that was made at run time."""
        name = given(request, "name")

        def change() -> None:
            if not made.remove_recurring(name):
                raise ConfigurationError(f"{name!r} was not made here.")

        said = f"Removed recurring message {name}."
        return self._change(request, name, Deed.REMOVE, said, change)

    def _change(
        self,
        request: HttpRequest,
        name: str,
        deed: Deed,
        said: str,
        change: Callable[[], None],
    ) -> HttpResponse:
        insist(self._may_make(request))
        using = router.db_for_write(Schedule)
        rows = Schedule.objects.using(using).filter(
            service=conf.get().SERVICE, name=name
        )
        try:
            with audited(using):
                before = rows.first()
                change()
                row = rows.first() or before or Schedule(name=name)
                audit(request, row, deed, said)
            messages.success(request, said)
        except (TxmsgError, ValueError) as error:
            messages.error(request, f"Nothing was changed: {error}")
        return self.led_to_list(request)

    @staticmethod
    def _may_make(request: HttpRequest) -> bool:
        return bool(request.user.has_perm("django_txmsg.make_schedule"))
