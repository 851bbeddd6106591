"""Counts the waiting messages of the outbox, the inbox and the queues, and the runs of
flows that wait for a deadline.

Each place is counted separately, up to CAP rows. This is cheap, and many messages at
one place do not hide another place.
"""

from __future__ import annotations

import datetime as dt
import json
import uuid
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from django.db import connections

from .. import rules
from ..models import InboxMessage
from ..models.fields import query, read_instant, sql_of
from ..rules import Rule, inbox, outbox

#: Most rows that are counted for one place; more are "50,000+".
CAP = 50_000

#: A message that has been due for this long is overdue.
OVERDUE = dt.timedelta(minutes=2)

#: A deployment takes less time than this.
DEPLOYED = dt.timedelta(minutes=15)


@dataclass
class Waiting:
    """The waiting messages of one place."""

    count: int = 0
    due: int = 0
    overdue: int = 0
    in_flight: int = 0
    retried: int = 0
    #: For a stage: how many of them wait for a slot of the stage's rate.
    for_rate: int = 0
    oldest_due: dt.datetime | None = None
    #: For a queue that this service does not judge: since when a message is due.
    not_judged_since: dt.datetime | None = None
    #: The destination, stage or queue.
    name: str = ""
    database: str = ""
    #: For the outbox: the service that stored them; "" for an earlier release.
    service: str = ""

    @property
    def capped(self) -> bool:
        """Whether the place has more than CAP messages."""
        return self.count > CAP


@dataclass(frozen=True)
class NeedsNewerCode:
    """The messages of one stage that wait for newer code: their number, up to a limit,
    the time when the first of them arrived, and a type and version that they need."""

    count: int
    since: dt.datetime | None
    type: str
    version: int


def capped(count: int | None, cap: int = CAP) -> str:
    """Return a count as text: "12", "50,000+" above the cap, or "-" for None."""
    if count is None:
        return "-"
    return f"{cap:,}+" if count > cap else f"{count:,}"


def total(parts: Iterable[Waiting]) -> Waiting:
    """Return the sum of the counts of several places."""
    parts = list(parts)
    oldest = (part.oldest_due for part in parts if part.oldest_due)
    summed = Waiting(oldest_due=min(oldest, default=None))
    for name in ("count", "due", "overdue", "in_flight", "retried", "for_rate"):
        setattr(summed, name, sum(getattr(part, name) for part in parts))
    return summed


def in_outbox(using: str, *, most: int | None = None) -> list[Waiting]:
    """Count the pending messages for each pair of a destination and a service that
    stored messages to it.

    At most `most` rows (by default CAP) of each pair are counted. The rows with the
    earliest due times are counted first.
    """
    return _by_place(
        using,
        "django_txmsg_outboxmessage",
        ("service", "destination"),
        outbox.PENDING,
        due="due_at",
        retried="attempts > 0",
        leased=rules.LEASED.sql(now="{now}"),
        most=most,
    )


def in_inbox(
    using: str,
    held: Collection[str] = (),
    running: Collection[tuple[str, uuid.UUID]] = (),
    *,
    most: int | None = None,
) -> list[Waiting]:
    """Return the messages that wait for an attempt, by stage: for a redelivery, or for
    a slot of the stage's rate. Blocked messages and messages that need newer code are
    not counted. `held` are the paused stages. Their messages never count as due, and
    neither do messages that a worker has claimed. `running` are claimed messages, each
    with its stage, whose leases may have ended, because a handler's transaction has
    locked their rows.

    With `most`, only unclaimed messages are counted: otherwise claimed ones, which are
    the first, might hide one that is due."""
    rows = InboxMessage.objects.using(using).filter(
        message_id__in={message_id for _, message_id in running}
    )
    found = rows.values_list("pk", "stage", "message_id")
    ids = ", ".join(str(pk) for pk, *of in found if tuple(of) in running) or "NULL"
    leased = f"({rules.LEASED.sql('r', now='{now}')} OR r.id IN ({ids}))"
    since = inbox.DUE_SINCE.sql("r")
    return _by_place(
        using,
        "django_txmsg_inboxmessage",
        ("stage",),
        # A message whose predecessor waits, too, is due never: do not read it.
        inbox.RETRYING & Rule("{due_at} < " + sql_of(connections[using]).never),
        within=inbox.PARKED,
        due="due_at",
        since=f"CASE WHEN r.id IN ({ids}) THEN NULL ELSE {since} END",
        also="" if most is None else f" AND {leased} IS NOT TRUE",
        retried="TRUE",
        for_rate="slot IS NOT NULL",
        leased=leased,
        most=most,
        held=held,
    )


def in_queues(
    using: str,
    held: Collection[str] = (),
    own: Collection[str] | None = None,
    *,
    most: int | None = None,
) -> list[Waiting]:
    """Return the messages in the embedded broker, by queue. `held` are the queues whose
    stages are all paused. Their messages never count as due, and neither do messages in
    other queues than `own`, if given: these have `not_judged_since`."""
    return _by_place(
        using,
        "django_txmsg_queuemessage",
        ("queue",),
        Rule("TRUE"),
        due="available_at",
        retried="deliveries > 1",
        leased="lease_token IS NOT NULL AND available_at > {now}",
        most=most,
        held=held,
        own=own,
    )


def for_deadlines(using: str, *, most: int | None = None) -> list[Waiting]:
    """Count the runs of flows that wait for a deadline, and return one `Waiting` for
    each service. When the deadline of a run passes, a relay of the run's service stores
    a message."""
    return _by_place(
        using,
        "django_txmsg_run",
        ("service",),
        Rule("{due_at} IS NOT NULL"),
        due="due_at",
        retried="FALSE",
        leased="FALSE",
        most=most,
    )


def for_newer_code(using: str, *, most: int = CAP) -> dict[str, NeedsNewerCode]:
    """Return the messages that wait for newer code, by stage. At most `most` + 1
    messages of each stage are read, the longest waiting first."""
    sql, table = sql_of(connections[using]), "django_txmsg_inboxmessage"
    rule = inbox.NEEDS_NEWER_CODE
    since = sql.epoch("MIN(since)")
    found = sql.array("COUNT(*)", since, "MIN(type)", "MAX(version)")
    rows = query(
        using,
        f"{places_sql(table, ('stage',), rule)} SELECT o.stage, (SELECT {found} FROM ("  # noqa: S608 - constants only
        "SELECT first_received_at AS since, needs_type AS type, needs_version AS"
        f" version FROM {table} r WHERE r.stage = o.stage AND {rule.sql('r')}"
        f" ORDER BY first_received_at LIMIT {most + 1}) AS bounded)"
        f" FROM places JOIN {table} o ON o.id = places.id ORDER BY o.stage",
    )
    read = ((stage, read_array(found)) for stage, found in rows)
    return {
        stage: NeedsNewerCode(count, read_instant(since), name, version)
        for stage, (count, since, name, version) in read
    }


def places_sql(
    table: str, columns: tuple[str, ...], rule: Rule, first: str = ""
) -> str:
    """Return a CTE `places (id)` that selects the id of one row for each place. A place
    is a combination of values in `columns`. Rows that do not satisfy the rule are
    ignored. With `first`, the CTE selects the row with the lowest value in that column.

    An index must begin with these columns. PostgreSQL then reads one index entry per
    place, so a place with many rows costs no more than a place with one.
    """
    place = ", ".join(columns)
    order = f", {first}" if first else ""
    after = ", ".join(f"n.{name}" for name in columns)
    last = ", ".join(f"o.{name}" for name in columns)
    return (
        f"WITH RECURSIVE places (id) AS (SELECT (SELECT id FROM {table} WHERE"  # noqa: S608 - constants only
        f" {rule.sql()} ORDER BY {place}{order} LIMIT 1) UNION ALL SELECT (SELECT n.id"
        f" FROM {table} n WHERE {rule.sql('n')} AND ({after}) > ({last}) ORDER BY"
        f" {after}{order} LIMIT 1) FROM places JOIN {table} o ON o.id = places.id)"
    )


def read_array(value: Any) -> Any:
    """Return the values of `Sql.array()`, which SQLite returns as text."""
    return json.loads(value) if isinstance(value, str) else value


def _by_place(
    using: str,
    table: str,
    columns: tuple[str, ...],
    rule: Rule,
    *,
    due: str,
    retried: str,
    leased: str,
    most: int | None,
    held: Collection[str] = (),
    own: Collection[str] | None = None,
    for_rate: str = "FALSE",
    since: str = "",
    also: str = "",
    within: Rule | None = None,
) -> list[Waiting]:
    """Count the rows of each place, at most `most` rows per place, the earliest due
    times first. A place with many rows does not affect the counts of other places. If a
    place is in `held`, or not in `own`, if given, none of its rows counts as due. A row
    is due from `since` on, by default from `due` on, which is the column of an index.
    `also` is a further condition. `within` is a weaker rule, which finds a place by its
    first row in an index."""
    sql = sql_of(connections[using])
    now, ago = sql.now, sql.later()
    limit = (CAP if most is None else most) + 1
    counts = sql.array(
        "COUNT(*)",
        f"COUNT(*) FILTER (WHERE due <= {now})",
        f"COUNT(*) FILTER (WHERE due <= {ago})",
        "COUNT(*) FILTER (WHERE leased)",
        "COUNT(*) FILTER (WHERE retried)",
        "COUNT(*) FILTER (WHERE for_rate)",
        sql.epoch(f"MIN(due) FILTER (WHERE due <= {now})"),
    )
    same = " AND ".join(f"r.{name} = o.{name}" for name in columns)
    place = ", ".join(f"o.{name}" for name in columns)
    statement = f"""
        {places_sql(table, columns, within or rule)}
        SELECT {place}, (SELECT {counts} FROM (
            SELECT {since or due} AS due, {leased.format(now=now)} AS leased,
                {retried} AS retried, {for_rate} AS for_rate
            FROM {table} r WHERE {same} AND {rule.sql("r")}{also.format(now=now)}
            ORDER BY {due} LIMIT {limit}) AS bounded)
        FROM places JOIN {table} o ON o.id = places.id ORDER BY {place}
    """  # noqa: S608 - constants only
    found = []
    for *named, counted in query(using, statement, [-OVERDUE.total_seconds()]):
        count, due_now, overdue, in_flight, again, slots, oldest = read_array(counted)
        if not count and within is not None:
            continue
        foreign = oldest if own is not None and named[-1] not in own else None
        if named[-1] in held or foreign is not None:
            due_now, overdue, oldest = 0, 0, None
        found.append(
            Waiting(
                count, due_now, overdue, in_flight, again, slots, read_instant(oldest),
                not_judged_since=read_instant(foreign),
                name=named[-1], database=using, service=named[0],
            )
        )  # fmt: skip
    return found
