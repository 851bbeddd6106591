"""Reads a table of a database or of a lake for a batch query.

A table of a database is divided into partitions by id. With a named snapshot, any
number of partitions see the same state. Without one, there is a single partition,
because two statements could see different states.

Of a lake, only the files are read that the log names. The directory also contains
replaced files and files of failed attempts, which `spark.read.parquet()` would read.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from ..databases import Database, open_database
from ..errors import UsageError
from ..lake import Lake, LakeTable
from ..lakefile import LakeFile, rows_as
from ..schemas import Table, arrow_schema
from ..spec import LakeSpec, SourceSpec

#: Partitions of a read within a snapshot, by default.
PARTITIONS = 4

#: The prefix of an object store's options.
STORAGE = "storage."


class Selection:
    """The columns that Spark requests, in Spark's order and with Spark's
    nullability."""

    def __init__(self, service: str, table: Table, schema: StructType) -> None:
        known = {one.name: one for one in (*table.columns, *table.live)}
        for name in schema.fieldNames():
            if name != "service" and name not in known:
                raise UsageError(f"The table {table.name} has no column {name!r}.")
        self.service, self.table = service, table
        self.columns = [known.get(name) for name in schema.fieldNames()]
        self.schema = arrow_schema(schema)

    def read(
        self, database: Database, where: str, snapshot: str = ""
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows that the SQL condition `where` selects."""
        wanted = [one for one in self.columns if one is not None]
        projection = wanted or [self.table.column("id")]
        for batch in database.read(self.table, projection, where, snapshot):
            names = pa.repeat(pa.scalar(self.service, pa.string()), batch.num_rows)
            found = iter(batch.columns)
            arrays = [names if one is None else next(found) for one in self.columns]
            yield pa.RecordBatch.from_arrays(arrays, schema=self.schema)


@dataclass
class IdRange(InputPartition):
    """A partition with the rows `first <= id < last`."""

    first: int
    last: int

    @property
    def condition(self) -> str:
        """The range as an SQL condition."""
        return f"t.id >= {self.first} AND t.id < {self.last}"


def id_ranges(database: Database, table: Table, count: int) -> list[IdRange]:
    """Divide all possible ids into `count` ranges with about the same number of rows.
    The existing ids are sampled, because ranges of equal width could have very
    different numbers of rows."""
    known = sorted(database.sample(table)) if count > 1 else []
    inner = {known[len(known) * part // count] for part in range(1, count) if known}
    edges = [-(2**63), *sorted(inner), 2**63 - 1]
    return [IdRange(*edge) for edge in pairwise(edges)]


class BatchReader(DataSourceReader):
    """Reads the requested columns of a table."""

    def __init__(
        self,
        spec: SourceSpec,
        table: Table,
        schema: StructType,
        options: Mapping[str, str],
    ) -> None:
        self.database = open_database(spec)
        self.table, self.columns = table, Selection(spec.service, table, schema)
        self.snapshot = options.get("snapshot", "")
        self.count = int(options.get("partitions", PARTITIONS if self.snapshot else 1))
        self.conditions: list[str] = []
        for name, upper in (("since", False), ("until", True)):
            if name in options:
                instant = dt.datetime.fromisoformat(options[name])
                literal = self.database.instant(instant, upper=False)
                sign = "<" if upper else ">="
                self.conditions.append(f"t.{table.clock} {sign} {literal}")

    def partitions(self) -> Sequence[InputPartition]:
        """Divide the ids into ranges with about the same number of rows."""
        return id_ranges(self.database, self.table, self.count)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a partition."""
        assert isinstance(partition, IdRange)
        where = " AND ".join([partition.condition, *self.conditions])
        yield from self.columns.read(self.database, where, self.snapshot)


@dataclass
class OneFile(InputPartition):
    """A partition: one file of the lake."""

    named: LakeFile


@dataclass
class Condition:
    """A condition on the service or the day of a file."""

    compared: Callable[[Any, Any], bool]
    name: str
    value: Any

    def holds(self, named: LakeFile) -> bool:
        """Return whether a file may contain matching rows."""
        return self.compared(getattr(named, self.name), self.value)


class LakeReader(DataSourceReader):
    """Reads the requested columns of a table in the lake."""

    def __init__(self, table: LakeTable, schema: StructType) -> None:
        self.table, self.schema = table, schema
        self.conditions: list[Condition] = []

    def partitions(self) -> Sequence[InputPartition]:
        """Return the files that may contain matching rows."""
        return [
            OneFile(one)
            for one in self.table.named()
            if all(condition.holds(one) for condition in self.conditions)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a file."""
        assert isinstance(partition, OneFile)
        yield from rows_as(
            self.table.files, self.table.root, self.schema, [partition.named]
        )


def lake_table(options: Mapping[str, str]) -> LakeTable:
    """Return the table that the options `lake` and `table` name.

    Raises EnvironmentFault if there is no lake, UsageError for an unknown table.
    """
    storage = {
        name[len(STORAGE) :].upper(): value
        for name, value in options.items()
        if name.startswith(STORAGE)
    }
    lake = Lake(LakeSpec(options["lake"], storage_options=storage))
    name = options.get("table", "outbox")
    table = lake.table(name, StructType())
    delta = table.load() if name in lake.names() else None
    if delta is None:
        raise UsageError(
            f"There is no table {name!r} in the lake; there are "
            f"{', '.join(lake.names()) or 'none yet'}."
        )
    table.struct = from_arrow_schema(pa.schema(delta.schema().to_arrow()))
    return table
