"""The interface of a database for the pipeline: batches, samples, literals.

An implementation is small, picklable and contains the address. Executors get the
object, and open a new connection for every read.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import pyarrow as pa

from ..schemas import Column, Table


class Reader(Protocol):
    """An open connection to a database, for several reads in succession."""

    def read(
        self, table: Table, columns: Sequence[Column], where: str
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows that `where` selects, as batches with exactly `columns`."""
        ...


class Database(Protocol):
    """A database that holds a message log."""

    vendor: str

    def connected(self) -> AbstractContextManager[Reader]:
        """Connect for several reads."""
        ...

    def read(
        self, table: Table, columns: Sequence[Column], where: str, snapshot: str = ""
    ) -> Iterator[pa.RecordBatch]:
        """Read once, on a separate connection. If `snapshot` is given, the read sees
        that snapshot."""
        ...

    def sample(self, table: Table) -> list[int]:
        """Return a sample of a table's ids. It contains more ids from ranges in which
        more rows exist."""
        ...

    def instant(self, value: dt.datetime, *, upper: bool) -> str:
        """Return a literal to compare a column with. `upper` is for < and <=."""
        ...

    def uuid(self, value: str) -> str:
        """Return a literal of a canonical UUID."""
        ...


def schema_of(columns: Sequence[Column]) -> pa.Schema:
    """Return the Arrow schema of `columns`."""
    return pa.schema([one.arrow for one in columns])


def utc(value: dt.datetime) -> dt.datetime:
    """Return an instant in UTC. Spark passes naive instants, which mean UTC."""
    if value.tzinfo is None:
        return value.replace(tzinfo=dt.timezone.utc)
    return value.astimezone(dt.timezone.utc)
