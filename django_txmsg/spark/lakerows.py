"""Reading a table of the lake in tasks, where Spark has no client for its store.

PySpark from PyPI brings no file system for `s3://` and the like. What wrote the files
reads them: pyarrow, file by file, into batches of the table's present schema.
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

#: Of a file without a column that is wanted, the rows are counted all the same.
_ANY = ["id", "run_id"]


@dataclass(frozen=True)
class LakeRows:
    """Files of a table, and the columns that are wanted of them."""

    files: fs.FileSystem
    root: str
    struct: t.StructType
    work: Sequence[Named]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Read the files whose numbers come in: what a Spark task does."""
        for numbers in batches:
            for number in numbers.column(0).to_pylist():
                yield from self.of(self.work[number])

    def of(self, named: Named) -> Iterator[pa.RecordBatch]:
        """Yield a file's rows. A column that the file is older than is null; service
        and day are the log's word."""
        schema = arrow_schema(self.struct)
        said = {"service": named.service, "day": named.day}
        wanted = [name for name in schema.names if name not in PARTITIONS]
        path = f"{self.root}/{named.path}"
        for batch in rows_of(self.files, path, wanted or _ANY, lenient=True):
            arrays = []
            for field in schema:
                place = batch.schema.get_field_index(field.name)
                if field.name in said:
                    value = pa.scalar(said[field.name], field.type)
                    arrays.append(pa.repeat(value, batch.num_rows))
                elif place < 0:
                    arrays.append(pa.nulls(batch.num_rows, field.type))
                else:
                    arrays.append(batch.column(place).cast(field.type))
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def in_parts(named: Sequence[Named], parts: int) -> list[Named]:
    """Return files in an order whose `parts` equal stretches are about as large."""
    by_size = sorted(named, key=lambda one: -one.size)
    return [one for first in range(parts) for one in by_size[first::parts]]
