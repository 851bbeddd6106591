"""Reads a table of the lake in Spark tasks with pyarrow, because PySpark from PyPI has
no file system for `s3://` and other object stores.

Each file is read into batches of the table's current schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyarrow import fs
from pyspark.sql import types as t

from .lakefile import rows_of
from .lakelog import PARTITIONS, Named
from .schemas import arrow_schema

#: Even for a file without any of the requested columns, the rows are counted.
_ANY = ["id", "run_id"]


@dataclass(frozen=True)
class LakeRows:
    """The function that executors run. It reads files of a table, with the requested
    columns."""

    files: fs.FileSystem
    root: str
    struct: t.StructType
    work: Sequence[Named]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of files. The input contains the indexes of the files in
        `work`."""
        for numbers in batches:
            for number in numbers.column(0).to_pylist():
                yield from self.of(self.work[number])

    def of(self, named: Named) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a file. A column that is newer than the file is null.
        Service and day are taken from the log."""
        schema = arrow_schema(self.struct)
        constants = {"service": named.service, "day": named.day}
        wanted = [name for name in schema.names if name not in PARTITIONS]
        path = f"{self.root}/{named.path}"
        for batch in rows_of(self.files, path, wanted or _ANY, lenient=True):
            arrays = []
            for field in schema:
                place = batch.schema.get_field_index(field.name)
                if field.name in constants:
                    value = pa.scalar(constants[field.name], field.type)
                    arrays.append(pa.repeat(value, batch.num_rows))
                elif place < 0:
                    arrays.append(pa.nulls(batch.num_rows, field.type))
                else:
                    arrays.append(batch.column(place).cast(field.type))
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def in_parts(named: Sequence[Named], parts: int) -> list[Named]:
    """Return the files in an order for `parts` tasks: if the list is cut into `parts`
    slices of the same length, each slice has about the same number of bytes."""
    by_size = sorted(named, key=lambda one: -one.size)
    return [one for first in range(parts) for one in by_size[first::parts]]
