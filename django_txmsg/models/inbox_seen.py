"""Hop 7's question to the inbox: was this message here before, and what came of it?"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .fields import read_instant, read_uuid

#: What `read_seen()` reads, in SQL with the clock's expression as `now`.
# The instants themselves: some SQLite versions return a wrong `IS NOT NULL` of them.
SEEN_COLUMNS = (
    "id, message_id, attempts, deliveries, processed_at, dead_at, due_at, {now}"
)


@dataclass(frozen=True, slots=True)
class Seen:
    """What the inbox knew of a message once its arrival was recorded."""

    id: int
    message_id: uuid.UUID
    attempt: int
    deliveries: int
    processed: bool
    dead: bool
    parked: bool
    now: dt.datetime

    @property
    def settled(self) -> bool:
        """Whether nothing is left to do for this arrival but to drop it."""
        return self.processed or self.dead or self.parked


def read_seen(row: Sequence[Any]) -> Seen:
    """Make sense of a row of SEEN_COLUMNS."""
    pk, message_id, attempts, deliveries, processed, dead, parked, now = row
    return Seen(
        id=pk,
        message_id=read_uuid(message_id),
        attempt=attempts,
        deliveries=deliveries,
        processed=processed is not None,
        dead=dead is not None,
        parked=parked is not None,
        now=read_instant(now),
    )
