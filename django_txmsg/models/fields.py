"""Expressions for the clock, and SQL that Django does not provide.

The database computes due times and lease times, so the clocks of other hosts do not
matter.
"""

from __future__ import annotations

import datetime as dt
import json
import uuid
from collections.abc import Collection, Sequence
from typing import Any

from django.db import connections, models
from django.db.models import F, Q
from django.utils import timezone

from .. import wire
from ..django_internals import in_block
from ..rules import Rule


def local(instant: dt.datetime) -> str:
    """Format an instant to the second, in `TIME_ZONE`, followed by that zone's name."""
    return f"{timezone.localtime(instant):%Y-%m-%d %H:%M:%S %Z}"


#: Due when its predecessor releases it.
NEVER = "9000-01-01 00:00:00"


class Sql:
    """The SQL in which the databases differ, here for SQLite. Execute the statements
    with parameters, because percent signs may be doubled."""

    #: The database's current time, which advances within a transaction.
    now = "strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')"
    #: The time at which the statement began. Use this SQL in conditions: the value is
    #: the same for all rows, so PostgreSQL can search an index by the value.
    began = now
    #: The clause with which a claim skips rows that other claims have locked. On SQLite
    #: only one transaction writes at a time, and a claim is a single statement.
    skip_locked = ""
    #: The due time of a row that becomes due only when its predecessor releases it.
    never = f"'{NEVER}'"
    #: The bytes of a waiting row's body and headers.
    size = "LENGTH(body) + LENGTH(headers)"
    greatest, least = "max", "min"

    def epoch(self, instant: str = "'now'") -> str:
        """Return SQL for an instant, by default the current time, as Unix time in
        seconds."""
        return f"((julianday({instant}) - 2440587.5) * 86400.0)"

    def at(self, epoch: str) -> str:
        """Return SQL for the instant of a Unix time in seconds."""
        return f"strftime('%%Y-%%m-%%d %%H:%%M:%%f', {epoch}, 'unixepoch')"

    def later(self, seconds: str = "%s") -> str:
        """Return SQL that adds `seconds`, by default a parameter, to the current
        time."""
        shift = f"printf('%%+.3f seconds', {seconds})"
        return f"strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', {shift})"

    def instant_text(self, column: str) -> str:
        """Return SQL for an instant in the format of `wire.format_instant()`, because
        PostgreSQL formats instants faster than Python does. SQLite returns the text
        that it stores."""
        return column

    def text(self, column: str) -> str:
        """Return SQL for a UUID or JSON as text. Text is cheaper to read than the
        objects that the driver would create. SQLite returns the text that it stores."""
        return column

    def ids(
        self,
        column: str,
        ids: Collection[int] | Collection[str] | Collection[uuid.UUID],
    ) -> tuple[str, list[Any]]:
        """Return an SQL condition and its parameters. The condition is true if `column`
        is one of `ids`."""
        condition = f"{column} IN (SELECT value FROM json_each(%s))"  # noqa: S608 - a column of ours
        given = [one.hex if isinstance(one, uuid.UUID) else one for one in ids]
        return condition, [json.dumps(given)]

    def given(self, name: str, **columns: str) -> str:
        """Return SQL for a table `name` whose rows come from one parameter, a JSON
        array of objects. `columns` maps each column to its type in PostgreSQL."""
        read = ", ".join(f"json_extract(value, '$.{one}') AS {one}" for one in columns)
        return f"(SELECT {read} FROM json_each(%s)) AS {name}"  # noqa: S608 - constants only

    def array(self, *values: str) -> str:
        """Return SQL that combines values into a JSON array. A subquery can return only
        one value, and such an array lets it return several values as one."""
        return f"json_array({', '.join(values)})"

    def without(self, header: str) -> str:
        """Return SQL for a row's headers, minus the one named `header`."""
        return f"json_remove(headers, '$.\"{header}\"')"


class Postgres(Sql):
    """The same SQL for PostgreSQL."""

    now = "clock_timestamp()"
    began = "statement_timestamp()"
    skip_locked = "FOR UPDATE SKIP LOCKED"
    never = f"'{NEVER}+00'::timestamptz"
    size = "octet_length(body) + pg_column_size(headers)"
    greatest, least = "greatest", "least"

    def epoch(self, instant: str = now) -> str:
        return f"extract(epoch FROM {instant})::float8"

    def at(self, epoch: str) -> str:
        return f"to_timestamp({epoch})"

    def later(self, seconds: str = "%s") -> str:
        return f"clock_timestamp() + make_interval(secs => {seconds})"

    def instant_text(self, column: str) -> str:
        pattern = 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"'
        return f"to_char({column} AT TIME ZONE 'UTC', '{pattern}')"

    def text(self, column: str) -> str:
        return f"{column}::text"

    def ids(
        self,
        column: str,
        ids: Collection[int] | Collection[str] | Collection[uuid.UUID],
    ) -> tuple[str, list[Any]]:
        return f"{column} = ANY(%s)", [list(ids)]

    def given(self, name: str, **columns: str) -> str:
        typed = ", ".join(f"{column} {kind}" for column, kind in columns.items())
        return f"jsonb_to_recordset(%s::jsonb) AS {name}({typed})"

    def array(self, *values: str) -> str:
        return f"json_build_array({', '.join(values)})"

    def without(self, header: str) -> str:
        return f"headers - '{header}'"


_SQLITE, _POSTGRES = Sql(), Postgres()


def sql_of(connection: Any) -> Sql:
    """Return the SQL of a connection's database."""
    return _POSTGRES if connection.vendor == "postgresql" else _SQLITE


def clock(using: str) -> dt.datetime:
    """Return the database's current time, in UTC whatever the time zone of the
    connection is."""
    ((instant,),) = query(using, f"SELECT {sql_of(connections[using]).now}")
    found: dt.datetime = read_instant(instant).astimezone(dt.timezone.utc)
    return found


class Later(models.Func):
    """The database's current time plus a number of seconds. An interval in days would
    not be exact, because a day may have 23 or 25 hours."""

    output_field = models.DateTimeField()

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def as_sql(self, compiler: Any, connection: Any, *_: Any, **context: Any) -> Any:
        return sql_of(connection).later(), [self.seconds]


#: Most characters of a message's key.
KEY_LENGTH = 255


class MessageKey(models.Func):
    """The ordering key in a column of headers, cut to KEY_LENGTH characters. A key from
    another system may be too long for an index of PostgreSQL. The SQL contains the
    header's name as a constant, because PostgreSQL would not use the index if the name
    were a parameter."""

    output_field = models.TextField()
    template = f"LEFT(%(expressions)s ->> '{wire.KEY}', {KEY_LENGTH})"

    def as_sqlite(self, compiler: Any, connection: Any, **context: Any) -> Any:
        """Return the SQL for SQLite. It calls a function, because SQLite before 3.38
        does not support the operator `->>`."""
        key = f"JSON_EXTRACT(%(expressions)s, '$.\"{wire.KEY}\"')"
        template = f"SUBSTR({key}, 1, {KEY_LENGTH})"
        return self.as_sql(compiler, connection, template=template, **context)


def limit_waits(connection: Any, seconds: float) -> None:
    """Limit how long the statements of the open transaction wait for a lock, but to
    less than `statement_timeout`. A statement that waits longer raises an
    OperationalError, which `database_health.gave_up_waiting()` recognises. SQLite has
    its own time-out."""
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT set_config('lock_timeout', greatest(1, least(%s,"
                " nullif(setting::int, 0) / 2))::text, true)"
                " FROM pg_settings WHERE name = 'statement_timeout'",
                [int(seconds * 1000)],
            )


def no_wait_sql(connection: Any) -> tuple[str, str]:
    """Return a WITH clause and a condition. If a statement contains both, its commit
    does not wait for the disk. Inside a transaction, and on SQLite, the clause is empty
    and the condition is true.

    A crash of the server may lose a change that was made this way. Use this only for a
    change that can be lost without losing a message. At worst, work may be repeated.
    """
    if connection.vendor != "postgresql" or in_block(connection):
        return "", "TRUE"
    off = "SELECT set_config('synchronous_commit', 'off', true)"
    clause = f"WITH no_wait AS MATERIALIZED ({off})"
    return clause, "(SELECT count(*) FROM no_wait) = 1"


class OneOf(models.Func):
    """The condition that a column's value is in `ids`. The ids are one parameter."""

    output_field = models.BooleanField()

    def __init__(
        self, column: str, ids: Collection[int] | Collection[uuid.UUID]
    ) -> None:
        super().__init__(models.F(column))
        self.ids = ids

    def as_sql(self, compiler: Any, connection: Any, *_: Any, **context: Any) -> Any:
        (column,) = self.get_source_expressions()
        sql, parameters = compiler.compile(column)
        condition, values = sql_of(connection).ids(sql, self.ids)
        return f"({condition})", [*parameters, *values]


def read_instant(value: Any) -> Any:
    """Return an aware instant, or None, from the value of a column. Text (from SQLite)
    without an offset is read as UTC, a number as Unix time in seconds."""
    if isinstance(value, int | float):
        return dt.datetime.fromtimestamp(value, dt.timezone.utc)
    if isinstance(value, str):
        value = dt.datetime.fromisoformat(value)
    if value is not None and value.tzinfo is None:
        value = value.replace(tzinfo=dt.timezone.utc)
    return value


def read_uuid(value: Any) -> Any:
    """Return a UUID from the value of a column: SQLite returns hexadecimal text."""
    return uuid.UUID(value) if isinstance(value, str) else value


def query(using: str, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
    """Execute a statement in a database, and return its rows. With no parameters, too,
    `%%` means `%`."""
    with connections[using].cursor() as cursor:
        cursor.execute(sql, parameters)
        return list(cursor.fetchall())


class SqlManager(models.Manager):  # type: ignore[type-arg]  # not generic at run time
    """A manager whose methods are statements in SQL."""

    @property
    def _table(self) -> str:
        table: str = self.model._meta.db_table
        return table

    @property
    def _sql(self) -> Sql:
        return sql_of(connections[self.db])

    def _changed(self, sql: str, parameters: Sequence[Any]) -> int:
        """Execute a statement, and return the number of changed rows."""
        with connections[self.db].cursor() as cursor:
            cursor.execute(sql, parameters)
            return int(cursor.rowcount)

    def _rows(self, sql: str, parameters: Sequence[Any]) -> list[Any]:
        """Execute a statement, and return its rows."""
        return query(self.db, sql, parameters)

    def _row(self, sql: str, parameters: Sequence[Any]) -> Any:
        """Execute a statement, and return its first row; None if there is none."""
        return next(iter(self._rows(sql, parameters)), None)


def not_null(field: str, name: str) -> models.Index:
    """Return an index of the rows in which a field is not NULL."""
    condition = Q(**{f"{field}__isnull": False})
    return models.Index(fields=[field], condition=condition, name=name)


def not_blank(field: str, name: str) -> models.Index:
    """Return an index of the rows in which a text is not empty."""
    return models.Index(fields=[field], condition=~Q(**{field: ""}), name=name)


# Rules in querysets: `filter(Holds(outbox.DUE, now=Now()))`.


class Holds(models.Func):
    """The condition that a rule is true for a row. `values` maps a name in the rule to
    the expression that replaces it."""

    output_field = models.BooleanField()

    def __init__(self, rule: Rule, **values: Any) -> None:
        names = [name for _, name in rule.parts() if name]
        super().__init__(*(values.get(name, F(name)) for name in names))
        self.rule = rule

    def as_sql(  # type: ignore[override]  # it has no function and no template
        self, compiler: Any, connection: Any, *_: Any, **context: Any
    ) -> tuple[str, list[Any]]:
        parts, parameters = [], list[Any]()
        given = iter(self.get_source_expressions())
        for text, name in self.rule.parts():
            parts.append(text)
            if name:
                sql, values = compiler.compile(next(given))
                parts.append(sql)
                parameters += values
        return f"({''.join(parts)})", parameters
