"""Reads a table of a lake as a Spark data source: only the files that the log names.

The directory also contains replaced files and files of failed attempts.
`spark.read.parquet()` would read these, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from ..errors import UsageError
from ..lake import Lake
from ..lakefile import LakeFile, rows_as
from ..laketable import LakeTable
from ..spec import LakeSpec

#: The prefix of an object store's options.
STORAGE = "storage."


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
