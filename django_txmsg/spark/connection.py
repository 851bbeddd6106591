"""A plain SQL connection with the same interface for PostgreSQL and SQLite: autocommit,
placeholders `%s`, and clear errors. Also finds the session whose open transaction makes
rows wait."""

from __future__ import annotations

import datetime as dt
import json
import re
import sqlite3
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from .errors import EnvironmentFault
from .spec import SourceSpec


class Connection:
    """A connection in autocommit mode. `raw` is the connection of the database driver.
    As a context manager, it is closed at the end of the block."""

    def __init__(self, raw: Any, vendor: str, address: str) -> None:
        self.raw, self.vendor, self.address = raw, vendor, address

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def rows(self, sql: str, *values: Any) -> list[Any]:
        """Run a statement and return all of its rows."""
        found: list[Any] = self._run(sql, values).fetchall()
        return found

    def value(self, sql: str, *values: Any) -> Any:
        """Run a statement and return the first column of its first row."""
        found = self._run(sql, values).fetchone()
        return None if found is None else found[0]

    def execute(self, sql: str, *values: Any) -> int:
        """Run a statement and return the number of changed rows."""
        changed: int = self._run(sql, values).rowcount
        return changed

    def forget(self, sql: str, *values: Any) -> None:
        """Run a statement and ignore its errors."""
        with suppress(EnvironmentFault):
            self._run(sql, values)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the block in one transaction. Either all statements of the block are
        committed, or none."""
        if self.vendor == "postgresql":
            with self.raw.transaction():
                yield
            return
        self._run("BEGIN IMMEDIATE", ())
        with self.raw:  # rolls back, unless SQLite has done so by itself
            yield
            self._run("COMMIT", ())

    def many(self, sql: str, lines: Iterable[Sequence[Any]]) -> None:
        """Run a statement once for each row of values. Call it inside a transaction."""
        with self._faults_told():
            if self.vendor == "postgresql":
                self.raw.cursor().executemany(sql, lines)
                return
            given = (tuple(map(_stored, line)) for line in lines)
            self.raw.executemany(sql.replace("%s", "?"), given)

    @property
    def now(self) -> str:
        """An SQL expression for the current time."""
        if self.vendor == "postgresql":
            return "now()"
        return "strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')"

    def clock(self) -> dt.datetime:
        """Return the current time of the database."""
        now: dt.datetime = read_instant(self.value(f"SELECT {self.now}"))
        return now

    def close(self) -> None:
        """Close the connection."""
        self.raw.close()

    def _run(self, sql: str, values: Any) -> Any:
        with self._faults_told():
            if self.vendor == "postgresql":
                # Without values psycopg leaves % alone.
                text = sql if values else sql.replace("%%", "%")
                return self.raw.execute(text, values or None)
            text = sql.replace("%s", "?").replace("%%", "%")
            return self.raw.execute(text, tuple(map(_stored, values)))

    @contextmanager
    def _faults_told(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, psycopg.Error) as error:
            raise EnvironmentFault(
                f"The database at {self.address} failed: {str(error).strip()}"
                + _advice(error)
            ) from error


def _stored(value: Any) -> Any:
    """Return a value as Django stores it in SQLite, where ids and instants are text."""
    if isinstance(value, uuid.UUID):
        return value.hex
    if isinstance(value, dt.datetime):
        return instant_text(value, upper=True)
    return value


def utc(value: dt.datetime) -> dt.datetime:
    """Return an instant in UTC. A naive instant is taken as UTC, because Spark passes
    such instants."""
    if value.tzinfo is None:
        return value.replace(tzinfo=dt.timezone.utc)
    return value.astimezone(dt.timezone.utc)


def instant_text(value: dt.datetime, *, upper: bool) -> str:
    """Return an instant as text, in the format in which Django stores it in SQLite.
    With `upper`, the text has all six digits of the fraction of a second. Otherwise
    trailing zeros of the fraction are omitted."""
    naive = utc(value).replace(tzinfo=None)
    text = naive.isoformat(sep=" ", timespec="microseconds")
    return text if upper else text.rstrip("0").rstrip(".")


def read_instant(value: Any) -> Any:
    """Return an instant from a query result. Text from SQLite is parsed. A value from
    PostgreSQL is returned unchanged."""
    if isinstance(value, str):
        return dt.datetime.fromisoformat(value).replace(tzinfo=dt.timezone.utc)
    return value


def read_json(value: Any) -> Any:
    """Return JSON from a query result. Text from SQLite is parsed. A value from
    PostgreSQL is returned unchanged."""
    return json.loads(value) if isinstance(value, str) else value


def connect_plain(spec: SourceSpec) -> Connection:
    """Connect to a service's database. Raises EnvironmentFault if that fails."""
    return Connection(connect(spec), spec.vendor, spec.shown)


def connect(spec: SourceSpec) -> Any:
    """Return a driver's connection in autocommit mode."""
    if spec.vendor == "sqlite":
        # A reader must be able to write, too, because SQLite may have to roll back the
        # transaction of a killed process.
        if not Path(spec.path).is_file():
            raise EnvironmentFault(f"There is no SQLite database at {spec.path}.")
        return sqlite3.connect(
            spec.path, timeout=60, isolation_level=None, check_same_thread=False
        )
    try:
        return psycopg.connect(spec.conninfo(), autocommit=True)
    except psycopg.Error as error:
        raise EnvironmentFault(
            f"The database of service {spec.service!r} at {spec.shown} cannot be "
            f"reached: {str(error).strip()}"
        ) from error


def _advice(error: Exception) -> str:
    text = str(error)
    missing = re.search("does not exist|no such table|(no such|has no) column", text)
    # SQLite does not name the table of a missing column.
    if not missing or not re.search("django_txmsg_|_xid|(no such|has no) column", text):
        return ""
    return (
        ' With "django_txmsg.spark" in INSTALLED_APPS, run `manage.py migrate` there.'
    )


@dataclass(frozen=True)
class Held:
    """The number of rows that wait, the transaction that they wait for, and when that
    transaction began."""

    rows: int
    since: dt.datetime | None = None
    holder: str = ""

    @property
    def whom(self) -> str:
        """A description of the session that holds the transaction open."""
        since = f", open since {self.since:%Y-%m-%d %H:%M:%S} UTC" if self.since else ""
        return f"{self.holder}{since}"

    @property
    def seconds(self) -> float:
        """How long the transaction has been open, in seconds. Infinite if this role may
        not see when the transaction began."""
        if not self.rows:
            return 0.0
        if self.since is None:
            return float("inf")
        return (dt.datetime.now(dt.timezone.utc) - self.since).total_seconds()


def held(connection: Connection, rows: int) -> Held:
    """Return the transaction for which `rows` rows wait. In the PostgreSQL cluster, it
    is the oldest open transaction that has written anything. Every role can see that
    such a transaction exists. Returns Held(0) if the transaction has ended since the
    rows were counted."""
    if not rows:
        return Held(0)
    found = connection.rows(
        "SELECT xact_start, format('process %%s (%%s)', pid, concat_ws(', ', state,"
        " 'database ' || datname, 'user ' || usename)), age(backend_xid)"
        " FROM pg_stat_activity"
        " WHERE backend_xid IS NOT NULL UNION ALL"
        " SELECT prepared, format('prepared transaction %%s (database %%s)', gid,"
        " database), age(transaction) FROM pg_prepared_xacts"
        " ORDER BY 3 DESC LIMIT 1"
    )
    if not found:
        return Held(0)
    since, holder, _ = found[0]
    return Held(rows, since, holder)
