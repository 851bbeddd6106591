"""What has not left of a session, as the receiver of its control message sees it."""

from __future__ import annotations

import datetime as dt
import uuid
from dataclasses import dataclass

from django.db import connections

from .models import OutboxMessage
from .models.fields import now_sql, read_instant
from .models.outbox import PENDING


@dataclass(frozen=True, slots=True)
class Pending:
    """What has not left of a session: how many messages, whether somebody holds one,
    and in how many seconds the first of them can be claimed."""

    count: int = 0
    leased: bool = False
    wait: float = 0.0

    @classmethod
    def of(cls, using: str, session_id: uuid.UUID) -> Pending:
        """Ask the outbox."""
        rows = list(
            OutboxMessage.objects.using(using)
            .filter(PENDING, session_id=session_id)
            .values_list("due_at", "lease_until")[:1000]
        )
        if not rows:
            return cls()
        now = _database_now(using)
        waits = [
            max((due - now).total_seconds(), (lease - now).total_seconds())
            if lease is not None
            else (due - now).total_seconds()
            for due, lease in rows
        ]
        return cls(
            count=len(rows),
            leased=any(lease is not None and lease > now for _, lease in rows),
            wait=max(0.0, min(waits)),
        )


def _database_now(using: str) -> dt.datetime:
    connection = connections[using]
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {now_sql(connection)}".replace("%%", "%"))
        (value,) = cursor.fetchone()
    now: dt.datetime | None = read_instant(value)
    assert now is not None
    return now
