"""Counts the blocked messages of ordered stages, and finds out why they are blocked."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from django.db import connections

from .. import conf, wire
from ..models import DeadLetter, InboxMessage, OutboxMessage
from ..models.dead_letter import Resolution
from ..models.fields import query, read_instant, sql_of
from ..rules import inbox
from ..stages import all_stages
from .lengths import amount
from .waiting import CAP, capped, places_sql, read_array

#: Most keys that are listed.
NAMED = 20

_BLOCKED = inbox.BLOCKED & inbox.OPEN


@dataclass(frozen=True)
class Line:
    """The blocked messages of one ordered stage."""

    count: int = 0
    #: Their bytes, headers included.
    size: int = 0
    #: Since when the first of them has been waiting.
    since: dt.datetime | None = None
    #: The keys whose messages have waited for too long.
    held: int = 0


@dataclass(frozen=True)
class HeldKey:
    """A key at an ordered stage. Messages with this key have been blocked for too long
    there."""

    stage: str
    key: str
    count: int
    since: dt.datetime
    #: The first of them.
    message_id: uuid.UUID | None
    waits_for: uuid.UUID | None
    #: The state of the message that it waits for.
    why: str


def lines(using: str, paused: Collection[str] = ()) -> dict[str, Line]:
    """Return the blocked messages of each stage. At most CAP messages of a stage are
    counted. At a `paused` stage no key counts as held, because its messages wait for
    the operator who paused the stage."""
    sql, table = sql_of(connections[using]), InboxMessage._meta.db_table
    counts = sql.array(
        "SUM(count)",
        "SUM(size)",
        sql.epoch("MIN(since)"),
        f"COUNT(*) FILTER (WHERE since <= {sql.later()})",
    )
    rows = query(
        using,
        f"{places_sql(table, ('stage',), _BLOCKED)} SELECT o.stage,"  # noqa: S608 - constants only
        f" (SELECT {counts} FROM"
        " (SELECT COUNT(*) AS count, SUM(size) AS size, MIN(waits_since) AS since"
        f" FROM (SELECT key, waits_since, {sql.size} AS size"
        f" FROM {table} r WHERE r.stage = o.stage AND {_BLOCKED.sql('r')}"
        " LIMIT %s) AS bounded GROUP BY key) AS keys)"
        f" FROM places JOIN {table} o ON o.id = places.id ORDER BY o.stage",
        [-conf.get().ORDER_PATIENCE, CAP + 1],
    )
    found = {}
    for stage, counted in rows:
        count, size, since, late = read_array(counted)
        late = 0 if stage in paused else late
        found[stage] = Line(int(count), int(size or 0), read_instant(since), late)
    return found


def at_least(line: Line) -> str:
    """Return the total size of the blocked messages as text. Add " and more" if not all
    of them were counted."""
    return f"{amount(line.size)}{' and more' * (line.count > CAP)}"


def held(
    using: str, stages: Collection[str] | None = None, *, after: float | None = None
) -> list[HeldKey]:
    """Return the keys whose messages have been blocked for at least `after` seconds,
    the longest wait first. The default for `after` is TXMSG["ORDER_PATIENCE"]. If
    `stages` is None, search all stages. Return at most 20 keys (NAMED)."""
    patience = conf.get().ORDER_PATIENCE if after is None else after
    found: list[tuple[str, str, int, Any]] = []
    for stage in lines(using) if stages is None else stages:
        found += query(
            using,
            "SELECT stage, key, COUNT(*), MIN(waits_since) FROM (SELECT stage, key,"  # noqa: S608 - constants only
            " waits_since FROM django_txmsg_inboxmessage WHERE stage = %s AND"
            f" {_BLOCKED.sql()} LIMIT %s) AS bounded GROUP BY stage, key"
            f" HAVING MIN(waits_since) <= {sql_of(connections[using]).later()}"
            " ORDER BY MIN(waits_since), key LIMIT %s",
            [stage, CAP + 1, -patience, NAMED],
        )
    found.sort(key=lambda row: (read_instant(row[3]), row[0], row[1]))
    return [_held(using, *row) for row in found[:NAMED]]


def behind(letter: DeadLetter) -> int:
    """Return the number of messages that wait until this dead letter is resolved, but
    at most CAP."""
    key = str(letter.headers.get(wire.KEY, ""))[:255]
    if not key or not letter.stage or letter.resolution != Resolution.OPEN:
        return 0
    rows = InboxMessage.order.db_manager(letter._state.db or "default")
    return rows.behind(letter.stage, key, CAP + 1)


def note(letter: DeadLetter) -> str:
    """Return a note for the operator who is about to resolve a dead letter of an
    ordered stage, or of a message with a key that was not sent. The note says what will
    happen to the later messages of the same key. Return "" if resolving the dead letter
    does not affect them."""
    waiting = behind(letter)
    if waiting:
        verb = "waits" if waiting == 1 else "wait"
        return (
            f"{capped(waiting)} {verb} behind this one. If you redeliver it, it runs, "
            "and then they do, in their order; if you discard it, they run without "
            "it."
        )
    skipping = {one.name for one in all_stages() if one.ordered == "skip"}
    passed = letter.resolution == Resolution.OPEN and wire.KEY in letter.headers
    if passed and letter.stage in skipping:
        return "The ones behind it did not wait: if redelivered, it runs after them."
    # None waits for a message that has expired.
    unsent = not letter.stage and letter.reason != "expired"
    if passed and unsent and conf.get().RELAY.LINK_KEYS:
        return (
            'At a stage with ordered="block", the ones behind it wait for it. If you '
            "discard it, they keep waiting: run `order let_go` for their key there."
        )
    return ""


def _held(using: str, stage: str, key: str, count: int, since: Any) -> HeldKey:
    rows = InboxMessage.objects.using(using).filter(stage=stage)
    first = (
        rows.filter(key=key, waits_for__isnull=False, processed_at=None, dead_at=None)
        .only("message_id", "waits_for")
        .order_by("after_at", "pk")
        .first()
    )
    before = first.waits_for if first is not None else None
    why = _why(using, rows.filter(message_id=before).first(), before)
    return HeldKey(
        stage, key, count, read_instant(since), first and first.message_id, before, why
    )


def predecessor(row: InboxMessage) -> str:
    """Return the state of the message that this blocked message waits for."""
    using = row._state.db or "default"
    same = InboxMessage.objects.using(using).filter(stage=row.stage)
    before = same.filter(message_id=row.waits_for).defer("body", "headers").first()
    if before is not None and before.waits_for is not None:
        return "which waits too"
    return _why(using, before, row.waits_for)


def _why(using: str, row: InboxMessage | None, before: uuid.UUID | None) -> str:
    if row is None:
        sent = OutboxMessage.objects.using(using).filter(message_id=before)
        if sent.filter(dead_at__isnull=False).exists():
            return "which its relay has given up"
        return "which has not arrived"
    if row.dead_at is not None:
        return "which is dead"
    if row.waits_for is not None:
        return "which waits for it in a circle"
    if row.processed_at is not None:
        return "which is processed"
    if row.due_at is not None and row.lease_token is None:
        return "which waits for its redelivery"
    # A handler's transaction marks the row, so others do not see the mark yet.
    return "which is being processed, or whose worker has died"
