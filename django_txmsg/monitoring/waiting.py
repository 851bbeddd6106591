"""Messages waiting for their next step: in the outbox, the inbox and the queues.

Counts stop at CAP, so that asking stays cheap when there is much to count.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from django.db import connections

from ..models.fields import later_sql, later_value, now_sql, read_instant
from ..rules import inbox, lease, outbox

#: The most rows that are counted; more are "50,000+".
CAP = 50_000

#: A message that was due so long ago already is overdue.
OVERDUE = dt.timedelta(minutes=2)

#: A deployment that is still going on has not lasted longer.
DEPLOYED = dt.timedelta(minutes=15)


@dataclass
class Waiting:
    """Messages that wait in one place for their next step."""

    count: int = 0
    due: int = 0
    overdue: int = 0
    in_flight: int = 0
    retried: int = 0
    oldest_due: dt.datetime | None = None

    @property
    def delayed(self) -> int:
        """Those whose time has not come."""
        return self.count - self.due

    @property
    def capped(self) -> bool:
        """Whether there are more than were counted."""
        return self.count > CAP


@dataclass(frozen=True)
class NeedsNewerCode:
    """Messages of one stage that wait for code which reads them: how many, since when,
    and a type and version that is needed."""

    count: int
    since: dt.datetime | None
    type: str
    version: int


def capped(count: int | None, cap: int = CAP) -> str:
    """Return a count, or the cap and a plus where it was not counted further."""
    if count is None:
        return "-"
    return f"{cap:,}+" if count > cap else f"{count:,}"


def total(parts: Iterable[Waiting]) -> Waiting:
    """Return the sum of several places."""
    summed = Waiting()
    for part in parts:
        summed.count += part.count
        summed.due += part.due
        summed.overdue += part.overdue
        summed.in_flight += part.in_flight
        summed.retried += part.retried
        oldest = [one for one in (summed.oldest_due, part.oldest_due) if one]
        summed.oldest_due = min(oldest, default=None)
    return summed


def in_outbox(using: str, by: str = "destination") -> dict[str, Waiting]:
    """Return what is pending, by destination, or by another column."""
    return _waiting(
        using,
        f"SELECT {by} AS name, due_at, attempts > 0 AS retried,"  # noqa: S608 - constants only
        f" {lease.HELD.sql(now='{now}')} AS leased FROM django_txmsg_outboxmessage"
        f" WHERE {outbox.PENDING.sql()} ORDER BY due_at, id LIMIT {{limit}}",
    )


def in_inbox(using: str) -> dict[str, Waiting]:
    """Return the messages waiting for another attempt, by stage. What is held back is
    not due: it needs newer code, say, or an operator has paused its stage."""
    return _waiting(
        using,
        "SELECT stage AS name, TRUE AS retried,"  # noqa: S608 - constants only
        f" {lease.HELD.sql(now='{now}')} AS leased,"
        f" CASE WHEN {(~inbox.HELD_BACK).sql()} THEN due_at END AS due_at"
        " FROM django_txmsg_inboxmessage"
        f" WHERE {(inbox.PARKED & ~inbox.IN_LINE).sql()} LIMIT {{limit}}",
    )


def for_newer_code(using: str) -> dict[str, NeedsNewerCode]:
    """Return what no code that has seen it could read, by stage."""
    with connections[using].cursor() as cursor:
        cursor.execute(
            "SELECT stage, COUNT(*), MIN(first_received_at), MIN(needs_type),"  # noqa: S608 - constants only
            " MAX(needs_version) FROM (SELECT stage, first_received_at, needs_type,"
            " needs_version FROM django_txmsg_inboxmessage"
            f" WHERE {inbox.NEEDS_NEWER_CODE.sql()} LIMIT %s) AS bounded"
            " GROUP BY stage ORDER BY stage",
            [CAP + 1],
        )
        return {
            stage: NeedsNewerCode(count, read_instant(since), name, version)
            for stage, count, since, name, version in cursor.fetchall()
        }


def in_queues(using: str, held: Collection[str] = ()) -> dict[str, Waiting]:
    """Return what lies in the embedded broker, by queue; in the `held` ones, whose
    stages are all paused, nothing is due."""
    found = _waiting(
        using,
        "SELECT queue AS name, available_at AS due_at, deliveries > 1 AS retried,"
        " lease_token IS NOT NULL AND available_at > {now} AS leased"
        " FROM django_txmsg_queuemessage LIMIT {limit}",
    )
    for name, waiting in found.items():
        if name in held:
            waiting.due = waiting.overdue = 0
            waiting.oldest_due = None
    return found


def _waiting(using: str, rows: str) -> dict[str, Waiting]:
    connection = connections[using]
    now, ago = now_sql(connection), later_sql(connection)
    rows = rows.format(now=now, limit=CAP + 1)
    sql = f"""
        SELECT name, COUNT(*), COUNT(*) FILTER (WHERE due_at <= {now}),
               COUNT(*) FILTER (WHERE due_at <= {ago}), COUNT(*) FILTER (WHERE leased),
               COUNT(*) FILTER (WHERE retried), MIN(due_at)
        FROM ({rows}) AS bounded GROUP BY name ORDER BY name
    """  # noqa: S608 - constants only
    found = {}
    with connection.cursor() as cursor:
        cursor.execute(sql, [later_value(connection, -OVERDUE.total_seconds())])
        for name, count, due, overdue, leased, retried, oldest in cursor.fetchall():
            found[name] = Waiting(
                count,
                due,
                overdue,
                leased,
                retried,
                read_instant(oldest) if due else None,
            )
    return found
