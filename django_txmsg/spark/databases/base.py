"""The interface of a database that the pipeline reads.

An implementation is small, can be pickled, and contains the database's address. Spark
executors receive it, and open a new connection for every read.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import pyarrow as pa

from ..schemas import Column, Table


class Reader(Protocol):
    """An open connection for several reads."""

    def read(
        self, table: Table, columns: Sequence[Column], where: str
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows that the SQL condition `where` selects. They come as batches
        with exactly `columns`."""
        ...


class Database(Protocol):
    """A database with a message log."""

    vendor: str

    def connected(self) -> AbstractContextManager[Reader]:
        """Open a connection for several reads."""
        ...

    def read(
        self, table: Table, columns: Sequence[Column], where: str, snapshot: str = ""
    ) -> Iterator[pa.RecordBatch]:
        """Yield rows through a connection that is opened for this read. With
        `snapshot`, the read sees that snapshot."""
        ...

    def sample(self, table: Table) -> list[int]:
        """Return a sample of the ids in a table. The more rows an id range has, the
        more of its ids are in the sample."""
        ...

    def instant(self, value: dt.datetime, *, upper: bool) -> str:
        """Return an instant as an SQL literal that a column can be compared with. Pass
        upper=True if the operator is < or <=."""
        ...

    def uuid(self, value: str) -> str:
        """Return an SQL literal for a UUID."""
        ...


def schema_of(columns: Sequence[Column]) -> pa.Schema:
    """Return the Arrow schema of `columns`."""
    return pa.schema([one.arrow for one in columns])


def utc(value: dt.datetime) -> dt.datetime:
    """Return an instant in UTC. A naive instant is taken as UTC, because Spark passes
    such instants."""
    if value.tzinfo is None:
        return value.replace(tzinfo=dt.timezone.utc)
    return value.astimezone(dt.timezone.utc)
