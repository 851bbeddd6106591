"""Reads from SQLite with the standard library, for trials and small sites.

On SQLite, Django stores a uuid as 32 hexadecimal digits, and an instant as text in UTC.
Both are converted to the types that PostgreSQL returns.
"""

from __future__ import annotations

import datetime as dt
import json
import re
import sqlite3
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ..errors import EnvironmentFault
from ..schemas import Column, Table
from .base import Database, Read, schema_of, utc

#: Most rows, and bytes of bodies, in a batch.
BATCH_ROWS = 20_000
BATCH_BYTES = 16 << 20


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
        """Return a text literal. SQLite compares instants as text, and stored instants
        may or may not have trailing zeros. So the literal is the shortest text of the
        instant, or the longest with `upper`."""
        return f"'{instant_text(value, upper=upper)}'"

    def uuid(self, value: str) -> str:
        """Return Django's stored text. Raises ValueError if it is not a UUID."""
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
    """Return an instant in Django's format. With `upper`, the text has all trailing
    zeros, otherwise none."""
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
        ((row_id,),) = connection.execute(f"SELECT t.id {chosen} LIMIT 1 OFFSET {read}")
        raise EnvironmentFault(
            f"The column {known[1]} of the row {row_id} of {relation} is not UTF-8, so "
            "no program can read it as text. Nothing is lost: replace the column's "
            "value by SQL, and run again."
        ) from None


def _in_batches(
    rows: Iterable[Sequence[Any]], heavy: Sequence[int]
) -> Iterator[list[Sequence[Any]]]:
    batch: list[Sequence[Any]] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += sum(len(row[place] or b"") for place in heavy)
        if len(batch) >= BATCH_ROWS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _array(column: Column, values: Sequence[Any]) -> pa.Array:
    kind = column.arrow.type
    if column.kind == "uuid":
        digits = pa.array(values, pa.string())
        parts = [
            pc.utf8_slice_codeunits(digits, start, stop)
            for start, stop in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32))
        ]
        return pc.binary_join_element_wise(*parts, "-")
    if column.kind == "instant":
        text = pa.array(values, pa.string())
        return text.cast(pa.timestamp("us")).cast(kind)
    if column.kind == "bool":
        return pa.array(values, pa.int8()).cast(kind)
    return pa.array(values, kind)
