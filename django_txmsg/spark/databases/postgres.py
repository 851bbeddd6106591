"""Reads from PostgreSQL with ADBC, which decodes binary COPY into Arrow.

Arrow has no types for `uuid` and `xid8`, so their values arrive as bytes. This module
converts a whole column at a time. Reading these columns as text would take longer than
reading all other columns together.
"""

from __future__ import annotations

import datetime as dt
import uuid
from binascii import hexlify
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..schemas import Column, Table
from .base import Database, Read, schema_of, utc

#: Bytes of a batch that the driver builds: small enough for a core's cache.
BATCH_BYTES = 1024 * 1024
#: Blocks of a table that are looked at to cut it into parts of equal work.
SAMPLED = 500


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
        """Return a uuid literal. Raises ValueError if it is not a UUID."""
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
    """Return an array of the driver with the type of the column."""
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
    for start, stop, shift in _GROUPS:
        text[:, start + shift : stop + shift] = digits[:, start:stop]
    offsets = np.arange(0, 36 * rows + 1, 36, dtype=np.int32)
    buffers = [_validity(values), pa.py_buffer(offsets), pa.py_buffer(text)]
    return pa.Array.from_buffers(pa.string(), rows, buffers)


#: The positions of a uuid's digits, and the number of dashes before them.
_GROUPS = ((0, 8, 0), (8, 12, 1), (12, 16, 2), (16, 20, 3), (20, 32, 4))


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
