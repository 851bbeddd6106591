"""Rows that still wait for a destination or a type that the contract no longer has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.db.models import Q

from .. import wire
from ..models import DeadLetter, InboxMessage, OutboxMessage, QueueMessage
from ..models.dead_letter import Resolution
from ..models.outbox import PENDING
from ..models.queue import queue_name
from ..stages import all_stages
from .comparison import Change
from .document import Contract

WAITS = "rows still wait for it"


def waiting(committed: Contract, current: Contract, using: str) -> Iterator[Change]:
    """Yield entries removed from the contract for which messages still wait."""
    now = current["channels"]
    for channel in committed.get("channels", {}):
        if channel not in now:
            yield from _rows(channel, Q(destination=channel), using)
            yield from _queued(channel, queue_name(channel, None), using)
    here = {one.name for one in all_stages()}
    for operation in committed.get("operations", {}):
        kind, _, stage = operation.partition(".")
        if kind == "receive" and stage not in here:
            rows = InboxMessage.objects.using(using).filter(
                stage=stage, due_at__isnull=False
            )
            yield from _counted(f"stage {stage}", "parked", rows)
    types = current["components"]["messages"]
    for name in committed.get("components", {}).get("messages", {}):
        if name not in types:
            begins = Q(**{f"headers__{wire.TYPE}__startswith": f"{name};"})
            yield from _rows(name, begins, using)


def _rows(where: str, condition: Q, using: str) -> Iterator[Change]:
    pending = OutboxMessage.objects.using(using).filter(PENDING, condition)
    yield from _counted(where, "pending in the outbox", pending)
    parked = InboxMessage.objects.using(using).filter(condition, due_at__isnull=False)
    yield from _counted(where, "parked", parked)
    dead = DeadLetter.objects.using(using).filter(condition, resolution=Resolution.OPEN)
    yield from _counted(where, "open dead letters", dead)


def _queued(where: str, queue: str, using: str) -> Iterator[Change]:
    rows = QueueMessage.objects.using(using).filter(queue=queue)
    yield from _counted(where, "in the embedded broker", rows)


def _counted(where: str, what: str, rows: Any) -> Iterator[Change]:
    count = rows.count()
    if count:
        yield Change(where, f"{count} {what}", WAITS)
