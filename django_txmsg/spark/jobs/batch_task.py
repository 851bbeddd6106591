"""The Spark task of `archive`. It writes batches into files, and reads the files back.

The rows never enter the JVM. Only the manifest does, with one row for each file.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql import Row

from ..databases.base import Database, Reader
from ..errors import VerificationRefused
from ..lakefile import DayFiles, LakeFile, prove
from ..ledger import Batch
from ..schemas import Column, Table, arrow_schema, struct_of
from ..spec import LakeSpec
from ..storage import place_of

MANIFEST = struct_of(
    "batch_id long not null, path string not null, day date not null, "
    "size long not null, rows long not null, modified_ms long not null, "
    "checksum string not null, write_seconds double not null, "
    "proof_seconds double not null"
)


def file_of(row: Row, service: str) -> LakeFile:
    """Return the file that a manifest row describes."""
    batches = (row.batch_id, row.batch_id)
    return LakeFile(
        row.path, service, row.day, row.size, row.rows, row.modified_ms, batches
    )


@dataclass
class BatchTask:
    """The function that executors run. It reads a batch, writes one file for each day,
    and reads these files back."""

    database: Database
    lake: LakeSpec
    table: Table
    service: str
    work: Sequence[tuple[Batch, str]]
    prove: bool = True

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Archive batches. The input contains their indexes in `work`. Yield their
        manifest rows."""
        with self.database.connected() as reader:
            for numbers in batches:
                for number in numbers.column(0).to_pylist():
                    yield from self._one(reader, *self.work[number])

    def _one(
        self, reader: Reader, batch: Batch, where: str
    ) -> Iterator[pa.RecordBatch]:
        columns = kept_columns(self.table, self.lake)
        place = place_of(self.lake)
        files, root = place.files, place.root
        context = TaskContext.get()
        task = context.taskAttemptId() if context else 0
        started = time.monotonic()
        days = DayFiles(
            files, f"{root}/{self.table.name}", self.service, self.table.clock,
            f"{batch.token}-{task}",
            lambda rows: _with_outcome(rows, self.table, batch.number), place.insist,
        )  # fmt: skip
        for rows in reader.read(self.table, columns, where):
            days.write(rows)
        written = days.close()
        wrote = time.monotonic()
        checksum = 0
        if self.prove:
            proof = prove(files, f"{root}/{self.table.name}", written, columns)
            if proof.rows != days.rows:
                raise VerificationRefused(
                    f"Batch {batch.number}: {days.rows} rows read, {proof.rows} "
                    "written."
                )
            checksum = proof.checksum
        if written:
            common = [str(checksum), wrote - started, time.monotonic() - wrote]
            lines = [
                [
                    batch.number,
                    one.path,
                    one.day,
                    one.size,
                    one.rows,
                    one.modified_ms,
                    *common,
                ]
                for one in written
            ]
            names = MANIFEST.fieldNames()
            yield pa.RecordBatch.from_pylist(
                [dict(zip(names, line, strict=True)) for line in lines],
                schema=arrow_schema(MANIFEST),
            )


def run_here(task: BatchTask, count: int, threads: int) -> list[Row]:
    """Archive `count` batches in this process, without Spark. Returns their manifest
    rows."""

    def work(numbers: Sequence[int]) -> list[Row]:
        column = pa.array(numbers, pa.int64())
        batches = task(iter([pa.RecordBatch.from_arrays([column], names=["id"])]))
        return [Row(**row) for batch in batches for row in batch.to_pylist()]

    shares = [range(first, count, threads) for first in range(threads)]
    with ThreadPoolExecutor(max_workers=threads) as pool:
        return [row for rows in pool.map(work, shares) for row in rows]


def kept_columns(table: Table, lake: LakeSpec) -> tuple[Column, ...]:
    """Return the columns of a table that the lake stores."""
    if lake.keep_bodies:
        return table.columns
    kept = (one for one in table.columns if one.kind != "bytes" and not one.personal)
    return tuple(kept)


def _with_outcome(rows: pa.Table, table: Table, number: int) -> pa.Table:
    if isinstance(table.outcome, str):
        ended = rows[table.outcome]
    else:
        *ends, (other, _) = table.outcome
        ended = pa.repeat(other, rows.num_rows)
        for word, column in reversed(ends):
            ended = pc.if_else(pc.is_valid(rows[column]), word, ended)
    numbers = pa.repeat(pa.scalar(number, pa.int64()), rows.num_rows)
    rows = rows.append_column("outcome", ended).append_column("batch_id", numbers)
    # Nullable in the file as in the log: a later version may add columns.
    return rows.cast(pa.schema([one.with_nullable(True) for one in rows.schema]))
