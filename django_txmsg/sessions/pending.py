"""What has not left of a session, as the receiver of its control message sees it."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from django.db import connections
from django.db.models import Count, DateTimeField, Q
from django.db.models.expressions import RawSQL

from ..models import OutboxMessage
from ..models.fields import now_sql
from ..models.outbox import PENDING


@dataclass(frozen=True, slots=True)
class Pending:
    """What has not left of a session: how many messages, how many of them are due, and
    how many of those somebody is sending."""

    count: int = 0
    due: int = 0
    leased: int = 0

    @classmethod
    def of(cls, using: str, session_id: uuid.UUID) -> Pending:
        """Ask the outbox."""
        now = RawSQL(  # noqa: S611 - a constant of ours
            now_sql(connections[using]), (), output_field=DateTimeField()
        )
        due = Q(due_at__lte=now)
        found = (
            OutboxMessage.objects.using(using)
            .filter(PENDING, session_id=session_id)
            .aggregate(
                count=Count("pk"),
                due=Count("pk", filter=due),
                leased=Count("pk", filter=due & Q(lease_until__gt=now)),
            )
        )
        return cls(**found)
