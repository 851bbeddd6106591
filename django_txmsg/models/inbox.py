"""Hop 7's memory: which message ids a stage has seen, and how often.

States: `received → processed | dead`. A received row with `due_at` is parked: it holds
the whole message until its next attempt, and the broker has nothing of it any more.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from django.db import connections, models
from django.db.models import Q
from django.db.models.functions import Now

from .fields import XidField, ids_sql, no_wait_sql, now_sql, prepared
from .inbox_parked import ParkedManager
from .inbox_seen import SEEN_COLUMNS, Seen, read_seen

if TYPE_CHECKING:
    from ..envelope.message import Message


class InboxState(models.TextChoices):
    """Where a received message is; computed from its instants."""

    RECEIVED = "received", "received"
    PROCESSED = "processed", "processed"
    DEAD = "dead", "dead"


class InboxManager(ParkedManager):
    """The transitions of received messages, each in a single statement."""

    def record(
        self,
        stage: str,
        messages: Sequence[Message],
        *,
        idempotent: bool = False,
        together: bool = False,
    ) -> dict[uuid.UUID, Seen]:
        """Count an arrival of each message, and an attempt for each that is to run.

        Commits at once, so that a message that kills its worker is still counted; on
        PostgreSQL without waiting for the disk, since losing a count costs no more
        than one attempt. `idempotent` stages run again what they have processed.
        Of messages that are to run `together` none is counted an attempt: should their
        worker die, nobody could tell whose it was, and each comes again alone.
        """
        connection = connections[self.db]
        sql, parameters = self._recording(
            stage, messages, idempotent, 0 if together else 1
        )
        no_wait, waits_not = no_wait_sql(connection)
        if no_wait:
            sql = f"WITH {no_wait} {sql}, {waits_not}"
        with connection.cursor() as cursor:
            cursor.execute(sql, parameters)
            seen = [read_seen(row[:8]) for row in cursor.fetchall()]
        return {one.message_id: one for one in seen}

    def record_and_begin(
        self, stage: str, message: Message, isolation: str | None, mark: str
    ) -> tuple[Seen, bool]:
        """Record an arrival, commit that, begin the stage's transaction and take the
        row in it: `record()` and `take()` in one round trip instead of three.

        Returns what was recorded, and whether the row is taken. The transaction is
        open in any case: `Demarcation` takes it over, or the caller rolls it back. For
        a connection of psycopg 3 that is outside of any block (`begins_early()`).
        When it fails, `recorded()` tells by the `mark` whether the first half stayed.
        """
        connection = connections[self.db]
        recording, parameters = self._recording(stage, [message], False, 1)
        # OPTIONS' level is the driver's to say, and the driver says no BEGIN here.
        own = getattr(connection.connection, "isolation_level", None)
        if isolation is None and own is not None:
            isolation = own.name.replace("_", " ")
        level = f" ISOLATION LEVEL {isolation}" if isolation else ""
        with connection.cursor() as cursor:
            cursor.execute(
                f"BEGIN; SET LOCAL synchronous_commit = off; {recording},"  # noqa: S608 - constants only
                f" set_config('{_MARK}', %s, false); COMMIT;"
                f" BEGIN{level};"
                f" UPDATE {_TABLE} SET {_PROCESSED.format(now=now_sql(connection))}"
                f" WHERE message_id = %s AND stage = %s AND due_at IS NULL AND {_OPEN}",
                [*parameters, mark, message.id, stage],
            )
            for _passed in ("BEGIN", "SET"):
                cursor.nextset()
            seen = read_seen(cursor.fetchone()[:8])
            while cursor.nextset():
                pass
            return seen, bool(cursor.rowcount)

    def recorded(self, stage: str, message: Message, mark: str) -> Seen | None:
        """Return what `record_and_begin()` has recorded before it failed, if it has:
        a setting of the session that was made in a transaction ends with that, unless
        it commits."""
        now = now_sql(connections[self.db])
        with connections[self.db].cursor() as cursor:
            cursor.execute(
                f"SELECT {SEEN_COLUMNS.format(now=now)} FROM {_TABLE}"  # noqa: S608 - constants only
                " WHERE message_id = %s AND stage = %s"
                f" AND current_setting('{_MARK}', true) = %s",
                [message.id, stage, mark],
            )
            row = cursor.fetchone()
        return None if row is None else read_seen(row)

    def _recording(
        self, stage: str, messages: Sequence[Message], idempotent: bool, counted: int
    ) -> tuple[str, list[Any]]:
        connection = connections[self.db]
        now = now_sql(connection)
        given = {message.id: message for message in messages}
        rows = ", ".join(
            [f"(%s, %s, %s, %s, %s, %s, 1, {counted}, {now}, {now}, {now}, '')"]
            * len(given)
        )
        parameters: list[Any] = []
        for message in given.values():
            parameters += [
                stage,
                prepared(self.model, "message_id", message.id, connection),
                message.destination,
                message.correlation_id or "",
                (message.service or "")[:255],
                prepared(self.model, "created_at", message.created_at, connection),
            ]
        again = "i.processed_at IS NOT NULL" if idempotent else "FALSE"
        runs = "i.dead_at IS NULL AND i.due_at IS NULL"
        if not idempotent:
            runs += " AND i.processed_at IS NULL"
        sql = f"""
            INSERT INTO {_TABLE} AS i
                (stage, message_id, destination, correlation_id, service, created_at,
                 deliveries, attempts, first_received_at, last_received_at,
                 started_at, last_error)
            VALUES {rows}
            ON CONFLICT (message_id, stage) DO UPDATE SET
                deliveries = i.deliveries + 1, last_received_at = {now},
                attempts = CASE WHEN {again} THEN 1
                                WHEN {runs} THEN i.attempts + {counted}
                                ELSE i.attempts END,
                started_at = CASE WHEN {runs} THEN {now} ELSE i.started_at END
            RETURNING {SEEN_COLUMNS.format(now=now)}
        """  # noqa: S608 - constants only
        return sql, parameters

    def start_again(self, pk: int, token: uuid.UUID | None = None) -> int:
        """Count another attempt in place, as blocking redelivery makes. Returns it, or
        0 when the message is somebody else's by now."""
        connection = connections[self.db]
        held, fence = self.fence(token)
        with connection.cursor() as cursor:
            cursor.execute(
                f"UPDATE {_TABLE} SET attempts = attempts + 1,"  # noqa: S608 - constants only
                f" started_at = {now_sql(connection)} WHERE id = %s{held}"
                " RETURNING attempts",
                [pk, *fence],
            )
            row = cursor.fetchone()
        return int(row[0]) if row else 0

    def unrecord(self, ids: list[int], *, attempts: int = 0) -> None:
        """Take back an arrival that is to be recorded anew, and so many attempts that
        were counted with it and not started."""
        connection = connections[self.db]
        condition, parameters = ids_sql(connection, "id", ids)
        with connection.cursor() as cursor:
            cursor.execute(
                f"UPDATE {_TABLE} SET deliveries = deliveries - 1,"  # noqa: S608 - constants only
                f" attempts = attempts - %s WHERE {condition}",
                [attempts, *parameters],
            )

    def lock(self, ids: list[int]) -> set[int]:
        """Take rows for this transaction. A concurrent copy waits here until the
        transaction ends. Returns those that are still to be processed."""
        connection = connections[self.db]
        condition, parameters = ids_sql(connection, "id", ids)
        condition += f" AND due_at IS NULL AND {_OPEN}"
        # SQLite has no row locks: there, writing takes the one lock there is.
        sql = f"UPDATE {_TABLE} SET stage = stage WHERE {condition} RETURNING id"  # noqa: S608 - constants only
        if connection.features.has_select_for_update:
            sql = f"SELECT id FROM {_TABLE} WHERE {condition} FOR UPDATE"  # noqa: S608 - constants only
        with connection.cursor() as cursor:
            cursor.execute(sql, parameters)
            return {pk for (pk,) in cursor.fetchall()}

    def take(self, pk: int, token: uuid.UUID | None = None) -> bool:
        """Lock one row by marking it processed, before its work: one statement for
        both. The mark commits with the work or not at all. A concurrent copy waits
        here. False when the message is processed, parked or dead by now.

        `token` is the lease of a parked message.
        """
        connection = connections[self.db]
        condition, parameters = "due_at IS NULL", [pk]
        if token is not None:
            condition = "lease_token = %s"
            parameters = [pk, prepared(self.model, "lease_token", token, connection)]
        with connection.cursor() as cursor:
            cursor.execute(
                f"UPDATE {_TABLE} SET {_PROCESSED.format(now=now_sql(connection))}"  # noqa: S608 - constants only
                f" WHERE id = %s AND {condition} AND {_OPEN}",
                parameters,
            )
            return bool(cursor.rowcount)

    def finish(self, ids: list[int]) -> None:
        """Mark rows processed now, in the transaction that holds their work."""
        connection = connections[self.db]
        condition, parameters = ids_sql(connection, "id", ids)
        with connection.cursor() as cursor:
            cursor.execute(
                f"UPDATE {_TABLE} SET {_PROCESSED.format(now=now_sql(connection))},"  # noqa: S608 - constants only
                " attempts = CASE attempts WHEN 0 THEN 1 ELSE attempts END"
                f" WHERE {condition} AND dead_at IS NULL",
                parameters,
            )

    def mark_dead(self, pk: int, error: str, token: uuid.UUID | None = None) -> int:
        """Give a received message up. Its bytes are in the dead letter.

        Returns 0 when it is processed or dead by now, or when `token`, the lease it
        was held under, has ended and somebody else has it.
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
    """One message as one stage knows it. The unique key is what drops duplicates."""

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
    created_xid = XidField()
    changed_xid = XidField()

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


_TABLE = InboxMessage._meta.db_table
_MARK = "txmsg.arrival"
_OPEN = "processed_at IS NULL AND dead_at IS NULL"
_PROCESSED = (
    "processed_at = {now}, due_at = NULL, headers = NULL, body = NULL,"
    " lease_until = NULL, lease_token = NULL"
)
