"""The tables of the HTTP outbox: how sessions ended, idempotency keys, and the identity
of the database."""

from __future__ import annotations

import datetime as dt
import uuid

from django.db import connections, models, transaction
from django.db.models.functions import Now

from .fields import SqlManager, limit_waits

# The outcome of an outbox session whose transaction id cannot be queried.
#
# States: none `→ committed | tombstone`. The session's own transaction writes the
# one, a control message that has waited too long writes the other, and the primary
# key permits only the first of them.


class SessionStatus(models.TextChoices):
    """How a session ended."""

    COMMITTED = "committed", "committed"
    TOMBSTONE = "tombstone", "given up"


#: How long writing a tombstone waits, in seconds, for a commit in progress.
PATIENCE = 0.2


class SessionManager(SqlManager):
    """Records how a session ends: committed or given up. Each method executes
    one INSERT, which fails if the session has already ended in the other way."""

    def commit(self, session_id: uuid.UUID) -> bool:
        """Record, within the session's transaction, that the session committed.

        Returns False if the session has a tombstone. Then the transaction must not
        commit.
        """
        return self._insert(session_id, SessionStatus.COMMITTED)

    def give_up(self, session_id: uuid.UUID) -> bool:
        """Write a tombstone, so that the session cannot commit any more. Returns False
        if the session has already committed.

        Raises OperationalError if the session's transaction is committing and takes
        longer than PATIENCE. The one thread that checks sessions has to go on soon.
        """
        connection = connections[self.db]
        if connection.vendor == "postgresql":
            with transaction.atomic(using=self.db):
                limit_waits(connection, PATIENCE)
                return self._insert(session_id, SessionStatus.TOMBSTONE)
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA busy_timeout")
            (usual,) = cursor.fetchone()
            cursor.execute(f"PRAGMA busy_timeout = {int(PATIENCE * 1000)}")
            try:
                return self._insert(session_id, SessionStatus.TOMBSTONE)
            finally:
                cursor.execute(f"PRAGMA busy_timeout = {usual}")

    def given_up(self, since: dt.timedelta) -> int:
        """Return the number of tombstones whose age is at most `since`."""
        recent = self.filter(created_at__gte=Now() - since)
        return recent.filter(status=SessionStatus.TOMBSTONE).count()

    def _insert(self, session_id: uuid.UUID, status: SessionStatus) -> bool:
        inserted = self._changed(
            f"INSERT INTO {self._table} (session_id, status)"  # noqa: S608 - constants only
            f" VALUES (%s, %s) ON CONFLICT DO NOTHING",
            [session_id.hex, status.value],
        )
        return inserted == 1


class SessionRecord(models.Model):
    """An outbox session that has ended. A row is written only if the receiver of the
    session's control message cannot query the outcome of the transaction, and has to
    wait for the row."""

    session_id = models.UUIDField(primary_key=True)
    status = models.CharField(max_length=16, choices=SessionStatus.choices)
    created_at = models.DateTimeField(db_default=Now())

    objects = SessionManager()

    class Meta:
        indexes = [models.Index(fields=["created_at"], name="txmsg_session_created")]

    def __str__(self) -> str:
        return f"{self.session_id} {self.status}"


# A request executed under an Idempotency-Key, and its response.


class IdempotencyKey(models.Model):
    """An idempotency key of one caller. The row is written in the request's own
    transaction, so it commits if and only if the request's effects commit."""

    caller = models.CharField(max_length=255)
    key = models.CharField(max_length=255)
    fingerprint = models.CharField(
        max_length=64,
        help_text="Digest of method, path and body: a key is for one request.",
    )
    status_code = models.PositiveSmallIntegerField(null=True)
    headers = models.JSONField(default=list)
    body = models.BinaryField(null=True, help_text="Empty for a streaming response.")
    session_id = models.UUIDField(
        null=True, help_text="The session under which its messages are stored."
    )
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["caller", "key"], name="txmsg_idempotency_key"
            )
        ]
        indexes = [models.Index(fields=["created_at"], name="txmsg_idempotency_when")]

    def __str__(self) -> str:
        return self.key


# A database's identity, and since when it has it: a row for each start of its server.
#
# A copy of a database has its original's rows, and gets an identity of its own when
# it is first used: from then on the two can be told apart.


class DatabaseIdentity(models.Model):
    """An identity that this database has had, and when it was first seen."""

    identity = models.CharField(max_length=255, unique=True)
    seen_at = models.DateTimeField(db_default=Now())

    class Meta:
        verbose_name_plural = "database identities"

    def __str__(self) -> str:
        return self.identity
