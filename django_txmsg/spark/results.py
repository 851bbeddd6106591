"""The lake's tables of results. Each row has the id of its run."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import types as t

from .engine import attempt_key, gather_from
from .lake import Lake, LakeTable
from .lakefile import DayFiles, LakeFile
from .schemas import arrow_schema, struct_of
from .spec import LakeSpec
from .storage import place_of

#: When a result was recorded; its day is that of the file.
CLOCK = "recorded_at"


def result_struct(struct: t.StructType) -> t.StructType:
    """Return the schema of a table of results in the lake."""
    columns = t.StructType([t.StructField(f.name, f.dataType) for f in struct.fields])
    own = f"run_id string, {CLOCK} timestamp, service string, day date"
    return struct_of(columns, own)


@dataclass
class Results:
    """Writes the results of one run into the lake."""

    lake: LakeSpec
    service: str
    run_id: str
    at: dt.datetime
    makes_lake: bool = True
    #: The column with the day. If it is not the run's instant, rows are written
    #: unchanged.
    clock: str = CLOCK
    #: A column that is true in rows which go to files of their own.
    apart: str = ""

    def save(
        self, name: str, struct: t.StructType, frame: DataFrame, *, few: int = 0
    ) -> None:
        """Write a DataFrame with one log entry, so that all rows become visible at the
        same time. If there are at most `few` rows, the driver writes them, without
        Spark tasks."""
        if few:
            rows = frame.select(*struct.fieldNames()).limit(few + 1).toArrow()
            if rows.num_rows <= few:
                self.save_rows(name, struct, rows.to_pylist())
                return
        Lake(self.lake, create=self.makes_lake)
        self._commit(name, struct, self.write(name, struct, frame))

    def write(
        self, name: str, struct: t.StructType, frame: DataFrame
    ) -> list[LakeFile]:
        """Write a DataFrame into files. No log entry names them yet."""
        schema, rows = arrow_schema(struct), frame.select(*struct.fieldNames())

        def task(batches: Iterator[pa.RecordBatch]) -> list[dict[str, Any]]:
            return [one.facts() for one in self.written(name, schema, batches)]

        with self._table(name, struct).discarding(self.service, [self.run_id]):
            return [LakeFile.of(one) for one in gather_from(rows, task)]

    def save_rows(
        self, name: str, struct: t.StructType, rows: Sequence[dict[str, Any]]
    ) -> None:
        """Write a few rows from the driver, without Spark."""
        Lake(self.lake, create=self.makes_lake)
        schema = arrow_schema(struct)
        batch = pa.RecordBatch.from_pylist(list(rows), schema)
        with self._table(name, struct).discarding(self.service, [self.run_id]):
            written = self.written(name, schema, [batch])
        self._commit(name, struct, written)

    def written(
        self, name: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]
    ) -> list[LakeFile]:
        """Write batches into files with unique names, and return these files. Executors
        call this method, too."""
        place, unique = place_of(self.lake), f"{self.run_id}-{attempt_key()}"
        files = DayFiles(place, name, self.service, self.clock, unique, self.apart)
        for batch in batches:
            files.write(self._stamped(batch.cast(schema)))
        return files.close()

    def _stamped(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Add the run's id and start time to each row of a batch."""
        if self.clock != CLOCK:
            return batch
        rows = batch.num_rows
        at = pa.scalar(self.at, pa.timestamp("us", tz="UTC"))
        fields = [one.with_nullable(True) for one in batch.schema]
        fields += [pa.field("run_id", pa.string()), pa.field(CLOCK, at.type)]
        arrays = [*batch.columns, pa.repeat(self.run_id, rows), pa.repeat(at, rows)]
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))

    def _commit(
        self, name: str, struct: t.StructType, files: Sequence[LakeFile]
    ) -> None:
        if files:
            table = self._table(name, struct)
            table.commit(table.ensure(), files, metadata={"run": self.run_id})

    def _table(self, name: str, struct: t.StructType) -> LakeTable:
        return LakeTable(place_of(self.lake), name, result_struct(struct))
