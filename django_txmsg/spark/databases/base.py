"""A database that the pipeline reads.

An instance is small, can be pickled, and contains the database's address. Spark
executors receive it, and open a new connection for every read.
"""

from __future__ import annotations

import datetime as dt
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import pyarrow as pa

from ..schemas import Column, Table

#: A function that yields the rows of a table that an SQL condition selects, as batches
#: with exactly these columns.
Read = Callable[[Table, Sequence[Column], str], Iterator[pa.RecordBatch]]


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
        """Return an SQL literal for a UUID. Raises ValueError if it is not a UUID."""


def schema_of(columns: Sequence[Column]) -> pa.Schema:
    """Return the Arrow schema of `columns`."""
    return pa.schema([one.arrow for one in columns])


def utc(value: dt.datetime) -> dt.datetime:
    """Return an instant in UTC. A naive instant is taken as UTC, because Spark passes
    such instants."""
    if value.tzinfo is None:
        return value.replace(tzinfo=dt.timezone.utc)
    return value.astimezone(dt.timezone.utc)
