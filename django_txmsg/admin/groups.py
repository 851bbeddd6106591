"""Open dead letters by error, most first, with what colleagues found out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db import router
from django.db.models import Count, Max, Min
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse

from ..models import DeadLetter, FailureNote
from ..models.dead_letters import Resolution
from .base import audit

if TYPE_CHECKING:
    from .dead_letters import DeadLetterAdmin

#: The most groups on a page, largest first.
MOST_GROUPS = 200


class GroupPages:
    """The page of groups, and the note on one."""

    def __init__(self, admin: DeadLetterAdmin) -> None:
        self._admin = admin

    def page(self, request: HttpRequest) -> HttpResponse:
        """Show open dead letters by their error, most first."""
        if not self._admin.has_view_permission(request):
            raise PermissionDenied
        using = router.db_for_read(DeadLetter)
        groups = grouped(using)
        context = {
            **self._admin.page_context(request, "Dead letters"),
            "groups": groups[:MOST_GROUPS],
            "more": max(0, len(groups) - MOST_GROUPS),
            "total": sum(group["count"] for group in groups),
            "may": {
                "redeliver": self._admin.has_redeliver_permission(request),
                "discard": self._admin.has_discard_permission(request),
            },
        }
        return render(request, "admin/django_txmsg/groups.html", context)

    def note(self, request: HttpRequest) -> HttpResponse:
        """Keep what an operator found out about an error."""
        if not self._admin.has_redeliver_permission(request):
            raise PermissionDenied
        fingerprint = request.POST.get("fingerprint", "")[:64]
        notes = FailureNote.objects.using(router.db_for_write(FailureNote))
        note, _ = notes.update_or_create(
            fingerprint=fingerprint,
            defaults={
                "note": request.POST.get("note", "").strip()[:2000],
                "noted_by": request.user.get_username()[:255],
            },
        )
        audit(request, note, f"Noted on failures {fingerprint}: {note.note}")
        messages.success(request, "The note is kept.")
        return HttpResponseRedirect(reverse("admin:django_txmsg_deadletter_changelist"))


def grouped(using: str) -> list[dict[str, Any]]:
    """Return the open dead letters by fingerprint, with an example and the note."""
    open_letters = DeadLetter.objects.using(using).filter(resolution=Resolution.OPEN)
    groups: dict[str, dict[str, Any]] = {}
    rows: Any = open_letters.values("fingerprint", "stage", "destination").annotate(
        count=Count("pk"), first=Min("created_at"), last=Max("created_at"),
        example=Max("pk"), deaths=Max("deaths"),
    )  # fmt: skip
    for row in rows.order_by():
        group = groups.setdefault(
            row["fingerprint"],
            {**row, "count": 0, "places": {}},
        )
        group["count"] += row["count"]
        group["first"] = min(group["first"], row["first"])
        group["last"] = max(group["last"], row["last"])
        group["example"] = max(group["example"], row["example"])
        group["deaths"] = max(group["deaths"], row["deaths"])
        place = row["stage"] or f"relay to {row['destination']}"
        group["places"][place] = group["places"].get(place, 0) + row["count"]
    ordered = sorted(groups.values(), key=lambda one: -one["count"])
    examples = DeadLetter.objects.using(using).in_bulk(
        [group["example"] for group in ordered[:MOST_GROUPS]]
    )
    notes = {
        note.fingerprint: note
        for note in FailureNote.objects.using(using).filter(
            fingerprint__in=[group["fingerprint"] for group in ordered[:MOST_GROUPS]]
        )
    }
    for group in ordered[:MOST_GROUPS]:
        letter = examples.get(group["example"])
        group["letter"] = letter
        group["error"] = (letter.exception or letter.reason) if letter else ""
        group["note"] = notes.get(group["fingerprint"])
    return ordered
