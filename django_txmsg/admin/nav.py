"""The navigation bar at the top of every page."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

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
    """Return the entries for this user: the pages that exist on this admin site, that
    are used in this project, and that the user may see."""
    first = address(request, "admin:app_list", "django_txmsg")
    found = [Page("Overview", first, request.path == first)]
    makes = request.user.has_perm("django_txmsg.make_schedule")
    used = {
        "schedule": recurring() or makes,
        "run": declarations(),
        "alert": conf.get().ALERTS.KINDS,
    }
    for name, title in _LISTS:
        sees = request.user.has_perm(f"django_txmsg.view_{name}")
        if not sees or not used.get(name, True):
            continue
        try:
            to = address(request, f"admin:django_txmsg_{name}_changelist")
        except NoReverseMatch:
            continue  # a site of the project's own need not have them all
        found.append(Page(title, to, request.path.startswith(to)))
    for name, title in (("changes", "What changed"), ("may", "May I?")):
        if name == "changes" and not changes.seen(request):
            continue
        with suppress(NoReverseMatch):
            to = address(request, f"admin:django_txmsg_{name}")
            if request.path == to:  # below the list of the audit
                found = [replace(one, current=False) for one in found]
            found.append(Page(title, to, request.path == to))
    return found
