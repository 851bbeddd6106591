"""Hop 7's record: which message ids a stage has received, and how often.

States: `received → processed | dead`. A received row with `due_at` is parked: the row
holds the whole message until the next attempt, and the broker no longer has the
message.
"""

from __future__ import annotations

import json
import uuid

from django.db import connections, models
from django.db.models import Q
from django.db.models.functions import Now

from .. import wire
from ..rules import Rule
from ..rules.inbox import BLOCKED, NEEDS_NEWER_CODE, OPEN
from .fields import not_blank, not_null
from .inbox_arrival import EMPTIED, ArrivalManager, processed_sql
from .inbox_order import OrderManager
from .turn import Turn, held_sql, turn_sql

#: The error of a revoked message, which counts as dead.
REVOKED = "revoked: no flow waits for it any more"
#: Its turn may not have come: only an ordered stage records keys.
_IN_ORDER = BLOCKED | (NEEDS_NEWER_CODE & Rule("{key} <> ''"))
#: Merged into the headers of a request that is revoked before its turn. Long past, so
#: that no clock that is set back lets the request run.
_EXPIRED = {wire.EXPIRES: "1970-01-01T00:00:00+00:00"}


class InboxManager(ArrivalManager):
    """Changes the states of received messages."""

    def start_again(self, pk: int, token: uuid.UUID | None = None) -> int:
        """Count another attempt of a message at a stage with blocking redelivery, where
        the worker keeps the message between two attempts. Returns the attempt's number,
        or 0 if another worker has claimed the message, or it is dead: an operator or
        its flow may have revoked it during the pause."""
        held, fence = held_sql(token)
        row = self._row(
            f"UPDATE {self._table} SET attempts = attempts + 1,"  # noqa: S608 - constants only
            f" started_at = {self._sql.now}"
            f" WHERE id = %s AND dead_at IS NULL{held}"
            " RETURNING attempts",
            [pk, *fence],
        )
        return int(row[0]) if row else 0

    def lock(self, ids: list[int]) -> set[int]:
        """Lock these rows until the transaction ends, and return the rows that still
        have to be processed. A worker with a duplicate of such a message waits for the
        lock."""
        connection = connections[self.db]
        condition, parameters = self._sql.ids("id", ids)
        condition += f" AND due_at IS NULL AND {OPEN.sql()}"
        # SQLite has no row locks: a write takes its only lock.
        sql = f"UPDATE {self._table} SET stage = stage WHERE {condition} RETURNING id"  # noqa: S608 - constants only
        if connection.vendor == "postgresql":
            sql = f"SELECT id FROM {self._table} WHERE {condition} FOR UPDATE"  # noqa: S608 - constants only
        return {pk for (pk,) in self._rows(sql, parameters)}

    def take(
        self, pk: int, token: uuid.UUID | None = None, turn: Turn | None = None
    ) -> bool:
        """Before the handler runs, mark one row as processed. The mark commits together
        with the handler's work. The statement also locks the row, so that a worker with
        a duplicate of the message waits.

        Returns False if the message is processed, dead, or parked under another lease
        than `token`. With `turn`, also returns False if the message must wait for its
        predecessor, or if another transaction has locked the message's key.
        """
        connection = connections[self.db]
        held, fence = held_sql(token)
        condition = held or " AND due_at IS NULL"
        follows = turn is not None and turn.after_id is not None
        for dead_too in (False, True) if follows else (False,):
            come, values = turn_sql(connection, turn, dead_too=dead_too)
            if self._changed(
                f"UPDATE {self._table} SET {processed_sql(self._sql)}"  # noqa: S608 - constants only
                f" WHERE id = %s{condition} AND {OPEN.sql()}{come}",
                [pk, *fence, *values],
            ):
                return True
        return False

    def finish(self, ids: list[int]) -> None:
        """Mark rows as processed. Call this in the transaction that contains the
        handlers' work."""
        condition, parameters = self._sql.ids("id", ids)
        self._changed(
            f"UPDATE {self._table} SET {processed_sql(self._sql)},"  # noqa: S608 - constants only
            " attempts = CASE attempts WHEN 0 THEN 1 ELSE attempts END"
            f" WHERE {condition} AND dead_at IS NULL",
            parameters,
        )

    def revoke(self, stage: str, message_id: uuid.UUID, destination: str = "") -> bool:
        """Revoke a message, so that the stage never processes it. The message may be
        parked or dead, or may not have arrived yet: then `destination` is where it was
        sent. If a worker is processing the message, this call waits until the worker
        has finished.

        A message that waits for its predecessor, or was parked for newer code before
        its turn, stays in the order of its key: its followers must not overtake the
        predecessor. At its turn it expires.

        If the message has already been processed, or was revoked before, change nothing
        and return False. Of several transactions that revoke a message at the same
        time, only one gets True.
        """
        connection = connections[self.db]
        now = self._sql.now
        pg = connection.vendor == "postgresql"
        merged = "headers || %s::jsonb" if pg else "json_patch(headers, %s)"
        if self._changed(
            f"UPDATE {self._table} SET revoked_at = {now}, last_error = %s,"  # noqa: S608 - constants only
            f" headers = {merged}, lease_until = NULL, lease_token = NULL"
            f" WHERE message_id = %s AND stage = %s AND {(_IN_ORDER & OPEN).sql()}"
            " AND revoked_at IS NULL",
            [REVOKED, json.dumps(_EXPIRED), message_id.hex, stage],
        ):
            return True
        revoked = self._changed(
            f"""
            INSERT INTO {self._table} AS i
                (stage, message_id, destination, correlation_id, service,
                 deliveries, attempts, first_received_at, last_received_at,
                 dead_at, revoked_at, last_error)
            VALUES (%s, %s, %s, '', '', 0, 0, {now}, {now}, {now}, {now}, %s)
            ON CONFLICT (message_id, stage) DO UPDATE SET
                dead_at = COALESCE(i.dead_at, excluded.dead_at),
                revoked_at = excluded.revoked_at,
                last_error = excluded.last_error,
                {EMPTIED}
            WHERE i.processed_at IS NULL AND i.revoked_at IS NULL
            """,  # noqa: S608 - constants only
            [stage, message_id.hex, destination, REVOKED],
        )
        if revoked:
            self.model.order.db_manager(self.db).wake(stage, [message_id])
        return bool(revoked)

    def mark_dead(
        self,
        pk: int,
        error: str,
        token: uuid.UUID | None = None,
        *,
        revoked: bool = False,
    ) -> int:
        """Mark a received message as dead, and clear its headers and body. The caller
        has stored both in a dead letter, except if the message is `revoked`: then there
        is no dead letter.

        Returns 0 if the message is already processed or dead. Also returns 0 if its
        lease, `token`, has ended and another worker has claimed the message. Without
        `token`, returns 0 if the message is parked: its row has the only copy.
        """
        rows = self.filter(pk=pk, processed_at=None, dead_at=None)
        held = {"due_at": None} if token is None else {"lease_token": token}
        rows = rows.filter(**held)
        changed: int = rows.update(
            dead_at=Now(),
            revoked_at=Now() if revoked else None,
            due_at=None,
            headers=None,
            body=None,
            lease_until=None,
            lease_token=None,
            waits_for=None,
            last_error=error,
        )
        return changed


class InboxMessage(models.Model):
    """One message at one stage. A unique constraint allows one row for each message and
    stage, so a stage recognises duplicates."""

    stage = models.CharField(max_length=255)
    message_id = models.UUIDField()
    destination = models.CharField(max_length=255)
    correlation_id = models.CharField(max_length=255, default="")
    #: The service that sent the message.
    service = models.CharField(max_length=255, default="")
    #: When its sender stored the message.
    created_at = models.DateTimeField(null=True)
    deliveries = models.PositiveIntegerField(default=1)
    #: Started executions of the handler.
    attempts = models.PositiveIntegerField(default=0)
    first_received_at = models.DateTimeField(db_default=Now())
    last_received_at = models.DateTimeField(db_default=Now())
    #: When the last attempt began.
    started_at = models.DateTimeField(null=True)
    processed_at = models.DateTimeField(null=True)
    #: When it was processed, if more than an hour after its receipt.
    late_at = models.DateTimeField(null=True)
    dead_at = models.DateTimeField(null=True)
    #: When the flow that asked for it revoked it; it is never processed.
    revoked_at = models.DateTimeField(null=True)
    due_at = models.DateTimeField(null=True)
    lease_until = models.DateTimeField(null=True)
    lease_token = models.UUIDField(null=True)
    headers = models.JSONField(null=True)
    body = models.BinaryField(null=True)
    last_error = models.TextField(default="")
    #: The message type that the parking code could not read.
    needs_type = models.CharField(max_length=255, db_default="")
    #: The oldest version of the code that can read it.
    needs_version = models.PositiveIntegerField(null=True)
    #: The key of a message that waits at an ordered stage.
    key = models.CharField(max_length=255, db_default="")
    #: The predecessor in the order of its key.
    waits_for = models.UUIDField(null=True)
    waits_since = models.DateTimeField(null=True)
    #: The predecessor's place in the order of its key.
    after_at = models.DateTimeField(null=True)
    #: The slot that it waits for, at a stage with a rate.
    slot = models.BigIntegerField(null=True)

    objects = InboxManager()
    #: Of an ordered stage: whose turn it is.
    order = OrderManager()

    class Meta:
        permissions = [
            ("stop_inboxmessage", "Can stop messages that a handler is processing")
        ]
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
            not_null("dead_at", "txmsg_inbox_dead"),
            # With the index of `last_received_at`, finds what was processed lately.
            not_null("late_at", "txmsg_inbox_late"),
            not_blank("correlation_id", "txmsg_inbox_correlation"),
        ]

    def __str__(self) -> str:
        return f"{self.message_id} at {self.stage}"

    @property
    def state(self) -> str:
        """The state, computed from the instants: received, processed or dead."""
        if self.processed_at is not None:
            return "processed"
        return "received" if self.dead_at is None else "dead"
