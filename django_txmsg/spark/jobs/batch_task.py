"""The Spark task of `archive`. It writes batches into files, and reads the files back.

The rows never enter the JVM. Only the names of the files and their facts do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ..databases import Database, Read
from ..engine import attempt_key
from ..lakefile import DayFiles, LakeFile
from ..ledger import Batch
from ..schemas import Column, Table
from ..spec import LakeSpec
from ..storage import place_of


@dataclass(frozen=True)
class Written:
    """A batch whose files were written and verified, but are not in the log yet."""

    batch: Batch
    files: list[LakeFile]
    rows: int
    checksum: int


#: What a task yields for a batch, as JSON values: its number, its files, the number of
#: its rows, and their checksum.
Facts = tuple[int, list[dict[str, Any]], int, int]


@dataclass
class BatchTask:
    """The function that executors run. It reads a batch, writes one file for each day,
    and reads these files back."""

    database: Database
    lake: LakeSpec
    table: Table
    service: str
    prove: bool = True

    def __call__(self, batches: Iterable[Batch]) -> Iterator[Facts]:
        """Archive batches through one connection. Yields the facts of each batch."""
        with self.database.connected() as read:
            for batch in batches:
                yield self._one(read, batch)

    def _one(self, read: Read, batch: Batch) -> Facts:
        columns = kept_columns(self.table, self.lake)
        place = place_of(self.lake)
        name = f"{batch.token}-{attempt_key()}"
        days = DayFiles(place, self.table.name, self.service, self.table.clock, name)
        for rows in read(self.table, columns, batch.where):
            days.write(_with_outcome(rows, self.table, batch.number))
        own = (batch.number, batch.number)
        files = [replace(one, batches=own).facts() for one in days.close()]
        checksum = days.prove(self.table) if self.prove else 0
        return batch.number, files, days.rows, checksum


def run_here(task: BatchTask, batches: Sequence[Batch], threads: int) -> list[Facts]:
    """Archive batches in this process, without Spark. Returns what the task yields."""
    shares = [batches[first::threads] for first in range(threads)]
    with ThreadPoolExecutor(max_workers=threads) as pool:
        done = pool.map(lambda share: list(task(share)), shares)
        return [one for share in done for one in share]


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
