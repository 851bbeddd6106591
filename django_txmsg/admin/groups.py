"""Open dead letters, grouped by error, with operators' notes."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

from django.contrib import messages
from django.db import router
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone

from ..errors import TxmsgError
from ..models import DeadLetter, FailureNote
from ..models.bulk_operation import BulkKind
from ..models.monitoring import Deed
from ..monitoring import dead
from . import display
from .audit import audit, audited
from .base import Pages, given, insist
from .bulk import PERMISSIONS

#: Most groups on a page.
MOST_GROUPS = 200

#: An error is marked as new if its first dead letter is not older.
NEW = dt.timedelta(hours=1)


#: How long a mute may last, by the form's words; any other word: for ever.
MUTES = {
    "1 hour": dt.timedelta(hours=1),
    "8 hours": dt.timedelta(hours=8),
    "1 day": dt.timedelta(days=1),
    "1 week": dt.timedelta(weeks=1),
}


class GroupPages(Pages):
    """The page with groups of dead letters, and the form for an operator's note."""

    def page(self, request: HttpRequest) -> HttpResponse:
        """Show open dead letters grouped by error. By default, the largest groups come
        first."""
        insist(self._admin.has_view_permission(request))
        using = router.db_for_read(DeadLetter)
        latest = request.GET.get("sort") == "latest"
        groups = grouped(using, latest=latest)
        context = {
            **self._admin.page_context(request, "Dead letters"),
            "groups": groups[:MOST_GROUPS],
            "latest": latest,
            "mutes": list(MUTES),
            "more": max(0, len(groups) - MOST_GROUPS),
            "total": sum(group["count"] for group in groups),
            "muted": sum(group["count"] for group in groups if group["muted"]),
            "may": {
                "redeliver": request.user.has_perm(PERMISSIONS[BulkKind.REDELIVER]),
                "discard": request.user.has_perm(PERMISSIONS[BulkKind.DISCARD]),
            },
        }
        return render(request, "admin/django_txmsg/groups.html", context)

    def note(self, request: HttpRequest) -> HttpResponse:
        """Store an operator's note about an error, and mute the error if requested."""
        may_note = request.user.has_perm(PERMISSIONS[BulkKind.REDELIVER])
        insist(may_note and self._admin.has_view_permission(request))
        using = router.db_for_write(FailureNote)
        above = request.POST.get("above", "")[:9]
        try:
            with audited(using):
                note = FailureNote.objects.db_manager(using).keep(
                    given(request, "fingerprint"),
                    note=given(request, "note"),
                    muted=request.POST.get("muted") == "1",
                    duration=MUTES.get(request.POST.get("for", "")),
                    above=int(above) if above.isdecimal() else None,
                    by=request.user.get_username(),
                    seen=request.POST.get("seen"),
                )
                muted = "Muted" if note.muted else "Noted on"
                if note.muted_until:
                    muted += f" until {note.muted_until:%Y-%m-%d %H:%M} UTC"
                if note.muted_above is not None:
                    muted += f" up to {note.muted_above:,} open"
                entry = f"{muted} failures {note.fingerprint}: {note.note}"
                audit(request, note, Deed.NOTE, entry)
        except TxmsgError as error:
            messages.error(request, str(error))
        else:
            messages.success(
                request,
                "The error is muted." if note.muted else "The note is saved.",
            )
        return self._admin.led_to_list(request)


def grouped(using: str, *, latest: bool = False) -> list[dict[str, Any]]:
    """Return groups of open dead letters, one group for each fingerprint. The first
    groups, which a page shows, have an example and the operator's note.

    The largest groups come first. With `latest`, the groups with the newest dead
    letters come first. Muted groups always come last.
    """
    groups: dict[str, dict[str, Any]] = {}
    for one in dead.by_error(using):
        group = groups.setdefault(
            one.fingerprint,
            {
                "fingerprint": one.fingerprint, "count": 0, "places": {},
                "first": one.first, "last": one.last, "example": 0, "deaths": 0,
                "muted": one.muted,
            },
        )  # fmt: skip
        group["count"] += one.count
        group["first"] = min(group["first"], one.first)
        group["last"] = max(group["last"], one.last)
        group["example"] = max(group["example"], one.example)
        group["deaths"] = max(group["deaths"], one.deaths)
        group["places"][one.place] = group["places"].get(one.place, 0) + one.count
    recent = timezone.now() - NEW
    rank: Callable[[dict[str, Any]], float] = (
        (lambda one: one["last"].timestamp()) if latest else (lambda one: one["count"])
    )
    ordered = sorted(groups.values(), key=lambda one: (one["muted"], -rank(one)))
    shown = ordered[:MOST_GROUPS]
    notes = {
        note.fingerprint: note
        for note in FailureNote.objects.using(using).filter(
            fingerprint__in=[group["fingerprint"] for group in shown]
        )
    }
    letters: Any = DeadLetter.objects.using(using).defer("body")
    examples = letters.in_bulk([group["example"] for group in shown])
    for group in shown:
        group["new"] = group["first"] > recent
        group["note"] = notes.get(group["fingerprint"])
        letter = group["letter"] = examples.get(group["example"])
        group["task"] = display.task(letter) if letter else ""
        group["error"] = (letter.exception or letter.reason) if letter else ""
    return ordered
