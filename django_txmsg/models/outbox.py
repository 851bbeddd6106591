"""Hop 2: a message stored with the business data, and its way out.

States: `pending → dispatched | dead`. A pending row leaves by proof only: a receipt, a
definite rejection, or its own expiry. Nothing deletes it before.
"""

from __future__ import annotations

import datetime as dt
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from django.db import connections, models
from django.db.models import Q
from django.db.models.functions import Now

from ..wire import JSON, format_instant
from .fields import (
    XidField,
    ids_sql,
    instant_text_sql,
    later_sql,
    later_value,
    no_wait_sql,
    now_sql,
    read_instant,
    read_uuid,
    skip_locked_sql,
)

PENDING = Q(dispatched_at__isnull=True, dead_at__isnull=True)


class OutboxState(models.TextChoices):
    """Where a stored message is; computed from its instants."""

    PENDING = "pending", "pending"
    DISPATCHED = "dispatched", "dispatched"
    DEAD = "dead", "dead"


@dataclass(slots=True)
class NewMessage:
    """A message about to be stored, due in `delay` seconds, expiring after `expiry`.

    A model instance would cost more than all the rest of storing a thousand of them.
    """

    message_id: uuid.UUID
    destination: str
    content_type: str
    body: bytes
    broker: str = "default"
    replay_id: str = ""
    key: str = ""
    correlation_id: str = ""
    session_id: uuid.UUID | None = None
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    expiry: float | None = None
    expires_at: dt.datetime | None = None


@dataclass(frozen=True, slots=True)
class Claimed:
    """A pending row that one relay holds until its lease ends."""

    id: int
    message_id: uuid.UUID
    destination: str
    key: str
    correlation_id: str
    headers: dict[str, str]
    content_type: str
    body: bytes
    expires_at: dt.datetime | None
    attempts: int
    expired: bool
    #: When it was stored, as its header says it.
    created: str
    #: When the first of those claimed together was due, as its database writes it.
    floor: str


class OutboxManager(models.Manager):  # type: ignore[type-arg]  # not generic at run time
    """The transitions of many rows at once, each in a single statement."""

    def store(
        self, rows: Sequence[NewMessage], *, new_ids: bool = False
    ) -> list[tuple[int, uuid.UUID, dt.datetime, str | None]]:
        """Insert rows, in a few statements, in their order.

        Returns id, message id, creation and, on PostgreSQL, the transaction's id of
        those inserted: a message id that is there already is left out, and spoils
        nothing. `new_ids` says that none can be.
        """
        connection = connections[self.db]
        as_json = connection.vendor == "postgresql" and len(rows) >= _WORTH_JSON
        most = connection.features.max_query_params or 32_000
        size = _JSON_ROWS if as_json else max(1, most // (len(_STORED) + 2))
        insert = _insert_json if as_json else _insert_values
        stored: list[tuple[int, uuid.UUID, dt.datetime, str | None]] = []
        with connection.cursor() as cursor:
            for start in range(0, len(rows), size):
                part = rows[start : start + size]
                sql, parameters = insert(connection, part)
                if new_ids and as_json:
                    # Ids ascend in the order of the rows; to return and to read three
                    # columns of each would cost as much as a third of the INSERT.
                    cursor.execute(_ALL_IN_ONE.format(insert=sql), parameters)
                    ids, created_at, xid = cursor.fetchone()
                    stored += [
                        (pk, row.message_id, created_at, xid)
                        for pk, row in zip(ids, part, strict=True)
                    ]
                    continue
                if not new_ids:
                    sql += " ON CONFLICT DO NOTHING"
                cursor.execute(
                    f"{sql} RETURNING id, message_id, created_at, created_xid",
                    parameters,
                )
                stored += [
                    (pk, read_uuid(message_id), read_instant(created_at), xid)
                    for pk, message_id, created_at, xid in cursor.fetchall()
                ]
        return stored

    def claim(
        self,
        *,
        broker: str,
        token: uuid.UUID,
        lease: float,
        limit: int,
        ids: list[int] | None = None,
        session_id: uuid.UUID | None = None,
        floor: str | None = None,
    ) -> list[Claimed]:
        """Take due rows for `lease` seconds, oldest first; no other relay gets them.

        A row with a key is taken only together with all earlier pending rows of that
        key; one that is due later than its followers, for another try, goes before
        them all the same. `ids` or `session_id` narrow the choice. `floor` skips rows
        due before it: a busy relay need not walk again over what it has just settled.
        """
        connection = connections[self.db]
        now = now_sql(connection)
        narrow = ""
        parameters: list[Any] = [broker]
        if ids is not None:
            condition, values = ids_sql(connection, "c.id", ids)
            narrow += f" AND {condition}"
            parameters += values
        if session_id is not None:
            narrow += " AND c.session_id = %s"
            parameters.append(_prepared("session_id", session_id, connection))
        if floor is not None:
            narrow += " AND c.due_at >= %s"
            parameters.append(floor)
        no_wait, waits_not = no_wait_sql(connection)
        first_due = "min(due_at)"
        if connection.vendor == "postgresql":
            first_due += "::text"
        sql = f"""
            WITH {no_wait and no_wait + ","} picked AS MATERIALIZED (
                SELECT c.id, c.due_at FROM {_TABLE} c
                WHERE c.dispatched_at IS NULL AND c.dead_at IS NULL
                  AND c.broker = %s AND c.due_at <= {now}
                  AND (c.lease_until IS NULL OR c.lease_until < {now}) {narrow}
                  AND (c.key = '' OR NOT EXISTS (
                      SELECT 1 FROM {_TABLE} e
                      WHERE e.key = c.key AND e.id < c.id AND e.broker = c.broker
                        AND e.dispatched_at IS NULL AND e.dead_at IS NULL
                        AND (e.due_at > c.due_at OR e.lease_until >= {now})))
                ORDER BY c.due_at, c.id LIMIT %s {skip_locked_sql(connection)})
            UPDATE {_TABLE} AS o
            SET lease_until = {later_sql(connection)}, lease_token = %s
            WHERE o.id IN (SELECT id FROM picked) AND {waits_not}
              AND (o.key = '' OR NOT EXISTS (
                  SELECT 1 FROM {_TABLE} e
                  WHERE e.key = o.key AND e.id < o.id AND e.broker = o.broker
                    AND e.dispatched_at IS NULL AND e.dead_at IS NULL
                    AND e.id NOT IN (SELECT id FROM picked)))
            RETURNING {_CLAIMED_COLUMNS}, COALESCE(expires_at <= {now}, FALSE),
                {instant_text_sql(connection, "created_at")},
                (SELECT {first_due} FROM picked)
        """  # noqa: S608 - constants only
        parameters += [
            limit,
            later_value(connection, lease),
            _prepared("lease_token", token, connection),
        ]
        with connection.cursor() as cursor:
            cursor.execute(sql, parameters)
            return sorted(map(_claimed, cursor.fetchall()), key=lambda row: row.id)

    def mark_dispatched(self, ids: list[int], token: uuid.UUID) -> int:
        """Settle rows whose receipts came. Returns how many were still this lease's."""
        return self._leased(
            ids, token, "dispatched_at = {now}, lease_until = NULL, lease_token = NULL"
        )

    def release(self, ids: list[int], token: uuid.UUID) -> int:
        """Give rows back untouched, since the broker could not be asked."""
        return self._leased(ids, token, "lease_until = NULL, lease_token = NULL")

    def reschedule(self, pk: int, token: uuid.UUID, *, delay: float, error: str) -> int:
        """Count a failed dispatch and make the row due again in `delay` seconds."""
        connection = connections[self.db]
        return self._leased(
            [pk],
            token,
            "attempts = attempts + 1, lease_until = NULL, lease_token = NULL,"
            f" last_error = %s, due_at = {later_sql(connection)}",
            [error, later_value(connection, delay)],
        )

    def mark_dead(self, pk: int, token: uuid.UUID, *, error: str) -> int:
        """End a row that the broker refuses, or that has expired."""
        return self._leased(
            [pk],
            token,
            "dead_at = {now}, attempts = attempts + 1, lease_until = NULL,"
            " lease_token = NULL, last_error = %s",
            [error],
        )

    def _leased(
        self,
        ids: list[int],
        token: uuid.UUID,
        assignments: str,
        values: Sequence[Any] = (),
    ) -> int:
        """Change rows that are still pending and of this lease: the fence."""
        connection = connections[self.db]
        condition, id_values = ids_sql(connection, "id", ids)
        assignments = assignments.replace("{now}", now_sql(connection))
        # What was settled and is lost in a crash is sent again, with the same id.
        no_wait, waits_not = no_wait_sql(connection)
        with_no_wait = no_wait and f"WITH {no_wait}"
        with connection.cursor() as cursor:
            cursor.execute(
                f"{with_no_wait} UPDATE {_TABLE} SET {assignments} WHERE {condition}"  # noqa: S608 - constants only
                " AND lease_token = %s AND dispatched_at IS NULL AND dead_at IS NULL"
                f" AND {waits_not}",
                [*values, *id_values, _prepared("lease_token", token, connection)],
            )
            changed: int = cursor.rowcount
        return changed


class OutboxMessage(models.Model):
    """A message that leaves if, and only if, the transaction that stored it commits."""

    id = models.BigAutoField(primary_key=True)
    message_id = models.UUIDField()
    replay_id = models.CharField(
        max_length=64,
        default="",
        blank=True,
        help_text="What stored this id again: a dead letter's redelivery, a replay.",
    )
    broker = models.CharField(max_length=64, default="default")
    destination = models.CharField(max_length=255)
    key = models.CharField(max_length=255, default="", blank=True)
    correlation_id = models.CharField(max_length=255, default="", blank=True)
    session_id = models.UUIDField(
        null=True,
        blank=True,
        help_text="The HTTP session or the stage's run that stored this message.",
    )
    headers = models.JSONField(default=dict)
    content_type = models.CharField(max_length=255)
    body = models.BinaryField()
    created_at = models.DateTimeField(db_default=Now())
    due_at = models.DateTimeField(db_default=Now())
    expires_at = models.DateTimeField(null=True, blank=True)
    attempts = models.PositiveIntegerField(default=0)
    lease_until = models.DateTimeField(null=True, blank=True)
    lease_token = models.UUIDField(null=True, blank=True)
    last_error = models.TextField(default="", blank=True)
    dispatched_at = models.DateTimeField(null=True, blank=True)
    dead_at = models.DateTimeField(null=True, blank=True)
    created_xid = XidField()
    changed_xid = XidField()

    objects = OutboxManager()

    class Meta:
        verbose_name = "outbox message"
        constraints = [
            models.UniqueConstraint(
                fields=["message_id", "replay_id"], name="txmsg_outbox_message"
            ),
            models.CheckConstraint(
                condition=Q(dispatched_at__isnull=True) | Q(dead_at__isnull=True),
                name="txmsg_outbox_one_end",
            ),
            models.CheckConstraint(
                condition=Q(dead_at__isnull=True) | ~Q(last_error=""),
                name="txmsg_outbox_dead_says_why",
            ),
        ]
        indexes = [
            # The claim walks this one: only pending rows, in the order they are due.
            models.Index(
                fields=["due_at", "id"], condition=PENDING, name="txmsg_outbox_due"
            ),
            models.Index(
                fields=["key", "id"],
                condition=PENDING & ~Q(key=""),
                name="txmsg_outbox_key",
            ),
            models.Index(
                fields=["session_id"],
                condition=PENDING & Q(session_id__isnull=False),
                name="txmsg_outbox_session",
            ),
            models.Index(
                fields=["correlation_id"],
                condition=~Q(correlation_id=""),
                name="txmsg_outbox_correlation",
            ),
            models.Index(
                fields=["dead_at"],
                condition=Q(dead_at__isnull=False),
                name="txmsg_outbox_dead",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.message_id} to {self.destination}"

    @property
    def state(self) -> OutboxState:
        """Pending, dispatched or dead."""
        if self.dispatched_at is not None:
            return OutboxState.DISPATCHED
        return OutboxState.PENDING if self.dead_at is None else OutboxState.DEAD


_TABLE = OutboxMessage._meta.db_table
_STORED = (
    "message_id",
    "replay_id",
    "broker",
    "destination",
    "key",
    "correlation_id",
    "session_id",
    "headers",
    "content_type",
    "body",
    "attempts",
    "last_error",
)
_COLUMNS = ", ".join(_STORED)
_PLACEHOLDERS = ", ".join(["%s"] * (len(_STORED) - 2))
_INSERT = f"INSERT INTO {_TABLE} ({_COLUMNS}, created_at, due_at, expires_at)"
#: From how many rows on one JSON parameter is cheaper, and how many fit a statement.
_WORTH_JSON, _JSON_ROWS = 8, 1000
_CLAIMED_COLUMNS = ", ".join(list(Claimed.__slots__)[:-3])


_ALL_IN_ONE = """
    WITH stored AS ({insert} RETURNING id, created_at, created_xid)
    SELECT array_agg(id ORDER BY id), min(created_at), min(created_xid::text)
    FROM stored
"""


def _insert_values(
    connection: Any, rows: Sequence[NewMessage]
) -> tuple[str, list[Any]]:
    # Written as each database stores them: the fields' own conversions would cost as
    # much again as all the rest.
    native = connection.vendor == "postgresql"
    now, later = now_sql(connection), later_sql(connection)
    values: list[str] = []
    parameters: list[Any] = []
    for row in rows:
        session_id = row.session_id
        parameters += [
            row.message_id if native else row.message_id.hex,
            row.replay_id,
            row.broker,
            row.destination,
            row.key,
            row.correlation_id,
            session_id if native or session_id is None else session_id.hex,
            json.dumps(row.headers) if row.headers else "{}",
            row.content_type,
            row.body,
        ]
        times = [now, now, "NULL"]
        if row.delay:
            times[1] = later
            parameters.append(later_value(connection, row.delay))
        if row.expiry is not None:
            times[2] = later
            parameters.append(later_value(connection, row.expiry))
        values.append(f"({_PLACEHOLDERS}, 0, '', {', '.join(times)})")
    return f"{_INSERT} VALUES {', '.join(values)}", parameters


def _insert_json(connection: Any, rows: Sequence[NewMessage]) -> tuple[str, list[Any]]:
    """One parameter instead of thousands, which cost more to quote than to insert."""
    records = [
        {
            "n": number,
            "message_id": str(row.message_id),
            "replay_id": row.replay_id,
            "broker": row.broker,
            "destination": row.destination,
            "key": row.key,
            "correlation_id": row.correlation_id,
            "session_id": None if row.session_id is None else str(row.session_id),
            "headers": row.headers,
            "content_type": row.content_type,
            "text": (text := _json_text(row)),
            "body": None if text is not None else row.body.hex(),
            "delay": row.delay,
            "expiry": row.expiry,
        }
        for number, row in enumerate(rows)
    ]
    now = now_sql(connection)
    sql = f"""
        {_INSERT}
        SELECT message_id, replay_id, broker, destination, key, correlation_id,
            session_id, headers, content_type,
            COALESCE(convert_to(text, 'UTF8'), decode(body, 'hex')), 0, '',
            {now}, {now} + make_interval(secs => delay),
            {now} + make_interval(secs => expiry)
        FROM json_to_recordset(%s::json) AS r(n int, message_id uuid, replay_id text,
            broker text, destination text, key text, correlation_id text,
            session_id uuid, headers jsonb, content_type text, text text, body text,
            delay float8, expiry float8)
        ORDER BY n
    """  # noqa: S608 - constants only
    return sql, [json.dumps(records)]


def _json_text(row: NewMessage) -> str | None:
    """Return a JSON body as text, half as long as hexadecimal; None for what a text
    cannot be, whatever its content type says."""
    if row.content_type != JSON or b"\0" in row.body:
        return None
    try:
        return row.body.decode()
    except UnicodeDecodeError:
        return None


def _prepared(name: str, value: Any, connection: Any) -> Any:
    field: Any = OutboxMessage._meta.get_field(name)
    return field.get_db_prep_value(value, connection, prepared=False)


def _claimed(row: Sequence[Any]) -> Claimed:
    pk, message_id, destination, key, correlation_id, headers, kind, body, *rest = row
    expires_at, attempts, expired, created, floor = rest
    return Claimed(
        id=pk,
        message_id=read_uuid(message_id),
        destination=destination,
        key=key,
        correlation_id=correlation_id,
        headers={} if headers == "{}" else json.loads(headers),
        content_type=kind,
        body=bytes(body),
        expires_at=read_instant(expires_at),
        attempts=attempts,
        expired=bool(expired),
        created=_instant_text(created),
        floor=floor,
    )


def _instant_text(value: Any) -> str:
    ready = isinstance(value, str) and value.endswith("+00:00")
    return value if ready else format_instant(read_instant(value))
