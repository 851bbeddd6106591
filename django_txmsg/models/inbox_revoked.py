"""Messages that are never to be processed any more, whether they have come or not."""

from __future__ import annotations

import uuid

from django.db import connections, models

from .fields import now_sql, prepared

#: Why a revoked message is dead.
REVOKED = "revoked: nobody waits for it any more"


class RevokingManager(models.Manager):  # type: ignore[type-arg]  # not generic at run time
    """Decides, in one statement, between a message and whoever takes it back."""

    def revoke(self, stage: str, message_id: uuid.UUID) -> bool:
        """Let a stage never process a message: one that has not come, that is parked,
        or that is dead. Waits for whoever has it in hand.

        Returns False, and changes nothing, when it is processed.
        """
        connection = connections[self.db]
        now, table = now_sql(connection), self.model._meta.db_table
        # One that is processed keeps what it has.
        done = "CASE WHEN i.processed_at IS NULL THEN {} ELSE {} END"
        with connection.cursor() as cursor:
            cursor.execute(
                f"""
                INSERT INTO {table} AS i
                    (stage, message_id, destination, correlation_id, service,
                     deliveries, attempts, first_received_at, last_received_at,
                     dead_at, revoked_at, last_error)
                VALUES (%s, %s, '', '', '', 0, 0, {now}, {now}, {now}, {now}, %s)
                ON CONFLICT (message_id, stage) DO UPDATE SET
                    dead_at = {done.format(f"COALESCE(i.dead_at, {now})", "NULL")},
                    revoked_at = {done.format(now, "NULL")},
                    last_error = {done.format("excluded.last_error", "i.last_error")},
                    due_at = NULL, headers = NULL, body = NULL,
                    lease_until = NULL, lease_token = NULL,
                    key = '', waits_for = NULL
                RETURNING processed_at
                """,  # noqa: S608 - constants only
                [
                    stage,
                    prepared(self.model, "message_id", message_id, connection),
                    REVOKED,
                ],
            )
            return cursor.fetchone()[0] is None
