"""Hop 7's record: which message ids a stage has received, and how often.

States: `received → processed | dead`. A received row with `due_at` is parked: it holds
the whole message until its next attempt, and the broker does not have it any more.
"""

from __future__ import annotations

import uuid

from django.db import connections, models
from django.db.models import Q
from django.db.models.functions import Now

from ..rules.inbox import OPEN
from .fields import ids_sql, now_sql, prepared
from .inbox_record import PROCESSED
from .inbox_release import ReleaseManager
from .inbox_turn import Turn, turn_sql


class InboxState(models.TextChoices):
    """The state of a received message, computed from its instants."""

    RECEIVED = "received", "received"
    PROCESSED = "processed", "processed"
    DEAD = "dead", "dead"


class InboxManager(ReleaseManager):
    """The transitions of received messages, each in a single statement."""

    def start_again(self, pk: int, token: uuid.UUID | None = None) -> int:
        """Count another attempt in place, for blocking redelivery. Returns it, or 0 if
        another worker has the message."""
        connection = connections[self.db]
        held, fence = self.fence(token)
        with connection.cursor() as cursor:
            cursor.execute(
                f"UPDATE {self._table} SET attempts = attempts + 1,"  # noqa: S608 - constants only
                f" started_at = {now_sql(connection)} WHERE id = %s{held}"
                " RETURNING attempts",
                [pk, *fence],
            )
            row = cursor.fetchone()
        return int(row[0]) if row else 0

    def lock(self, ids: list[int]) -> set[int]:
        """Lock rows for this transaction. A concurrent copy waits here until the
        transaction ends. Returns the rows that are still to be processed."""
        connection = connections[self.db]
        condition, parameters = ids_sql(connection, "id", ids)
        condition += f" AND due_at IS NULL AND {OPEN.sql()}"
        # SQLite has no row locks: a write takes its only lock.
        sql = f"UPDATE {self._table} SET stage = stage WHERE {condition} RETURNING id"  # noqa: S608 - constants only
        if connection.vendor == "postgresql":
            sql = f"SELECT id FROM {self._table} WHERE {condition} FOR UPDATE"  # noqa: S608 - constants only
        with connection.cursor() as cursor:
            cursor.execute(sql, parameters)
            return {pk for (pk,) in cursor.fetchall()}

    def take(
        self, pk: int, token: uuid.UUID | None = None, turn: Turn | None = None
    ) -> bool:
        """Lock one row by marking it processed, before its work: one statement for
        both. The mark commits with the work or not at all. A concurrent copy waits
        here. Returns False if the message is already processed, parked or dead.

        `token` is the lease of a parked message. With `turn` the row is taken only if
        its predecessor lets it go, and no other transaction has a message of its key.
        """
        connection = connections[self.db]
        condition, parameters = "due_at IS NULL", [pk]
        if token is not None:
            condition = "lease_token = %s"
            parameters = [pk, prepared(self.model, "lease_token", token, connection)]
        follows = turn is not None and turn.after_id is not None
        for dead_too in (False, True) if follows else (False,):
            come, values = turn_sql(self.model, connection, turn, dead_too=dead_too)
            with connection.cursor() as cursor:
                cursor.execute(
                    f"UPDATE {self._table} SET"  # noqa: S608 - constants only
                    f" {PROCESSED.format(now=now_sql(connection))}"
                    f" WHERE id = %s AND {condition} AND {OPEN.sql()}{come}",
                    [*parameters, *values],
                )
                if cursor.rowcount:
                    return True
        return False

    def finish(self, ids: list[int]) -> None:
        """Mark rows as processed now, in the transaction that holds their work."""
        connection = connections[self.db]
        condition, parameters = ids_sql(connection, "id", ids)
        with connection.cursor() as cursor:
            cursor.execute(
                f"UPDATE {self._table} SET {PROCESSED.format(now=now_sql(connection))},"  # noqa: S608 - constants only
                " attempts = CASE attempts WHEN 0 THEN 1 ELSE attempts END"
                f" WHERE {condition} AND dead_at IS NULL",
                parameters,
            )

    def mark_dead(self, pk: int, error: str, token: uuid.UUID | None = None) -> int:
        """Mark a received message as dead. Its bytes are in the dead letter.

        Returns 0 if it is already processed or dead, or if its lease, `token`, has
        ended and another worker has it.
        """
        rows = self.filter(pk=pk, processed_at=None, dead_at=None)
        if token is not None:
            rows = rows.filter(lease_token=token)
        changed: int = rows.update(
            dead_at=Now(),
            due_at=None,
            headers=None,
            body=None,
            lease_until=None,
            lease_token=None,
            last_error=error,
        )
        return changed


class InboxMessage(models.Model):
    """One message at one stage. The unique key drops duplicates."""

    id = models.BigAutoField(primary_key=True)
    stage = models.CharField(max_length=255)
    message_id = models.UUIDField()
    destination = models.CharField(max_length=255)
    correlation_id = models.CharField(max_length=255, default="", blank=True)
    service = models.CharField(
        max_length=255, default="", blank=True, help_text="Who sent the message."
    )
    created_at = models.DateTimeField(
        null=True, blank=True, help_text="When its sender stored the message."
    )
    deliveries = models.PositiveIntegerField(default=1)
    attempts = models.PositiveIntegerField(
        default=0, help_text="Started executions of the handler."
    )
    first_received_at = models.DateTimeField(db_default=Now())
    last_received_at = models.DateTimeField(db_default=Now())
    started_at = models.DateTimeField(
        null=True, blank=True, help_text="When the last attempt began."
    )
    processed_at = models.DateTimeField(null=True, blank=True)
    dead_at = models.DateTimeField(null=True, blank=True)
    due_at = models.DateTimeField(
        null=True, blank=True, help_text="Parked until then; empty when not parked."
    )
    lease_until = models.DateTimeField(null=True, blank=True)
    lease_token = models.UUIDField(null=True, blank=True)
    headers = models.JSONField(null=True, blank=True)
    body = models.BinaryField(null=True, blank=True)
    last_error = models.TextField(default="", blank=True)
    needs_type = models.CharField(
        max_length=255,
        db_default="",
        blank=True,
        help_text="The message type that the code which parked it could not read.",
    )
    needs_version = models.PositiveIntegerField(
        null=True, blank=True, help_text="The oldest version of it that can."
    )
    key = models.CharField(
        max_length=255,
        db_default="",
        blank=True,
        help_text="Of what an ordered stage has put aside.",
    )
    waits_for = models.UUIDField(
        null=True, blank=True, help_text="The message whose turn is before this one's."
    )
    waits_since = models.DateTimeField(null=True, blank=True)
    after_at = models.DateTimeField(
        null=True, blank=True, help_text="The place of that one in its key's order."
    )

    objects = InboxManager()

    class Meta:
        verbose_name = "inbox message"
        constraints = [
            # Message id first: a look-up by id alone uses the same index.
            models.UniqueConstraint(
                fields=["message_id", "stage"], name="txmsg_inbox_message"
            ),
            models.CheckConstraint(
                condition=Q(processed_at__isnull=True) | Q(dead_at__isnull=True),
                name="txmsg_inbox_one_end",
            ),
            models.CheckConstraint(
                condition=Q(due_at__isnull=True)
                | Q(
                    body__isnull=False,
                    headers__isnull=False,
                    processed_at__isnull=True,
                    dead_at__isnull=True,
                ),
                name="txmsg_inbox_parked_is_whole",
            ),
        ]
        indexes = [
            models.Index(
                fields=["stage", "due_at", "id"],
                condition=Q(due_at__isnull=False),
                name="txmsg_inbox_parked",
            ),
            models.Index(
                fields=["stage", "first_received_at"],
                condition=Q(due_at__isnull=False) & Q(needs_version__isnull=False),
                name="txmsg_inbox_newer",
            ),
            models.Index(
                fields=["stage", "waits_for"],
                condition=Q(waits_for__isnull=False),
                name="txmsg_inbox_waits",
            ),
            models.Index(
                fields=["stage", "key", "after_at"],
                # Only unprocessed rows: if the index covered `processed_at`, every
                # update that ends a message would have to leave its page.
                condition=~Q(key=""),
                name="txmsg_inbox_key",
            ),
            models.Index(
                fields=["dead_at"],
                condition=Q(dead_at__isnull=False),
                name="txmsg_inbox_dead",
            ),
            models.Index(
                fields=["correlation_id"],
                condition=~Q(correlation_id=""),
                name="txmsg_inbox_correlation",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.message_id} at {self.stage}"

    @property
    def state(self) -> InboxState:
        """Received, processed or dead."""
        if self.processed_at is not None:
            return InboxState.PROCESSED
        return InboxState.RECEIVED if self.dead_at is None else InboxState.DEAD
