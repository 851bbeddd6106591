"""The messages of an order and their states, from the outbox, the inbox and the dead
letters.

All of these messages have the order's number as their correlation id.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import asdict, dataclass
from typing import Any

from django_txmsg import conf, wire
from django_txmsg.models import DeadLetter, InboxMessage, OutboxMessage


@dataclass(frozen=True)
class Hop:
    """One message, with its way from the sender's outbox to the receiver's inbox."""

    id: str
    destination: str
    stored: dt.datetime
    dispatched: dt.datetime | None
    received: dt.datetime | None
    processed: dt.datetime | None
    attempts: int
    error: str
    dead: bool
    next: tuple[str, ...]

    @property
    def state(self) -> str:
        """The name of the latest event."""
        if self.dead:
            return "dead"
        if self.processed:
            return "processed"
        if self.error:
            return "retrying"
        for name in ("received", "dispatched"):
            if getattr(self, name):
                return name
        return "stored"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and the state as a dict."""
        return asdict(self) | {"state": self.state}


def trail(number: str) -> list[Hop]:
    """Return the messages of an order, in the order in which they were stored."""
    inbox = {
        row.message_id: row
        for row in InboxMessage.objects.filter(correlation_id=number)
    }
    dead = {
        letter.message_id
        for letter in DeadLetter.objects.filter(
            correlation_id=number, resolution="open"
        )
    }
    rows = list(OutboxMessage.objects.filter(correlation_id=number).order_by("id"))
    hops = []
    for row in rows:
        taken = inbox.get(row.message_id)
        error = (taken.last_error if taken else "") or row.last_error
        hops.append(
            Hop(
                id=str(row.message_id),
                destination=row.destination,
                stored=row.created_at,
                dispatched=row.dispatched_at,
                received=taken.first_received_at if taken else None,
                processed=taken.processed_at if taken else None,
                attempts=taken.attempts if taken else 0,
                error=error.strip().rpartition("\n")[2],
                dead=row.message_id in dead,
                next=_sent_by(taken, rows),
            )
        )
    return hops


def _sent_by(taken: InboxMessage | None, rows: list[OutboxMessage]) -> tuple[str, ...]:
    """Return the destinations of the messages that the receiver sent while it processed
    a message."""
    if taken is None:
        return ()
    session = wire.session_id(conf.get().SERVICE, taken.message_id, taken.stage)
    return tuple(row.destination for row in rows if row.session_id == session)
