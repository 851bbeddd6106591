"""The navigation bar at the top of every page."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from django.http import HttpRequest
from django.urls import NoReverseMatch

from .. import conf
from ..flows.declaration import declarations
from ..scheduling.timetable import recurring
from . import changes
from .addresses import address

_LISTS = (
    ("outboxmessage", "Outbox"),
    ("inboxmessage", "Inbox"),
    ("deadletter", "Dead letters"),
    ("bulkoperation", "Bulk operations"),
    ("stagestate", "Stages"),
    ("schedule", "Recurring"),
    ("run", "Flows"),
    ("worker", "Workers"),
    ("alert", "Alerts"),
    ("auditentry", "Audit"),
)


@dataclass(frozen=True)
class Page:
    """One entry of the navigation bar. `current` is true for the page that is shown."""

    title: str
    address: str
    current: bool


def pages(request: HttpRequest) -> list[Page]:
    """Return the entries of the navigation bar for this user. A page has an entry if it
    exists on this admin site, is used in this project, and may be seen by the user."""
    may = request.user.has_perm
    first = address(request, "admin:app_list", "django_txmsg")
    used = {
        "schedule": recurring() or may("django_txmsg.make_schedule"),
        "run": declarations(),
        "alert": conf.get().ALERTS.KINDS,
    }
    shown = [
        (title, f"{name}_changelist")
        for name, title in _LISTS
        if may(f"django_txmsg.view_{name}") and used.get(name, True)
    ]
    shown += [("What changed", "changes")] * bool(changes.seen(request))
    found = {"Overview": first}
    for title, name in (*shown, ("May I?", "may")):
        with suppress(NoReverseMatch):  # a site of the project's own may lack it
            found[title] = address(request, f"admin:django_txmsg_{name}")
    # Pages lie below others, and all lie below the overview.
    below = [to for to in found.values() if to != first and request.path.startswith(to)]
    here = max(below, key=len, default=request.path)
    return [Page(title, to, to == here) for title, to in found.items()]
