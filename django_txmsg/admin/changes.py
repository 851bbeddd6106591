"""The page "What changed": versions, operators' actions and new errors on one time
line."""

from __future__ import annotations

from django.db import DatabaseError, InterfaceError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone

from .. import conf
from ..monitoring import changes, databases
from .base import ReadOnlyAdmin, insist

#: The title of each kind, its colour, and the permission to see it.
_LANES = {
    changes.VERSION: ("Versions", "busy", "django_txmsg.view_worker"),
    changes.ACTION: ("Actions", "warn", "django_txmsg.view_auditentry"),
    changes.ERROR: ("New errors", "bad", "django_txmsg.view_deadletter"),
}

#: The width of the time line, in units of the drawing.
WIDTH = 960


def seen(request: HttpRequest) -> list[str]:
    """Return the kinds of changes that the user may see."""
    return [kind for kind, lane in _LANES.items() if request.user.has_perm(lane[2])]


def show(admin: ReadOnlyAdmin, request: HttpRequest) -> HttpResponse:
    """Show the page, with the changes in every database in use."""
    kinds = seen(request)
    insist(bool(kinds))
    found: list[changes.Change] = []
    unreadable, used = [], databases.with_tables()
    for using in used:
        try:
            found += changes.read(using, kinds)
        except (DatabaseError, InterfaceError):
            unreadable.append(using)
    found.sort(key=lambda one: one.at, reverse=True)
    changes.explain(found)
    context = {
        **admin.page_context(request, "What changed"),
        "changes": [(one, _LANES[one.kind][1]) for one in found],
        "lanes": [
            (title, tone, [(_left(one), one) for one in found if one.kind == kind])
            for kind, (title, tone, _) in _LANES.items()
            if kind in kinds
        ],
        "width": WIDTH,
        "unreadable": unreadable,
        "several": len(used) > 1,
        "most": changes.MOST,
        "unversioned": changes.VERSION in kinds and not conf.get().VERSION,
    }
    return render(request, "admin/django_txmsg/changes.html", context)


def _left(change: changes.Change) -> int:
    """Return the horizontal position of a change on the time line."""
    age = (timezone.now() - change.at) / changes.DAY
    return round((WIDTH - 4) * min(max(1 - age, 0.0), 1.0))
