"""The databases that the pipeline reads, with the SQL that reads a message log.

An instance of `Database` is small, can be pickled, and contains the database's address.
Spark executors receive it, and open a new connection for every read.

ADBC reads from PostgreSQL, and decodes binary COPY into Arrow. Arrow has no types for
`uuid` and `xid8`, so their values arrive as bytes. This module converts a whole column
at a time. Reading these columns as text would take longer than reading all other
columns together.

The standard library reads from SQLite, for trials and small sites. On SQLite, Django
stores a uuid as 32 hexadecimal digits, and an instant as text in UTC. Both are
converted to the types that PostgreSQL returns.
"""

from __future__ import annotations

import datetime as dt
import json
import re
import sqlite3
import uuid
from abc import ABC, abstractmethod
from binascii import hexlify
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .errors import EnvironmentFault
from .schemas import Column, Table
from .spec import SourceSpec

#: A function that yields the rows of a table that an SQL condition selects, as batches
#: with exactly these columns.
Read = Callable[[Table, Sequence[Column], str], Iterator[pa.RecordBatch]]

#: Bytes of a batch that PostgreSQL's driver builds: small enough for a core's cache.
BATCH_BYTES = 1024 * 1024
#: Blocks of a table that are looked at to cut it into parts of equal work.
SAMPLED = 500

#: Most rows, and bytes of bodies, in a batch from SQLite.
SQLITE_ROWS = 20_000
SQLITE_BYTES = 16 << 20


def open_database(spec: SourceSpec) -> Database:
    """Return the database of a service, without connecting."""
    if spec.vendor == "postgresql":
        return Postgres(spec.conninfo())
    return Sqlite(spec.path)


class Database(ABC):
    """A database with a message log."""

    vendor: str

    @abstractmethod
    def connected(self, snapshot: str = "") -> AbstractContextManager[Read]:
        """Open a connection for several reads. With `snapshot`, all of these reads see
        that snapshot."""

    def read(
        self, table: Table, columns: Sequence[Column], where: str, snapshot: str = ""
    ) -> Iterator[pa.RecordBatch]:
        """Yield rows through a connection that is opened for this read."""
        with self.connected(snapshot) as read:
            yield from read(table, columns, where)

    @abstractmethod
    def sample(self, table: Table) -> list[int]:
        """Return a sample of the ids in a table. The more rows an id range has, the
        more of its ids are in the sample."""

    @abstractmethod
    def instant(self, value: dt.datetime, *, upper: bool) -> str:
        """Return an instant as an SQL literal that a column can be compared with. Pass
        upper=True if the operator is < or <=."""

    @abstractmethod
    def uuid(self, value: str) -> str:
        """Return an SQL literal for the UUID `value`. Raises ValueError if `value` is
        not a UUID."""


def schema_of(columns: Sequence[Column]) -> pa.Schema:
    """Return the Arrow schema of `columns`."""
    return pa.schema([one.arrow for one in columns])


def utc(value: dt.datetime) -> dt.datetime:
    """Return an instant in UTC. A naive instant is taken as UTC, because Spark passes
    such instants."""
    if value.tzinfo is None:
        return value.replace(tzinfo=dt.timezone.utc)
    return value.astimezone(dt.timezone.utc)


class Postgres(Database):
    """A PostgreSQL database. Its libpq address includes the password."""

    vendor = "postgresql"

    def __init__(self, conninfo: str) -> None:
        self.conninfo = conninfo

    def __repr__(self) -> str:
        return "Postgres(…)"  # the address may hold a password

    @contextmanager
    def connected(self, snapshot: str = "") -> Iterator[Read]:
        """Open a connection for several reads. With `snapshot`, all of these reads see
        that exported snapshot."""
        from adbc_driver_postgresql import dbapi

        # No transaction may stay open between two reads.
        with (
            dbapi.connect(self.conninfo, autocommit=not snapshot) as connection,
            connection.cursor() as cursor,
        ):
            if snapshot:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                # A hexadecimal name that PostgreSQL itself generated.
                if not set(snapshot) <= set("0123456789ABCDEF-"):
                    raise ValueError(f"{snapshot!r} is not a snapshot of PostgreSQL")
                cursor.execute(f"SET TRANSACTION SNAPSHOT '{snapshot}'")
            cursor.adbc_statement.set_options(
                **{"adbc.postgresql.batch_size_hint_bytes": str(BATCH_BYTES)}
            )
            yield partial(_read_rows, cursor)

    def sample(self, table: Table) -> list[int]:
        """Return a sample of the ids in a table, read from blocks all over it."""
        import psycopg

        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            rows = connection.execute(
                f"SELECT id FROM {table.relation} TABLESAMPLE SYSTEM ((SELECT"
                f" least(100, {SAMPLED}.0 * 100 * current_setting('block_size')::int"
                f" / greatest(1, pg_relation_size('{table.relation}')))))"
            ).fetchall()
        return [one for (one,) in rows]

    def instant(self, value: dt.datetime, *, upper: bool) -> str:
        """Return a timestamptz literal. It is exact, so `upper` makes no difference."""
        return f"'{utc(value).isoformat(timespec='microseconds')}'::timestamptz"

    def uuid(self, value: str) -> str:
        """Return a uuid literal. Raises ValueError if `value` is not a UUID."""
        return f"'{uuid.UUID(value)}'::uuid"


def _read_rows(
    cursor: Any, table: Table, columns: Sequence[Column], where: str
) -> Iterator[pa.RecordBatch]:
    """Yield batches that all have the declared schema. Spark checks only the schema of
    the first batch."""
    schema = schema_of(columns)
    selected = ", ".join(one.selected for one in columns)
    cursor.execute(f"SELECT {selected} FROM {table.relation} t WHERE {where or 'TRUE'}")
    for batch in cursor.fetch_record_batch():
        if batch.num_rows:
            arrays = map(_converted, batch.columns, columns)
            yield pa.RecordBatch.from_arrays(list(arrays), schema=schema)


def _converted(values: pa.Array, column: Column) -> pa.Array:
    """Return the values that the driver has read, as an array of the column's type."""
    if column.kind == "uuid":
        return _uuid_texts(values)
    if column.kind == "xid":
        return _numbers(values)
    wanted = column.arrow.type
    return values if values.type == wanted else _bare(values).cast(wanted)


def _bare(values: pa.Array) -> pa.Array:
    """Return the storage array of an extension array. Other arrays are returned
    unchanged."""
    return getattr(values, "storage", values)


def _uuid_texts(values: pa.Array) -> pa.Array:
    """Convert uuids from bytes to text with five groups of digits."""
    rows = len(values)
    if values.null_count == rows:
        return pa.nulls(rows, pa.string())
    digits = np.frombuffer(hexlify(_bytes_of(values, 16)), np.uint8).reshape(rows, 32)
    text = np.full((rows, 36), ord("-"), np.uint8)
    for dashes, (start, stop) in enumerate(_GROUPS):
        text[:, start + dashes : stop + dashes] = digits[:, start:stop]
    offsets = np.arange(0, 36 * rows + 1, 36, dtype=np.int32)
    buffers = [_validity(values), pa.py_buffer(offsets), pa.py_buffer(text)]
    return pa.Array.from_buffers(pa.string(), rows, buffers)


#: The positions of a uuid's groups of digits.
_GROUPS = ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32))


def _numbers(values: pa.Array) -> pa.Array:
    """Convert transaction ids from bytes to numbers. PostgreSQL sends them in
    big-endian order."""
    numbers = np.frombuffer(_bytes_of(values, 8), ">i8").astype(np.int64)
    buffers = [_validity(values), pa.py_buffer(numbers)]
    return pa.Array.from_buffers(pa.int64(), len(values), buffers)


def _bytes_of(values: pa.Array, width: int) -> memoryview:
    """Return the bytes of an array of values with a fixed width. The bytes of a null
    value are undefined."""
    fixed = _bare(values)
    if fixed.type != pa.binary(width):
        fixed = fixed.cast(pa.binary(width))
    start = width * fixed.offset
    return memoryview(fixed.buffers()[1])[start : start + width * len(fixed)]


def _validity(values: pa.Array) -> pa.Buffer | None:
    return pc.is_valid(values).buffers()[1] if values.null_count else None


class Sqlite(Database):
    """An SQLite database file. It is only read, not written."""

    vendor = "sqlite"

    def __init__(self, path: str) -> None:
        self.path = path

    @contextmanager
    def connected(self, snapshot: str = "") -> Iterator[Read]:
        """Open a connection for several reads. Each sees a consistent state of the
        database. A snapshot of SQLite is a separate database file, so the argument
        `snapshot` is ignored."""
        with closing(connect_reading(self.path)) as connection:
            yield partial(read_rows, connection)

    def sample(self, table: Table) -> list[int]:
        """Return all ids of a table, from an index."""
        with closing(connect_reading(self.path)) as connection:
            rows = connection.execute(f"SELECT id FROM {table.relation}").fetchall()
        return [one for (one,) in rows]

    def instant(self, value: dt.datetime, *, upper: bool) -> str:
        """Return a text literal. SQLite compares instants as text. Some stored instants
        end with zeros, and others omit these zeros. So the literal is the shortest text
        of the instant. If `upper` is true, it is the longest text of the instant."""
        return f"'{instant_text(value, upper=upper)}'"

    def uuid(self, value: str) -> str:
        """Return the UUID `value` as an SQL string literal, in the form in which Django
        stores UUIDs. Raises ValueError if `value` is not a UUID."""
        return f"'{uuid.UUID(value).hex}'"


def connect_reading(path: str) -> sqlite3.Connection:
    """Connect to an existing database file. Statements cannot change it. The file is
    still opened for writing, because SQLite may have to roll back the transaction of a
    killed process."""
    uri = f"{Path(path).absolute().as_uri()}?mode=rw"
    connection = sqlite3.connect(uri, uri=True, timeout=60)
    connection.execute("PRAGMA query_only = ON")
    return connection


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


def read_rows(
    connection: sqlite3.Connection, table: Table, columns: Sequence[Column], where: str
) -> Iterator[pa.RecordBatch]:
    """Yield the rows that the SQL condition `where` selects."""
    schema = schema_of(columns)
    selected = ", ".join(
        # SQLite has no transaction ids, and no columns for them.
        "NULL" if one.kind == "xid" else one.sql
        for one in columns
    )
    chosen = f"FROM {table.relation} t WHERE {where or '1'} ORDER BY t.id"
    found = _decoded(connection, selected, chosen)
    heavy = [place for place, one in enumerate(columns) if one.kind == "bytes"]
    for rows in _in_batches(found, heavy):
        arrays = [
            _array(column, values)
            for column, values in zip(columns, zip(*rows, strict=True), strict=True)
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _decoded(
    connection: sqlite3.Connection, selected: str, chosen: str
) -> Iterator[Sequence[Any]]:
    """Yield rows. Raises EnvironmentFault if a text of a row is not UTF-8."""
    read = 0
    try:
        for row in connection.execute(f"SELECT {selected} {chosen}"):
            yield row
            read += 1
    except sqlite3.OperationalError as error:
        # Its message contains the text.
        known = re.match(r"Could not decode to UTF-8 column '(\w+)'", str(error))
        if known is None:
            raise
        relation = chosen.split()[1]
        # Before Python 3.11, the cursor is one row ahead.
        near = connection.execute(
            f"SELECT t.id, CAST(t.{known[1]} AS BLOB) {chosen} LIMIT 2 OFFSET {read}"
        ).fetchall()
        row_id = next((one for one, text in near if _damaged(text or b"")), "?")
        raise EnvironmentFault(
            f"The column {known[1]} of the row {row_id} of {relation} is not UTF-8, so "
            "no program can read it as text. Nothing is lost: replace the column's "
            "value by SQL, and run again."
        ) from None


def _damaged(text: bytes) -> bool:
    return text.decode(errors="ignore").encode() != text


def _in_batches(
    rows: Iterable[Sequence[Any]], heavy: Sequence[int]
) -> Iterator[list[Sequence[Any]]]:
    batch: list[Sequence[Any]] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += sum(len(row[place] or b"") for place in heavy)
        if len(batch) >= SQLITE_ROWS or size >= SQLITE_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _array(column: Column, values: Sequence[Any]) -> pa.Array:
    kind = column.arrow.type
    if column.kind == "uuid":
        digits = pa.array(values, pa.string())
        parts = [pc.utf8_slice_codeunits(digits, *group) for group in _GROUPS]
        return pc.binary_join_element_wise(*parts, "-")
    if column.kind == "instant":
        text = pa.array(values, pa.string())
        return text.cast(pa.timestamp("us")).cast(kind)
    if column.kind == "bool":
        return pa.array(values, pa.int8()).cast(kind)
    return pa.array(values, kind)
