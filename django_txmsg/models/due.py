"""What is due in a database, for all waiting threads, in one statement (PostgreSQL)."""

from __future__ import annotations

from collections.abc import Collection

from django.db import connections

from ..rules import lease
from ..rules.outbox import PENDING
from ..runtime import notifications
from .outbox import OutboxMessage
from .queue import QueueMessage

_OUTBOX, _QUEUE = OutboxMessage._meta.db_table, QueueMessage._meta.db_table
# Each is the head of the index by which the rows are claimed.
_LOOK = f"""
    SELECT 'queue ' || name, EXTRACT(EPOCH FROM (
        SELECT available_at FROM {_QUEUE} WHERE queue = name
        ORDER BY available_at, id LIMIT 1) - statement_timestamp())
    FROM unnest(%s::text[]) name
    UNION ALL
    SELECT 'outbox ' || name, EXTRACT(EPOCH FROM (
        SELECT due_at FROM {_OUTBOX}
        WHERE {PENDING.sql()} AND broker = name AND service = ANY(%s::text[])
          AND {lease.FREE.sql(now="statement_timestamp()")}
        ORDER BY due_at, id LIMIT 1) - statement_timestamp())
    FROM unnest(%s::text[]) name
"""  # noqa: S608 - constants only


def seconds_until_due(
    using: str, topics: Collection[str], services: Collection[str] = ()
) -> dict[str, float]:
    """Return for each topic with rows when its first row is due, in seconds from now:
    zero or less if it is due already. From the outbox, only rows stored by one of
    `services` or by an earlier release."""
    queues, outboxes = [
        [one.removeprefix(kind) for one in topics if one.startswith(kind)]
        for kind in (notifications.queue(""), notifications.outbox(""))
    ]
    with connections[using].cursor() as cursor:
        cursor.execute(_LOOK, [queues, ["", *services], outboxes])
        return {
            topic: float(seconds)
            for topic, seconds in cursor.fetchall()
            if seconds is not None
        }
