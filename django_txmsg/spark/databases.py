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
import re
import sqlite3
import uuid
from binascii import hexlify
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .connection import connect, connect_plain, instant_text, utc
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
    return Database(spec.resolved())


@dataclass(frozen=True)
class Database:
    """A database with a message log. It is only read, not written."""

    spec: SourceSpec

    @contextmanager
    def connected(self, snapshot: str = "") -> Iterator[Read]:
        """Open a connection for several reads. With `snapshot`, all of these reads see
        that exported snapshot of PostgreSQL. A snapshot of SQLite is a separate
        database file, so the argument is ignored there."""
        if self.spec.vendor == "sqlite":
            with closing(connect(self.spec)) as file:
                file.execute("PRAGMA query_only = ON")
                yield partial(read_rows, file)
            return
        from adbc_driver_postgresql import dbapi

        # No transaction may stay open between two reads.
        with (
            dbapi.connect(self.spec.conninfo(), autocommit=not snapshot) as connection,
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

    def read(
        self, table: Table, columns: Sequence[Column], where: str, snapshot: str = ""
    ) -> Iterator[pa.RecordBatch]:
        """Yield rows through a connection that is opened for this read."""
        with self.connected(snapshot) as read:
            yield from read(table, columns, where)

    def sample(self, table: Table) -> list[int]:
        """Return a sample of the ids in a table, read from blocks all over it. The more
        rows an id range has, the more of its ids are in the sample. On SQLite, it
        consists of all ids, from an index."""
        sql = f"SELECT id FROM {table.relation}"
        if self.spec.vendor == "postgresql":
            sql += (
                f" TABLESAMPLE SYSTEM ((SELECT least(100, {SAMPLED}.0 * 100"
                " * current_setting('block_size')::int"
                f" / greatest(1, pg_relation_size('{table.relation}')))))"
            )
        with connect_plain(self.spec) as connection:
            return [one for (one,) in connection.rows(sql)]

    def instant(self, value: dt.datetime, *, upper: bool) -> str:
        """Return an instant as an SQL literal that a column can be compared with. Pass
        upper=True if the operator is < or <=.

        SQLite compares instants as text. Some stored instants end with zeros, and
        others omit these zeros. So the literal is the shortest text of the instant, or
        its longest one if `upper` is true."""
        if self.spec.vendor == "sqlite":
            return f"'{instant_text(value, upper=upper)}'"
        return f"'{utc(value).isoformat(timespec='microseconds')}'::timestamptz"

    def uuid(self, value: str) -> str:
        """Return an SQL literal for the UUID `value`, in the form in which Django
        stores UUIDs. Raises ValueError if `value` is not a UUID."""
        if self.spec.vendor == "sqlite":
            return f"'{uuid.UUID(value).hex}'"
        return f"'{uuid.UUID(value)}'::uuid"


def _read_rows(
    cursor: Any, table: Table, columns: Sequence[Column], where: str
) -> Iterator[pa.RecordBatch]:
    """Yield batches that all have the declared schema. Spark checks only the schema of
    the first batch."""
    schema = pa.schema([one.arrow for one in columns])
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


def read_rows(
    connection: sqlite3.Connection, table: Table, columns: Sequence[Column], where: str
) -> Iterator[pa.RecordBatch]:
    """Yield the rows that the SQL condition `where` selects."""
    schema = pa.schema([one.arrow for one in columns])
    selected = ", ".join(
        # SQLite has no transaction ids, and no columns for them.
        "NULL" if one.kind == "xid" else one.sql
        for one in columns
    )
    chosen = f"FROM {table.relation} t WHERE {where or '1'} ORDER BY t.id"
    found = _decoded(connection, selected, chosen)
    heavy = [place for place, one in enumerate(columns) if one.kind == "bytes"]
    for rows in _in_batches(found, heavy):
        arrays = map(_array, columns, zip(*rows, strict=True))
        yield pa.RecordBatch.from_arrays(list(arrays), schema=schema)


def _decoded(
    connection: sqlite3.Connection, selected: str, chosen: str
) -> Iterator[Sequence[Any]]:
    """Yield rows. Raises EnvironmentFault if a text of a row is not UTF-8."""
    try:
        yield from connection.execute(f"SELECT {selected} {chosen}")
    except sqlite3.OperationalError as error:
        # Its message contains the text.
        known = re.match(r"Could not decode to UTF-8 column '(\w+)'", str(error))
        if known is None:
            raise
        connection.text_factory = bytes
        texts = connection.execute(f"SELECT t.id, t.{known[1]} {chosen}")
        # All of them: an unfinished statement would keep its lock.
        damaged = [one for one, text in texts if _damaged(text or b"")]
        raise EnvironmentFault(
            f"The column {known[1]} of the row {[*damaged, '?'][0]} of "
            f"{chosen.split()[1]} is not UTF-8, so no program can read it as text. "
            "Nothing is lost: replace the column's value by SQL, and run again."
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
