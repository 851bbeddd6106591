"""Inserts new rows into the outbox, many with each statement.

Values are written in each database's own format, because the conversions of Django's
fields would cost as much as the rest of the insertion.
"""

from __future__ import annotations

import datetime as dt
import json
import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from django.db import IntegrityError, connections, transaction

from ..django_internals import djangos_errors
from .fields import OneOf, Sql, SqlManager, read_instant, read_uuid

#: The origin of a message id. If a "caller" id is stored already, that is an error. A
#: "derived" id is stored already when its stage is run again by force.
Origin = Literal["new", "caller", "derived"]
#: What follows if a pending message has the unique key of a new one.
OnConflict = Literal["error", "skip", "replace"]
#: How long a message holds its unique key.
UniqueUntil = Literal["left", "processed"]


@dataclass(slots=True)
class NewMessage:
    """A message to be stored. `delay` and `expiry` are seconds from now.

    This class is not a model: to create model instances for a thousand messages would
    cost more than all other steps of storing the messages.
    """

    message_id: uuid.UUID
    destination: str
    content_type: str
    body: bytes
    broker: str = "default"
    #: The service whose relay sends it.
    service: str = ""
    replay_id: str = ""
    key: str = ""
    correlation_id: str = ""
    session_id: uuid.UUID | None = None
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    expiry: float | None = None
    expires_at: dt.datetime | None = None
    unique: str = ""
    #: What follows if its unique key is taken.
    on_conflict: OnConflict = "error"
    unique_until: UniqueUntil = "left"
    origin: Origin = "new"
    #: The body as its sender passed it.
    given: object = None
    #: Ends the span of its creation, once it is committed.
    committed: Callable[[], None] | None = None


class Stored(NamedTuple):
    """The primary key and creation time of each inserted row, by message id.
    `transaction` is the transaction's id, if requested. `locked_at` is the database's
    clock after a lock was taken."""

    created: dict[uuid.UUID, tuple[int, dt.datetime]]
    transaction: str | None = None
    locked_at: dt.datetime | None = None


class StoringManager(SqlManager):
    """Inserts messages into the outbox."""

    def store(
        self,
        rows: Sequence[NewMessage],
        *,
        new_ids: bool = False,
        tell_transaction: bool = False,
        lock: int | None = None,
    ) -> Stored:
        """Insert rows, in the given order, inside the open transaction. Returns the
        inserted rows.

        A row whose message id is stored already is skipped without an error. Pass
        `new_ids` if all ids are new. If `tell_transaction` is set, the result on
        PostgreSQL contains the transaction's id. If `lock` is the number of an advisory
        lock of PostgreSQL, each statement takes that lock in shared mode and also
        returns the database's clock. The lock is held until the transaction ends or its
        savepoint is rolled back.
        """
        connection = connections[self.db]
        unique = bool([row for row in rows if row.unique])
        if len(rows) >= _WORTH_COPY and not unique:
            copied = self._try_copy(rows, new_ids, lock)
            if copied is not None:
                return copied
        returning = ["id", _CREATED.get(connection.vendor, "created_at")]
        if tell_transaction and connection.vendor == "postgresql":
            returning.append(_TRANSACTION)
        # With a single row, the answer needs no assignment to rows.
        returning += ["message_id"] * (len(rows) > 1 or not new_ids)
        returning += [_LOCKED_AT] * (lock is not None)
        conflict = ""
        if not new_ids:
            # A primary key that exists is an error, because it does not mean that the
            # message is stored. PostgreSQL takes only one target, and a unique key is
            # a second one: then `sending/storing.py` looks for the message.
            target = "" if unique else " (message_id, replay_id)"
            conflict = f"ON CONFLICT{target} DO NOTHING"
        return self._insert(rows, conflict, returning, unique, lock)

    def _try_copy(
        self, rows: Sequence[NewMessage], new_ids: bool, lock: int | None
    ) -> Stored | None:
        """Insert rows by COPY. Insert nothing and return None if the database cannot do
        this, or if a message id is stored already."""
        connection, table = connections[self.db], self._table
        with connection.cursor() as cursor:
            if not hasattr(cursor, "copy"):
                return None
            if lock is not None:
                cursor.execute(f"SELECT {_LOCKED}", [lock])
            if new_ids:
                return _copy(connection, cursor, table, rows)
            with suppress(IntegrityError), transaction.atomic(using=self.db):
                return _copy(connection, cursor, table, rows)
        return None

    def _insert(
        self,
        rows: Sequence[NewMessage],
        conflict: str,
        returning: list[str],
        unique: bool,
        lock: int | None,
    ) -> Stored:
        into = _INTO_UNIQUE if unique else _INTO
        stored: dict[uuid.UUID, tuple[int, dt.datetime]] = {}
        xid: str | None = None
        locked_at: float | None = None
        size = _MOST_PARAMETERS // _MOST
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            values, parameters = _values(self._sql, part, unique)
            answers = self._rows(
                f"INSERT INTO {self._table} ({into}) VALUES {values} {conflict}"  # noqa: S608 - constants only
                f" RETURNING {', '.join(returning)}",
                parameters if lock is None else [*parameters, lock],
            )
            for pk, instant, *answer in answers:
                one = dict(zip(returning[2:], answer, strict=True))
                message_id = read_uuid(one.get("message_id", part[0].message_id))
                stored[message_id] = pk, read_instant(instant)
                xid = one.get(_TRANSACTION, xid)
                locked_at = one.get(_LOCKED_AT, locked_at)
        return Stored(stored, xid, read_instant(locked_at))

    def there(self, ids: Collection[int]) -> list[tuple[int, uuid.UUID, str]]:
        """Return the rows that exist among these primary keys, sorted by primary key.
        Each result has the row's primary key, message id and destination."""
        rows = self.filter(OneOf("pk", ids)).order_by("pk")
        return list(rows.values_list("pk", "message_id", "destination"))


class _Column(NamedTuple):
    """A column of the outbox, and of NewMessage. `type` is its type in PostgreSQL. If
    the column can be empty, `empty` is SQL for the empty value, which is cheaper than a
    parameter."""

    name: str
    type: str
    empty: str | None = None


_GIVEN = (
    _Column("message_id", "uuid"),
    _Column("service", "text", "''"),
    _Column("broker", "text"),
    _Column("destination", "text"),
    _Column("content_type", "text"),
    _Column("body", "bytea"),
    _Column("replay_id", "text", "''"),
    _Column("key", "text", "''"),
    _Column("correlation_id", "text", "''"),
    _Column("session_id", "uuid", "NULL"),
    _Column("headers", "jsonb", "'{}'"),
)
_given = attrgetter(*[column.name for column in _GIVEN])
_COLUMNS = ", ".join([*[column.name for column in _GIVEN], "attempts", "last_error"])
_TRANSACTION = "pg_current_xact_id()::text"
_LOCKED = "pg_advisory_xact_lock_shared(%s::bigint)"
#: The clock, read once the lock is held: CASE is the one expression with a defined
#: order of evaluation. The call that takes the lock is not NULL.
_LOCKED_AT = f"""
    CASE WHEN {_LOCKED} IS NOT NULL THEN date_part('epoch', clock_timestamp()) END
"""
#: Instants are read faster as numbers, exact to a microsecond.
_CREATED = {"postgresql": "date_part('epoch', created_at)"}
_INTO = f"{_COLUMNS}, created_at, due_at, expires_at"
_INTO_UNIQUE = f"{_INTO}, unique_key, unique_until_processed"
#: The number of rows from which COPY, with a query for their ids first, is cheaper.
_WORTH_COPY = 8
#: Most parameters of a row, and of a statement: SQLite takes 32,766 (since 3.32),
#: PostgreSQL 65,535.
_MOST, _MOST_PARAMETERS = len(_GIVEN) + 4, 30_000
_COPIED_TYPES = (
    *("int8", "timestamptz", "timestamptz", "timestamptz"),
    *[column.type for column in _GIVEN],
    *("int4", "text"),
)


def _values(
    sql: Sql, rows: Sequence[NewMessage], unique: bool
) -> tuple[str, list[Any]]:
    now, later = sql.now, sql.later()
    values: list[str] = []
    parameters: list[Any] = []
    for row in rows:
        places: list[str] = []
        for column, value in zip(_GIVEN, _given(row), strict=True):
            if not value and column.empty is not None:
                places.append(column.empty)
                continue
            if column.type == "jsonb":
                value = json.dumps(value)
            elif column.type == "uuid":
                value = value.hex
            places.append("%s")
            parameters.append(value)
        places += ["0, ''", now, later if row.delay else now]
        if row.delay:
            parameters.append(row.delay)
        places.append("NULL" if row.expiry is None else later)
        if row.expiry is not None:
            parameters.append(row.expiry)
        if unique:
            places.append("%s, %s")
            parameters += [row.unique or None, row.unique_until == "processed"]
        values.append(f"({', '.join(places)})")
    return ", ".join(values), parameters


def _copy(
    connection: Any, cursor: Any, table: str, rows: Sequence[NewMessage]
) -> Stored | None:
    """Insert rows by COPY (psycopg 3). COPY is cheaper than INSERT: PostgreSQL neither
    parses nor returns anything for each row. Insert nothing and return None if row
    level security applies, because PostgreSQL then refuses COPY."""
    from psycopg.types.json import Jsonb

    cursor.execute(
        "SELECT array_agg(nextval(name)), clock_timestamp(),"
        " pg_current_xact_id()::text, row_security_active(%s::text)"
        " FROM (SELECT pg_get_serial_sequence(%s, 'id')::regclass AS name OFFSET 0) s,"
        " generate_series(1, %s) GROUP BY name",
        [table, table, len(rows)],
    )
    numbers, now, xid, secured = cursor.fetchone()
    if secured:
        return None
    now = now.astimezone(dt.timezone.utc)  # the alias may have a zone with a DST
    numbers.sort()
    records = [
        (
            pk,
            now,
            now + dt.timedelta(seconds=row.delay) if row.delay else now,
            None if row.expiry is None else now + dt.timedelta(seconds=row.expiry),
            *[
                Jsonb(value) if column.type == "jsonb" else value
                for column, value in zip(_GIVEN, _given(row), strict=True)
            ],
            0,
            "",
        )
        for pk, row in zip(numbers, rows, strict=True)
    ]
    into = f"{table} (id, created_at, due_at, expires_at, {_COLUMNS})"
    with (
        djangos_errors(connection),
        cursor.copy(f"COPY {into} FROM STDIN (FORMAT BINARY)") as copy,
    ):
        copy.set_types(_COPIED_TYPES)
        for record in records:
            copy.write_row(record)
    return Stored({record[4]: (record[0], now) for record in records}, xid, now)
