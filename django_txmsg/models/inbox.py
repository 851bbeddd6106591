"""Hop 7's record: which message ids a stage has received, and how often.

States: `received → processed | dead`. A received row with `due_at` is parked: the row
holds the whole message until the next attempt, and the broker no longer has the
message.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.db import connections, models
from django.db.models import Q
from django.db.models.functions import Now

from .. import rules, wire
from ..django_internals import raw
from ..rules import Rule
from ..rules.inbox import BLOCKED, NEEDS_NEWER_CODE, OPEN
from .claiming import bounds, claim_sql
from .fields import (
    Holds,
    SqlManager,
    began_sql,
    ids_sql,
    later_sql,
    no_wait_sql,
    now_sql,
    read_instant,
    read_uuid,
    skip_locked_sql,
)
from .inbox_order import OrderManager, Turn, held_sql, turn_sql

if TYPE_CHECKING:
    from ..envelope.message import Message

#: Empties a row that has ended, and that nobody claims any more.
_EMPTIED = (
    "due_at = NULL, headers = NULL, body = NULL,"
    " lease_until = NULL, lease_token = NULL, key = '', waits_for = NULL"
)
#: The session setting that proves the first half of `record_and_begin()`.
_MARK = "txmsg.arrival"

#: The columns for `read_record()`, in SQL with the clock's expression as `now`. The
#: instants themselves: some SQLite versions return a wrong `IS NOT NULL` of them.
RECORD_COLUMNS = (
    "id, message_id, attempts, deliveries, processed_at, dead_at, due_at, {now}"
)
#: The error of a revoked message, which counts as dead.
REVOKED = "revoked: no flow waits for it any more"
#: Its turn may not have come: only an ordered stage records keys.
_IN_ORDER = BLOCKED | (NEEDS_NEWER_CODE & Rule("{key} <> ''"))
#: Merged into the headers of a request that is revoked before its turn. Long past, so
#: that no clock that is set back lets the request run.
_EXPIRED = {wire.EXPIRES: "1970-01-01T00:00:00+00:00"}


@dataclass(frozen=True, slots=True)
class InboxRecord:
    """The state of a message's inbox row just after the arrival of the message was
    recorded."""

    id: int
    message_id: uuid.UUID
    attempt: int
    deliveries: int
    processed: bool
    dead: bool
    parked: bool
    now: dt.datetime

    @property
    def settled(self) -> bool:
        """Whether the message is processed, dead or parked. If so, the consumer drops
        this arrival."""
        return self.processed or self.dead or self.parked

    def attempted(self, attempt: int) -> InboxRecord:
        """Return a copy of the record with this attempt number."""
        return dataclasses.replace(self, attempt=attempt)


#: Message types by name, each with the version of this code.
Reads = Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Parked:
    """A due parked message that one worker holds under a lease."""

    record: InboxRecord
    destination: str
    headers: dict[str, str]
    body: bytes
    #: Seconds from one renewal of the lease to its end.
    lease: float
    #: An instant of `time.monotonic()` before the lease was granted.
    since: float
    #: The slot that it waited for, at a stage with a rate, and the key of its line.
    slot: int | None = None
    key: str = ""


class InboxState(models.TextChoices):
    """The state of a received message, computed from its instants."""

    RECEIVED = "received", "received"
    PROCESSED = "processed", "processed"
    DEAD = "dead", "dead"


class InboxManager(SqlManager):
    """Changes the states of received messages."""

    def record(
        self,
        stage: str,
        messages: Sequence[Message],
        *,
        idempotent: bool = False,
        together: bool = False,
    ) -> dict[uuid.UUID, InboxRecord]:
        """Count one more arrival of each message, and one more attempt of each message
        that the stage will process.

        The statement commits immediately, so that a message that kills its worker is
        still counted. On PostgreSQL the commit does not wait for the disk, so a crash
        of the server may lose the rows. To find out later whether a row was lost, call
        `recall()`.

        Pass `idempotent` if the stage processes a message again that it has already
        processed. Pass `together` if the stage processes the messages in one
        transaction. Then no attempt is counted: if the worker dies, any of the messages
        may be the cause. After the worker's death, each message is redelivered and
        processed alone.
        """
        connection = connections[self.db]
        sql, parameters = self._recording(
            stage, messages, idempotent, 0 if together else 1
        )
        no_wait, waits_not = no_wait_sql(connection)
        if no_wait:
            sql = f"WITH {no_wait} {sql}, {waits_not}"
        records = [read_record(row[:8]) for row in self._rows(sql, parameters)]
        return {one.message_id: one for one in records}

    def record_and_begin(
        self,
        stage: str,
        message: Message,
        isolation: str | None,
        mark: str,
        turn: Turn | None = None,
    ) -> tuple[InboxRecord, bool]:
        """Do `record()` and `take()` in one round trip: record the message's arrival
        and commit, then begin the stage's transaction and take the row.

        Returns the record, and whether the row was taken. With `turn`, the row is taken
        only if the message's predecessor is processed and no other transaction has
        locked the key. The transaction stays open even if the row was not taken: the
        caller must pass the transaction to a `StageTransaction` or roll it back.

        If the call fails, pass the same `mark` to `recorded()`, which returns the
        record if the first commit succeeded. Requires psycopg 3, and a connection that
        is outside any transaction (`begins_early()`).
        """
        connection = connections[self.db]
        recording, parameters = self._recording(stage, [message], False, 1)
        # The driver sets OPTIONS' isolation level in its BEGIN, which is not used here.
        own = getattr(raw(connection), "isolation_level", None)
        if isolation is None and own is not None:
            isolation = own.name.replace("_", " ")
        level = f" ISOLATION LEVEL {isolation}" if isolation else ""
        come, values = turn_sql(connection, turn, dead_too=False)
        with connection.cursor() as cursor:
            cursor.execute(
                f"BEGIN; SET LOCAL synchronous_commit = off; {recording},"  # noqa: S608 - constants only
                f" set_config('{_MARK}', %s, false); COMMIT;"
                f" BEGIN{level};"
                f" UPDATE {self._table} SET {_processed_sql(connection)}"
                f" WHERE message_id = %s AND stage = %s AND due_at IS NULL"
                f" AND {OPEN.sql()}{come}",
                [*parameters, mark, message.id, stage, *values],
            )
            for _passed in ("BEGIN", "SET"):
                cursor.nextset()
            record = read_record(cursor.fetchone()[:8])
            while cursor.nextset():
                pass
            return record, bool(cursor.rowcount)

    def recorded(self, stage: str, message: Message, mark: str) -> InboxRecord | None:
        """Roll back what `record_and_begin()` began before it failed. Return the record
        that it committed, or None if it committed nothing. Pass the same `mark` as to
        `record_and_begin()`: the transaction that stores the record also stores the
        mark in a session setting. If this transaction is rolled back, so is the
        setting.

        One round trip does both, because after a rollback a pooler may continue in
        another session.
        """
        found = self._finding(
            f"message_id = %s AND stage = %s AND current_setting('{_MARK}', true) = %s"
        )
        with connections[self.db].cursor() as cursor:
            cursor.execute(f"ROLLBACK; {found}", [message.id, stage, mark])
            cursor.nextset()
            row = cursor.fetchone()
        return None if row is None else read_record(row)

    def recall(self, pk: int, stage: str, message_id: uuid.UUID) -> InboxRecord | None:
        """Return the record of a message whose arrival was recorded earlier, or None if
        the row was lost in a crash of the server. After a crash another message may
        have the primary key `pk`, so the stage and the message id must match too."""
        sql = self._finding("id = %s AND stage = %s AND message_id = %s")
        row = self._row(sql, [pk, stage, message_id.hex])
        return None if row is None else read_record(row)

    def _finding(self, condition: str) -> str:
        columns = RECORD_COLUMNS.format(now=now_sql(connections[self.db]))
        return f"SELECT {columns} FROM {self._table} WHERE {condition}"  # noqa: S608 - constants only

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
                message.id.hex,
                message.destination,
                message.correlation_id or "",
                (message.service or "")[:255],
                connection.ops.adapt_datetimefield_value(message.created_at),
            ]
        again = "i.processed_at IS NOT NULL" if idempotent else "FALSE"
        runs = "i.dead_at IS NULL AND i.due_at IS NULL"
        if not idempotent:
            runs += " AND i.processed_at IS NULL"
        sql = f"""
            INSERT INTO {self._table} AS i
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
            RETURNING {RECORD_COLUMNS.format(now=now)}
        """  # noqa: S608 - constants only
        return sql, parameters

    def unrecord(self, pk: int) -> None:
        """Subtract one arrival and one attempt from a row. The caller then records the
        same arrival again."""
        self.filter(pk=pk).update(
            deliveries=models.F("deliveries") - 1, attempts=models.F("attempts") - 1
        )

    def park(
        self,
        pk: int,
        *,
        delay: float,
        headers: Mapping[str, str],
        body: bytes,
        error: str,
        token: uuid.UUID | None = None,
        needs: tuple[str, int] | None = None,
        slot: int | None = None,
        key: str = "",
        turn: Turn | None = None,
        uncounted: int = 0,
    ) -> bool:
        """Keep the whole message in its row until it is due again in `delay` seconds,
        and subtract `uncounted` from its number of attempts.

        `needs` names a message type and the oldest version of the code that can read
        it: workers with older code do not claim the message. `slot` is the slot for
        which the message waits, in the line of `key`. Pass the message's `turn` if its
        stage is ordered, so that its followers do not overtake the message.

        Returns False if the message is already processed or dead. Also returns False if
        its lease, `token`, has ended and another worker has claimed the message.
        """
        connection = connections[self.db]
        held, fence = held_sql(token)
        line, place = "", list[Any]()
        if slot is not None:
            line, place = ", key = %s", [key]
        if turn is not None:
            after_at = connection.ops.adapt_datetimefield_value(turn.after_at)
            line, place = ", key = %s, after_at = %s", [turn.key, after_at]
        return bool(
            self._changed(
                f"UPDATE {self._table} SET due_at = {later_sql(connection)},"  # noqa: S608 - constants only
                " headers = %s, body = %s, last_error = %s, lease_until = NULL,"
                " lease_token = NULL, needs_type = %s, needs_version = %s, slot = %s,"
                f" attempts = attempts - %s{line} WHERE id = %s"
                f" AND {OPEN.sql()}{held}",
                [
                    delay,
                    json.dumps(dict(headers)),
                    body,
                    error,
                    *(needs or ("", None)),
                    slot,
                    uncounted,
                    *place,
                    pk,
                    *fence,
                ],
            )
        )

    def due_stages(self, stages: Mapping[str, Reads | None]) -> set[str]:
        """Return the stages that have a parked message which is due, unclaimed and
        readable by this code."""
        connection = connections[self.db]
        now = began_sql(connection)
        queries: list[str] = []
        parameters: list[Any] = []
        for stage, reads in stages.items():
            readable, versions = _readable("", reads)
            queries.append(
                f"SELECT %s AS stage WHERE EXISTS (SELECT 1 FROM {self._table}"  # noqa: S608 - constants only
                f" WHERE stage = %s AND due_at <= {now}{readable}"
                f" AND {rules.NOT_LEASED.sql(now=now)})"
            )
            parameters += [stage, stage, *versions]
        rows = self._rows(" UNION ALL ".join(queries), parameters)
        return {stage for (stage,) in rows}

    def claim_parked(
        self, stage: str, token: uuid.UUID, lease: float, reads: Reads | None = None
    ) -> Parked | None:
        """Claim one due parked message of a stage, and count the attempt.

        `reads` lists the types and versions of messages that this code reads; None
        means all.
        """
        readable, versions = _readable("c.", reads)
        connection = connections[self.db]
        now = now_sql(connection)
        since = time.monotonic()
        sql = claim_sql(
            connection,
            self._table,
            due="due_at",
            where=f"c.stage = %s AND c.due_at <= {began_sql(connection)} AND"
            f" {rules.NOT_LEASED.sql('c', now=began_sql(connection))}{readable}",
            assign=f"lease_until = {later_sql(connection)}, lease_token = %s,"
            f" attempts = attempts + 1, started_at = {now}",
            returning=f"{RECORD_COLUMNS.format(now=now)}, destination, headers, body,"
            " slot, key",
        )
        row = self._row(
            sql,
            [
                stage,
                *versions,
                *bounds(1),
                lease,
                token.hex,
            ],
        )
        if row is None:
            return None
        *record, destination, headers, body, slot, key = row
        return Parked(
            record=read_record(record),
            destination=destination,
            headers=json.loads(headers) if isinstance(headers, str) else headers,
            body=bytes(body),
            lease=lease,
            since=since,
            slot=slot,
            key=key,
        )

    def next_due(self, stage: str) -> float | None:
        """Return the seconds until a stage's next parked message is due, or None if
        there is none. Messages that a worker has claimed, or that need newer code, are
        ignored. So are messages that have been due for more than a second: a worker
        that processes one in its transaction cannot renew the lease."""
        free = Holds(rules.NOT_LEASED, now=Now())
        lately = Now() - dt.timedelta(seconds=1)
        rows = self.filter(free, stage=stage, due_at__gt=lately, needs_version=None)
        first = rows.order_by("due_at", "id").annotate(now=Now())
        found = first.values_list("due_at", "now").first()
        return None if found is None else (found[0] - found[1]).total_seconds()

    def extend(self, pk: int, token: uuid.UUID, lease: float) -> None:
        """Extend the lease of a claimed message to `lease` seconds from now. A locked
        row is skipped, because no other worker can claim it anyway."""
        connection = connections[self.db]
        self._changed(
            f"UPDATE {self._table} SET lease_until = {later_sql(connection)}"  # noqa: S608 - constants only
            f" WHERE id IN (SELECT id FROM {self._table} WHERE id = %s"
            f" AND lease_token = %s {skip_locked_sql(connection)})",
            [
                lease,
                pk,
                token.hex,
            ],
        )

    def unpark(self, pk: int, token: uuid.UUID, *, attempts: int = 1) -> None:
        """Release a claimed parked message, and subtract the `attempts` that were
        counted but not made. The message is due immediately."""
        self.filter(pk=pk, lease_token=token).update(
            lease_until=None, lease_token=None, attempts=models.F("attempts") - attempts
        )

    def start_again(self, pk: int, token: uuid.UUID | None = None) -> int:
        """Count another attempt of a message at a stage with blocking redelivery, where
        the worker keeps the message between two attempts. Returns the attempt's number,
        or 0 if another worker has claimed the message."""
        connection = connections[self.db]
        held, fence = held_sql(token)
        row = self._row(
            f"UPDATE {self._table} SET attempts = attempts + 1,"  # noqa: S608 - constants only
            f" started_at = {now_sql(connection)} WHERE id = %s{held}"
            " RETURNING attempts",
            [pk, *fence],
        )
        return int(row[0]) if row else 0

    def lock(self, ids: list[int]) -> set[int]:
        """Lock these rows until the transaction ends, and return the rows that still
        have to be processed. A worker with a duplicate of such a message waits for the
        lock."""
        connection = connections[self.db]
        condition, parameters = ids_sql(connection, "id", ids)
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
                f"UPDATE {self._table} SET {_processed_sql(connection)}"  # noqa: S608 - constants only
                f" WHERE id = %s{condition} AND {OPEN.sql()}{come}",
                [pk, *fence, *values],
            ):
                return True
        return False

    def finish(self, ids: list[int]) -> None:
        """Mark rows as processed. Call this in the transaction that contains the
        handlers' work."""
        connection = connections[self.db]
        condition, parameters = ids_sql(connection, "id", ids)
        self._changed(
            f"UPDATE {self._table} SET {_processed_sql(connection)},"  # noqa: S608 - constants only
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

        If the message has already been processed, change nothing and return False.
        """
        connection = connections[self.db]
        now = now_sql(connection)
        pg = connection.vendor == "postgresql"
        merged = "headers || %s::jsonb" if pg else "json_patch(headers, %s)"
        if self._changed(
            f"UPDATE {self._table} SET revoked_at = {now}, last_error = %s,"  # noqa: S608 - constants only
            f" headers = {merged}, lease_until = NULL, lease_token = NULL"
            f" WHERE message_id = %s AND stage = %s AND {(_IN_ORDER & OPEN).sql()}",
            [REVOKED, json.dumps(_EXPIRED), message_id.hex, stage],
        ):
            return True
        # A processed one keeps its values.
        done = "CASE WHEN i.processed_at IS NULL THEN {} ELSE {} END"
        (processed,) = self._row(
            f"""
            INSERT INTO {self._table} AS i
                (stage, message_id, destination, correlation_id, service,
                 deliveries, attempts, first_received_at, last_received_at,
                 dead_at, revoked_at, last_error)
            VALUES (%s, %s, %s, '', '', 0, 0, {now}, {now}, {now}, {now}, %s)
            ON CONFLICT (message_id, stage) DO UPDATE SET
                dead_at = {done.format(f"COALESCE(i.dead_at, {now})", "NULL")},
                revoked_at = {done.format(now, "NULL")},
                last_error = {done.format("excluded.last_error", "i.last_error")},
                {_EMPTIED}
            RETURNING processed_at
            """,  # noqa: S608 - constants only
            [stage, message_id.hex, destination, REVOKED],
        )
        if processed is None:
            self.model.order.db_manager(self.db).wake(stage, [message_id])
        return processed is None

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
        lease, `token`, has ended and another worker has claimed the message.
        """
        rows = self.filter(pk=pk, processed_at=None, dead_at=None)
        if token is not None:
            rows = rows.filter(lease_token=token)
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


def _processed_sql(connection: Any) -> str:
    """Return SQL that marks a row as processed. If the message has waited here for more
    than an hour, the SQL also sets `late_at`."""
    now = now_sql(connection)
    hour_ago = f"{now} - interval '1 hour'"
    if connection.vendor == "sqlite":
        hour_ago = now.replace("'now'", "'now', '-1 hour'")
    late = f"CASE WHEN last_received_at < {hour_ago} THEN {now} END"
    return f"processed_at = {now}, late_at = {late}, {_EMPTIED}"


def read_record(row: Sequence[Any]) -> InboxRecord:
    """Return the record from a row with the columns RECORD_COLUMNS."""
    pk, message_id, attempts, deliveries, processed, dead, parked, now = row
    return InboxRecord(
        id=pk,
        message_id=read_uuid(message_id),
        attempt=attempts,
        deliveries=deliveries,
        processed=processed is not None,
        dead=dead is not None,
        parked=parked is not None,
        now=read_instant(now),
    )


def _readable(of: str, reads: Reads | None) -> tuple[str, list[Any]]:
    """Return an SQL condition and its parameters. The condition is true if this code
    can read a row. `reads` lists the types and versions that the code reads. If `reads`
    is None, the code reads every message and the condition is empty."""
    if reads is None:
        return "", []
    one = f" OR ({of}needs_type = %s AND {of}needs_version <= %s)"
    known = [value for pair in reads for value in pair]
    return f" AND ({of}needs_version IS NULL{one * len(reads)})", known


class InboxMessage(models.Model):
    """One message at one stage. A unique constraint allows one row for each message and
    stage, so a stage recognises duplicates."""

    stage = models.CharField(max_length=255)
    message_id = models.UUIDField()
    destination = models.CharField(max_length=255)
    correlation_id = models.CharField(max_length=255, default="")
    service = models.CharField(
        max_length=255,
        default="",
        help_text="The service that sent the message.",
    )
    created_at = models.DateTimeField(
        null=True, help_text="When its sender stored the message."
    )
    deliveries = models.PositiveIntegerField(default=1)
    attempts = models.PositiveIntegerField(
        default=0, help_text="Started executions of the handler."
    )
    first_received_at = models.DateTimeField(db_default=Now())
    last_received_at = models.DateTimeField(db_default=Now())
    started_at = models.DateTimeField(
        null=True, help_text="When the last attempt began."
    )
    processed_at = models.DateTimeField(null=True)
    late_at = models.DateTimeField(
        null=True,
        help_text="When it was processed, if more than an hour after its receipt.",
    )
    dead_at = models.DateTimeField(null=True)
    revoked_at = models.DateTimeField(
        null=True,
        help_text="When the flow that asked for it revoked it; it is never processed.",
    )
    due_at = models.DateTimeField(
        null=True, help_text="Parked until then; empty: not parked."
    )
    lease_until = models.DateTimeField(null=True)
    lease_token = models.UUIDField(null=True)
    headers = models.JSONField(null=True)
    body = models.BinaryField(null=True)
    last_error = models.TextField(default="")
    needs_type = models.CharField(
        max_length=255,
        db_default="",
        help_text="The message type that the parking code could not read.",
    )
    needs_version = models.PositiveIntegerField(
        null=True,
        help_text="The oldest version of the code that can read it.",
    )
    key = models.CharField(
        max_length=255,
        db_default="",
        help_text="The key of a message that waits at an ordered stage.",
    )
    waits_for = models.UUIDField(
        null=True, help_text="The predecessor in the order of its key."
    )
    waits_since = models.DateTimeField(null=True)
    after_at = models.DateTimeField(
        null=True,
        help_text="The predecessor's place in the order of its key.",
    )
    slot = models.BigIntegerField(
        null=True,
        help_text="The slot that it waits for, at a stage with a rate.",
    )

    objects = InboxManager()
    #: Of an ordered stage: whose turn it is.
    order = OrderManager()

    class Meta:
        verbose_name = "inbox message"
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
            models.Index(
                fields=["dead_at"],
                condition=Q(dead_at__isnull=False),
                name="txmsg_inbox_dead",
            ),
            models.Index(
                # With the index of `last_received_at`, finds what was processed lately.
                fields=["late_at"],
                condition=Q(late_at__isnull=False),
                name="txmsg_inbox_late",
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
