"""Hop 3's order: each message with a key is linked to the last one of that key.

An ordered stage lets it wait for that predecessor. See
docs/decisions/order-by-links.md.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Sequence

from django.db import transaction

from .. import wire
from ..models import KeyTail, OutboxMessage
from ..models.key_tail import Chain
from ..models.outbox_claim import Claimed

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)


class _Lost(Exception):
    """The lease has ended: another relay may have linked these messages."""


def link(
    claimed: Sequence[Claimed], token: uuid.UUID, *, using: str, broker: str
) -> list[Claimed]:
    """Link messages that have a key and no place in its order yet, in the given order,
    and return all with the links in their headers.

    Expired messages get no place. The commit waits for the disk: if a crash lost a
    place, it would be given twice. Messages whose lease has ended are left out.
    """
    chains: dict[Chain, list[Claimed]] = {}
    for row in claimed:
        if row.unlinked and not row.expired:
            chains.setdefault((row.destination, row.key), []).append(row)
    if not chains:
        return list(claimed)
    try:
        links = _link(chains, token, using, broker)
    except _Lost:
        return [row for row in claimed if not row.unlinked or row.expired]
    return [_linked(row, links[row.id]) if row.id in links else row for row in claimed]


def _link(
    chains: dict[Chain, list[Claimed]], token: uuid.UUID, using: str, broker: str
) -> dict[int, str | None]:
    links: dict[int, str | None] = {}
    ends = {chain: uuid.UUID(rows[-1].message_id) for chain, rows in chains.items()}
    longest = max(map(len, chains.values()))
    with transaction.atomic(using=using):
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
            raise _Lost
    return links


def _text(before: uuid.UUID | str | None, at: int | None) -> str | None:
    if before is None or at is None:
        return None
    instant = _EPOCH + dt.timedelta(microseconds=at)
    return f"{before};at={wire.format_instant(instant)}"


def _linked(row: Claimed, after: str | None) -> Claimed:
    headers = row.headers if after is None else {**row.headers, wire.AFTER: after}
    return row._replace(headers=headers, unlinked=False)
