"""The outcome of an outbox session whose transaction id cannot be queried.

States: none `→ committed | tombstone`. The session's own transaction writes the one, a
control message that has waited too long writes the other, and the primary key permits
only the first of them.
"""

from __future__ import annotations

import datetime as dt
import uuid
from typing import Any

from django.db import connections, models, transaction
from django.db.models.functions import Now

from .fields import limit_waits


class SessionStatus(models.TextChoices):
    """How a session ended."""

    COMMITTED = "committed", "committed"
    TOMBSTONE = "tombstone", "given up"


#: How long writing a tombstone waits, in milliseconds, for a commit in progress.
PATIENCE_MS = 200


class SessionManager(models.Manager):  # type: ignore[type-arg]  # not generic at run time
    """The two outcomes, each a single INSERT that fails if the other exists."""

    def commit(self, session_id: uuid.UUID) -> bool:
        """Record, within the session's transaction, that it committed.

        Returns False if a tombstone exists: the transaction must not commit.
        """
        return self._insert(session_id, SessionStatus.COMMITTED)

    def give_up(self, session_id: uuid.UUID) -> bool:
        """Write a tombstone. Returns False if the session has committed.

        Raises OperationalError if that is unknown after PATIENCE_MS, because the
        session's transaction is just committing.
        """
        connection = connections[self.db]
        if connection.vendor == "postgresql":
            with transaction.atomic(using=self.db), connection.cursor() as cursor:
                limit_waits(connection, PATIENCE_MS / 1000)
                return self._insert(session_id, SessionStatus.TOMBSTONE)
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA busy_timeout")
            (usual,) = cursor.fetchone()
            cursor.execute(f"PRAGMA busy_timeout = {PATIENCE_MS}")
            try:
                return self._insert(session_id, SessionStatus.TOMBSTONE)
            finally:
                cursor.execute(f"PRAGMA busy_timeout = {usual}")

    def given_up(self, since: dt.timedelta) -> int:
        """Count the tombstones written in the last period of this length."""
        recent = self.filter(created_at__gte=Now() - since)
        return recent.filter(status=SessionStatus.TOMBSTONE).count()

    def _insert(self, session_id: uuid.UUID, status: SessionStatus) -> bool:
        connection = connections[self.db]
        field: Any = self.model._meta.get_field("session_id")
        with connection.cursor() as cursor:
            cursor.execute(
                f"INSERT INTO {self.model._meta.db_table} (session_id, status)"  # noqa: S608 - constants only
                f" VALUES (%s, %s) ON CONFLICT DO NOTHING",
                [field.get_db_prep_value(session_id, connection), status.value],
            )
            return bool(cursor.rowcount == 1)


class SessionRecord(models.Model):
    """An outbox session that has ended. Written only if the receiver finds its commit
    status by waiting."""

    session_id = models.UUIDField(primary_key=True)
    status = models.CharField(max_length=16, choices=SessionStatus.choices)
    created_at = models.DateTimeField(db_default=Now())

    objects = SessionManager()

    class Meta:
        verbose_name = "session record"
        indexes = [models.Index(fields=["created_at"], name="txmsg_session_created")]

    def __str__(self) -> str:
        return f"{self.session_id} {self.status}"
