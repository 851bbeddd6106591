"""Reading a table of a lake as a Spark data source: what its log names, and no more.

A directory of the lake also holds what failed attempts have left, and what is replaced
or erased: `spark.read.parquet()` would count it in.
"""

from __future__ import annotations

import datetime as dt
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from ..errors import UsageError
from ..lake import Lake
from ..lakelog import Named
from ..lakerows import LakeRows
from ..laketable import LakeTable
from ..spec import LakeSpec

#: What the options of an object store begin with.
STORAGE = "storage."
_COMPARED: dict[type[Filter], Callable[[Any, Any], bool]] = {
    EqualTo: operator.eq,
    GreaterThan: operator.gt,
    GreaterThanOrEqual: operator.ge,
    LessThan: operator.lt,
    LessThanOrEqual: operator.le,
    In: lambda value, several: value in several,
}


@dataclass
class OneFile(InputPartition):
    """A file of the lake, read by one task."""

    named: Named


class LakeReader(DataSourceReader):
    """Reads the files that the log of a table names, those columns that are asked
    for."""

    def __init__(self, table: LakeTable, schema: StructType) -> None:
        self.table, self.schema = table, schema
        self.conditions: list[tuple[type[Filter], str, Any]] = []

    def partitions(self) -> Sequence[InputPartition]:
        """Return the files that may hold rows."""
        return [
            OneFile(one)
            for one in self.table.named()
            if all(
                _COMPARED[kind](getattr(one, name), value)
                for kind, name, value in self.conditions
            )
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield a file's rows as batches."""
        assert isinstance(partition, OneFile)
        rows = LakeRows(self.table.files, self.table.root, self.schema, ())
        yield from rows.of(partition.named)


class PushingLakeReader(LakeReader):
    """A reader that leaves out the files of other services and days.

    A class of its own, since Spark refuses a reader with `pushFilters` where the
    setting for it is off.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's
        """Note what says service and day. Spark looks at all of it again."""
        for one in filters:
            name = ".".join(getattr(one, "attribute", ()))
            value = getattr(one, "value", None)
            if type(one) in _COMPARED and _comparable(name, value):
                self.conditions.append((type(one), name, value))
            yield one


def _comparable(name: str, value: object) -> bool:
    kind = {"service": str, "day": dt.date}.get(name)
    values = value if isinstance(value, list | tuple) else [value]
    return all(type(one) is kind for one in values)


def lake_table(options: Mapping[str, str]) -> LakeTable:
    """Return the table that the options `lake` and `table` name.

    Raises EnvironmentFault where there is no lake, UsageError for an unknown table.
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
