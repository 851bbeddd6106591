"""The page "What changed": versions, operators' actions and new errors on one time
line."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from django.db import DatabaseError, InterfaceError, connections
from django.http import HttpRequest, HttpResponse
from django.utils import timezone

from .. import conf
from ..models import AuditEntry
from ..models.fields import clock, query, read_instant, sql_of
from ..models.monitoring import Deed
from ..monitoring import databases, dead
from ..monitoring.lengths import duration
from ..monitoring.waiting import places_sql, read_array
from ..rules import Rule
from .base import ReadOnlyAdmin, insist

#: How far back the changes go, and most changes of a kind in one database, the newest.
DAY, MOST = dt.timedelta(days=1), 100

#: An error that began so soon after a version names that version.
SOON = dt.timedelta(hours=1)

#: The kinds of changes: versions of the code, actions of operators, errors.
VERSION, ACTION, ERROR = "version", "action", "error"

#: Actions that change nothing for other messages.
_ASIDE = (
    Deed.COPY, Deed.CANCEL, Deed.RESCHEDULE, Deed.STOP, Deed.RUN, Deed.ACKNOWLEDGE,
    Deed.REOPEN, Deed.EXPORT, Deed.DELETE,
)  # fmt: skip

#: The title of each kind, its colour, and the permission to see it.
_LANES = {
    VERSION: ("Versions", "busy", "django_txmsg.view_worker"),
    ACTION: ("Actions", "warn", "django_txmsg.view_auditentry"),
    ERROR: ("New errors", "bad", "django_txmsg.view_deadletter"),
}

#: The width of the time line, in units of the drawing.
WIDTH = 960


@dataclass
class Change:
    """One change. `who` depends on the kind of the change: the operator of an action,
    the service that has a new version, or the stage, relay or broker at which a
    message died."""

    at: dt.datetime
    kind: str
    who: str
    what: str
    database: str
    fingerprint: str = ""
    #: The version that began shortly before an error, and how long before.
    after: str = ""


def read(using: str, kinds: Collection[str]) -> list[Change]:
    """Return the changes of these kinds in one database, newest first."""
    since = clock(using) - DAY
    found: list[Change] = []
    entries = AuditEntry.objects.using(using).filter(at__gte=since).order_by("-at")
    versions = entries.filter(deed=Deed.DEPLOY)
    actions = entries.exclude(deed__in=[*_ASIDE, Deed.DEPLOY])
    for kind, rows in ((VERSION, versions), (ACTION, actions)):
        if kind in kinds:
            found += [
                Change(one.at, kind, one.by, one.text, using) for one in rows[:MOST]
            ]
    if ERROR in kinds:
        found += _errors(using)
    return sorted(found, key=lambda one: one.at, reverse=True)


def explain(changes: Collection[Change]) -> None:
    """Find the errors that began within an hour after a version of the code was
    started. Set `after` of each such error to a text that names the latest of these
    versions."""
    versions = [one for one in changes if one.kind == VERSION]
    for error in changes:
        gaps = [(error.at - one.at, one.what) for one in versions]
        gaps = [gap for gap in gaps if dt.timedelta() <= gap[0] <= SOON]
        if error.kind == ERROR and gaps:
            gap, what = min(gaps)
            error.after = f"{duration(gap)} after: {what}"


def _errors(using: str) -> Iterator[Change]:
    """Yield the errors whose first dead letter was stored in the last 24 hours,
    including errors whose dead letters are resolved. The query reads one index entry
    for each error, so an error with many dead letters costs no more than an error with
    one."""
    table, sql = "django_txmsg_deadletter", sql_of(connections[using])
    first = places_sql(table, ("fingerprint",), Rule("TRUE"), "created_at")
    names = ("stage", "destination", "exception", "reason", "deaths", "fingerprint")
    facts = sql.array(*names)
    # By subqueries: a join may read the whole table if the statistics are outdated.
    rows = query(
        using,
        f"{first}, dated AS (SELECT id, (SELECT created_at FROM {table} o"  # noqa: S608 - constants only
        f" WHERE o.id = places.id) AS created_at FROM places) SELECT created_at,"
        f" (SELECT {facts} FROM {table} o WHERE o.id = dated.id) FROM dated"
        f" WHERE created_at >= {sql.later()}"
        " ORDER BY created_at DESC LIMIT %s",
        [-DAY.total_seconds(), MOST],
    )
    for at, found in rows:
        stage, destination, exception, reason, deaths, fingerprint = read_array(found)
        place = dead.place(stage, destination, reason)
        text = f"{'Died again' if deaths > 1 else 'First death'}: {exception or reason}"
        yield Change(read_instant(at), ERROR, place, text, using, fingerprint)


def seen(request: HttpRequest) -> list[str]:
    """Return the kinds of changes that the user may see."""
    return [kind for kind, lane in _LANES.items() if request.user.has_perm(lane[2])]


def show(admin: ReadOnlyAdmin, request: HttpRequest) -> HttpResponse:
    """Show the page, with the changes in every database in use."""
    kinds = seen(request)
    insist(bool(kinds))
    found: list[Change] = []
    unreadable, used = [], databases.with_tables()
    for using in used:
        try:
            found += read(using, kinds)
        except (DatabaseError, InterfaceError):
            unreadable.append(using)
    found.sort(key=lambda one: one.at, reverse=True)
    explain(found)
    context = {
        "changes": [(one, _LANES[one.kind][1]) for one in found],
        "lanes": [
            (title, tone, [(_left(one), one) for one in found if one.kind == kind])
            for kind, (title, tone, _) in _LANES.items()
            if kind in kinds
        ],
        "width": WIDTH,
        "unreadable": unreadable,
        "several": len(used) > 1,
        "most": MOST,
        "unversioned": VERSION in kinds and not conf.get().VERSION,
    }
    return admin.show(request, "changes", "What changed", context)


def _left(change: Change) -> int:
    """Return the horizontal position of a change on the time line."""
    age = (timezone.now() - change.at) / DAY
    return round((WIDTH - 4) * min(max(1 - age, 0.0), 1.0))
