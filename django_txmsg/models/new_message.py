"""Storing: new rows of the outbox, many to a statement.

Written as each database stores them: the fields' own conversions would cost as much
again as all the rest.
"""

from __future__ import annotations

import datetime as dt
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from django.db import connections, models

from ..wire import JSON
from .fields import later_sql, later_value, now_sql, read_instant, read_uuid


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


class StoringManager(models.Manager):  # type: ignore[type-arg]  # not generic at run time
    """Inserts what is sent."""

    def store(
        self, rows: Sequence[NewMessage], *, new_ids: bool = False
    ) -> list[tuple[int, uuid.UUID, dt.datetime, str | None]]:
        """Insert rows, in a few statements, in their order.

        Returns id, message id, creation and, on PostgreSQL, the transaction's id of
        those inserted: a message id that is there already is left out, and spoils
        nothing. `new_ids` says that none can be.
        """
        connection, table = connections[self.db], self.model._meta.db_table
        as_json = connection.vendor == "postgresql" and len(rows) >= _WORTH_JSON
        most = connection.features.max_query_params or 32_000
        size = _JSON_ROWS if as_json else max(1, most // (len(_STORED) + 2))
        insert = _insert_json if as_json else _insert_values
        stored: list[tuple[int, uuid.UUID, dt.datetime, str | None]] = []
        with connection.cursor() as cursor:
            for start in range(0, len(rows), size):
                part = rows[start : start + size]
                sql, parameters = insert(connection, table, part)
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
_INSERT = f"INSERT INTO {{table}} ({_COLUMNS}, created_at, due_at, expires_at)"
_PLACEHOLDERS = ", ".join(["%s"] * (len(_STORED) - 2))
#: From how many rows on one JSON parameter is cheaper, and how many fit a statement.
_WORTH_JSON, _JSON_ROWS = 8, 1000
_ALL_IN_ONE = """
    WITH stored AS ({insert} RETURNING id, created_at, created_xid)
    SELECT array_agg(id ORDER BY id), min(created_at), min(created_xid::text)
    FROM stored
"""


def _insert_values(
    connection: Any, table: str, rows: Sequence[NewMessage]
) -> tuple[str, list[Any]]:
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
    return f"{_INSERT.format(table=table)} VALUES {', '.join(values)}", parameters


def _insert_json(
    connection: Any, table: str, rows: Sequence[NewMessage]
) -> tuple[str, list[Any]]:
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
        {_INSERT.format(table=table)}
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
