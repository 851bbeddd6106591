"""The Spark task of `archive`. It writes batches into files, and reads the files back.

The rows never enter the JVM. Only the manifest does, with one row for each file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Row

from ..databases import Database, Read
from ..lakefile import FILE, DayFiles, prove
from ..ledger import Batch
from ..schemas import Column, Table, arrow_schema, struct_of
from ..spec import LakeSpec
from ..staging import attempt_key
from ..storage import place_of

MANIFEST = struct_of("batch_id long not null", FILE, "checksum string not null")


@dataclass
class BatchTask:
    """The function that executors run. It reads a batch, writes one file for each day,
    and reads these files back."""

    database: Database
    lake: LakeSpec
    table: Table
    service: str
    prove: bool = True

    def __call__(self, batches: Iterable[Batch]) -> Iterator[pa.RecordBatch]:
        """Archive batches through one connection, and yield their manifest rows."""
        with self.database.connected() as read:
            for batch in batches:
                yield self._one(read, batch)

    def _one(self, read: Read, batch: Batch) -> pa.RecordBatch:
        columns = kept_columns(self.table, self.lake)
        place = place_of(self.lake)
        name = f"{batch.token}-{attempt_key()}"
        days = DayFiles(place, self.table.name, self.service, self.table.clock, name)
        for rows in read(self.table, columns, batch.where):
            days.write(_with_outcome(rows, self.table, batch.number))
        written = days.close()
        checksum = 0
        if self.prove:
            checksum = prove(place.files, days.root, written, days.rows, self.table)
        common = {"batch_id": batch.number, "checksum": str(checksum)}
        return pa.RecordBatch.from_pylist(
            [one.report() | common for one in written], schema=arrow_schema(MANIFEST)
        )


def run_here(task: BatchTask, batches: Sequence[Batch], threads: int) -> list[Row]:
    """Archive batches in this process, without Spark. Returns their manifest rows."""

    def archive(share: Sequence[Batch]) -> list[Row]:
        return [Row(**row) for batch in task(share) for row in batch.to_pylist()]

    shares = [batches[first::threads] for first in range(threads)]
    with ThreadPoolExecutor(max_workers=threads) as pool:
        return [row for rows in pool.map(archive, shares) for row in rows]


def kept_columns(table: Table, lake: LakeSpec) -> tuple[Column, ...]:
    """Return the columns of a table that the lake stores."""
    if lake.keep_bodies:
        return table.columns
    kept = (one for one in table.columns if one.kind != "bytes" and not one.personal)
    return tuple(kept)


def _with_outcome(rows: pa.RecordBatch, table: Table, number: int) -> pa.RecordBatch:
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
