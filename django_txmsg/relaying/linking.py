"""Hop 3: links the messages of a key, so that a stage can process them in order."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Sequence

from django.db import connections, transaction

from .. import wire
from ..models import KeyTail, OutboxMessage
from ..models.fields import limit_waits
from ..models.outbox import Chain
from ..models.outbox_claim import Claimed

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)


def link(
    claimed: Sequence[Claimed],
    token: uuid.UUID,
    *,
    using: str,
    broker: str,
    wait: float,
) -> list[Claimed]:
    """For each message that has a key, store a link to its predecessor, the previous
    message of its key. Return the messages, with these links in their headers.

    Expired messages get no link. If the lease on any of the messages to be linked has
    ended, this function stores no link, and returns only the other messages. Raises
    OperationalError if it waits for a lock for longer than `wait` seconds.

    The commit waits for the disk: if a crash lost the commit, two messages could get
    the same predecessor.
    """
    chains: dict[Chain, list[Claimed]] = {}
    for row in claimed:
        if row.unlinked and not row.expired:
            chains.setdefault((row.destination, row.key), []).append(row)
    if not chains:
        return list(claimed)
    links = _link(chains, token, using, broker, wait)
    if links is None:
        return [row for row in claimed if not row.unlinked or row.expired]
    return [_linked(row, links[row.id]) if row.id in links else row for row in claimed]


def _link(
    chains: dict[Chain, list[Claimed]],
    token: uuid.UUID,
    using: str,
    broker: str,
    wait: float,
) -> dict[int, str | None] | None:
    """Store the links, and return them by the ids of the rows. Returns None if the
    lease has ended: another relay may have linked the same messages."""
    links: dict[int, str | None] = {}
    ends = {chain: uuid.UUID(rows[-1].message_id) for chain, rows in chains.items()}
    longest = max(map(len, chains.values()))
    with transaction.atomic(using=using):
        # A relay that was stopped in the middle of this keeps its locks.
        limit_waits(connections[using], wait)
        joints = KeyTail.objects.db_manager(using).advance(broker, ends, longest)
        for chain, rows in chains.items():
            joint = joints[chain]
            before: uuid.UUID | str | None = joint.previous_id
            at = joint.previous_at
            for place, row in enumerate(rows, joint.last_at - len(rows) + 1):
                links[row.id] = _text(before, at)
                before, at = row.message_id, place
        outbox = OutboxMessage.objects.db_manager(using)
        if outbox.link(links, token, wire.AFTER) < len(links):
            transaction.set_rollback(True, using=using)
            return None
    return links


def _text(before: uuid.UUID | str | None, at: int | None) -> str | None:
    if before is None or at is None:
        return None
    instant = _EPOCH + dt.timedelta(microseconds=at)
    return f"{before};at={wire.format_instant(instant)}"


def _linked(row: Claimed, after: str | None) -> Claimed:
    headers = row.headers if after is None else {**row.headers, wire.AFTER: after}
    return row._replace(headers=headers, unlinked=False)
