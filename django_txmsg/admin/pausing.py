"""Buttons that pause and resume a stage or a recurring message."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from django.contrib import messages
from django.db import router
from django.db.models import Model
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from ..models.monitoring import Deed
from ..monitoring import pausing
from . import display
from .audit import audit, audited
from .base import ReadOnlyAdmin, given, insist


class PausableAdmin(ReadOnlyAdmin):
    """A list whose rows have buttons to pause and resume, and a field for the
    reason."""

    #: The paused kind of object, in names of addresses and of the permission.
    kind: ClassVar[str]
    #: The same as people read it; and a word to put before a name that is unclear
    #: alone.
    noun: ClassVar[str]
    called: ClassVar[str] = ""
    #: The page's title.
    title: ClassVar[str]
    #: The form's field with the name.
    field: ClassVar[str] = "name"
    #: The consequences of a pause, and of its end.
    follows: ClassVar[str] = ""

    #: Pauses or resumes the one with this name. Returns its row, or None if nothing
    #: changed. Raises LookupError for an unknown name.
    change: Callable[..., Model | None]

    def database(self, name: str) -> str:
        """Return the database that stores whether `name` is paused. May raise
        LookupError for an unknown name."""
        return router.db_for_write(self.model)

    def may_pause(self, request: HttpRequest) -> bool:
        """Return whether the user may use the buttons."""
        return request.user.has_perm(f"django_txmsg.pause_{self.kind}")

    def get_urls(self) -> list[Any]:
        """Add the URLs of the buttons."""
        return [
            self.button(
                f"{verb}/", partial(self.move, paused=paused), f"{self.kind}_{verb}"
            )
            for verb, paused in (("pause", True), ("resume", False))
        ] + super().get_urls()

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show all rows on one page."""
        insist(self.has_view_permission(request))
        context = {
            **self.page_context(request, self.title),
            "may_pause": self.may_pause(request),
            **self.rows(request),
        }
        return render(request, self.change_list_template, context)

    def rows(self, request: HttpRequest) -> dict[str, Any]:
        """Return the template context with the rows."""
        raise NotImplementedError

    def move(self, request: HttpRequest, *, paused: bool) -> HttpResponse:
        """Pause or resume a stage or a recurring message."""
        insist(self.may_pause(request))
        name, why = given(request, self.field), given(request)
        by, verb = request.user.get_username(), "Paused" if paused else "Resumed"
        shown = f"{self.called} {name}".strip()
        try:
            with audited(self.database(name)):
                row = self.change(name, paused=paused, by=by, why=why)
                if row is not None:
                    what = f"{self.noun} {name}"
                    deed = Deed.PAUSE if paused else Deed.RESUME
                    said = pausing.said(what, paused=paused, why=why)
                    audit(request, row, deed, said)
        except LookupError:
            refusal = f"There is no {self.noun} {display.cut(name)!r} here."
            messages.error(request, refusal)
        else:
            if row is None:
                refusal = f"{shown[:1].upper()}{shown[1:]} is {verb.lower()} already."
                messages.warning(request, refusal)
            else:
                messages.success(request, f"{verb} {shown}.{self.follows}")
        return self.led_to_list(request)
