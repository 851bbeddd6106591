"""Reading from PostgreSQL over ADBC: binary COPY straight into Arrow.

What Arrow has no type for (`uuid`, `jsonb`, `xid8`) is cast in SQL.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from ..schemas import Column, Table
from .database import schema_of, utc

#: Bytes of a batch as the driver builds it: small enough to stay in a core's cache.
BATCH_BYTES = 512 * 1024


class Postgres:
    """A PostgreSQL database at a libpq address, password included."""

    vendor = "postgresql"

    def __init__(self, conninfo: str) -> None:
        self.conninfo = conninfo

    def __repr__(self) -> str:
        return "Postgres(…)"  # the address may hold a password

    def read(
        self, table: Table, columns: Sequence[Column], where: str, snapshot: str = ""
    ) -> Iterator[pa.RecordBatch]:
        """Yield batches, within an exported snapshot when its name is given."""
        from adbc_driver_postgresql import dbapi

        schema = schema_of(columns)
        selected = ", ".join(one.selected for one in columns)
        with dbapi.connect(self.conninfo) as connection, connection.cursor() as cursor:
            if snapshot:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                # A hexadecimal name that PostgreSQL itself made.
                if not set(snapshot) <= set("0123456789ABCDEF-"):
                    raise ValueError(f"{snapshot!r} is no snapshot of PostgreSQL")
                cursor.execute(f"SET TRANSACTION SNAPSHOT '{snapshot}'")
            cursor.adbc_statement.set_options(
                **{"adbc.postgresql.batch_size_hint_bytes": str(BATCH_BYTES)}
            )
            cursor.execute(
                f"SELECT {selected} FROM {table.relation} t WHERE {where or 'TRUE'}"
            )
            for batch in cursor.fetch_record_batch():
                if batch.num_rows:
                    yield _shaped(batch, schema)

    def bounds(self, table: Table) -> tuple[int, int]:
        """Return the lowest and highest id."""
        import psycopg

        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            row = connection.execute(
                f"SELECT min(id), max(id) FROM {table.relation}"
            ).fetchone()
        return (0, -1) if row is None or row[0] is None else (row[0], row[1])

    def instant(self, value: dt.datetime, *, upper: bool) -> str:
        """Return a timestamptz literal; exact, so `upper` makes no difference."""
        return f"'{utc(value).isoformat(timespec='microseconds')}'::timestamptz"

    def uuid(self, value: str) -> str:
        """Return a uuid literal. Raises ValueError for anything else."""
        return f"'{uuid.UUID(value)}'::uuid"


def _shaped(batch: Any, schema: pa.Schema) -> pa.RecordBatch:
    """Give every batch the one declared schema: Spark checks only the first."""
    arrays = [
        batch.column(index).cast(field.type) for index, field in enumerate(schema)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
