"""Settles archived rows that may still be in the database, one by one. This is
necessary if a row in the database differs from its copy in the lake, and after a killed
run or a restored backup.

There are three cases for an archived row above the mark:

- The database has an equal row. It is deleted there, after the checksums were compared.
- The database no longer has the row. Nothing happens.
- The database's row differs. It stays, and the archived row is removed from the lake:
  its file is rewritten without the row, and read back.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from ..batchlog import BatchLog
from ..errors import VerificationRefused
from ..lake import LakeTable
from ..lakefile import DayFiles, LakeFile, checksum, kept_rows, rows_of
from ..ledger import Ledger, Row, whose
from ..progress import Step
from ..schemas import TABLES, Column


def rewritten(
    place: LakeTable,
    group: Sequence[LakeFile],
    name: str,
    keep: Callable[[pa.RecordBatch], pa.RecordBatch] = lambda batch: batch,
) -> list[LakeFile]:
    """Write the rows that `keep` selects from files of one day into a new file. Return
    a list with the new file, or an empty list if no row was selected. The new file is
    not in the log yet. Raises VerificationRefused if the new file, when read back,
    differs from the written rows."""
    table = TABLES.get(place.name)
    first = group[0]
    files = DayFiles(place.place, place.name, first.service, first.day, name)
    before = 0
    for one in group:
        for batch in rows_of(place.files, f"{place.root}/{one.path}"):
            kept = keep(batch)
            before += checksum(kept, table)
            # The file's counts include the rows that are removed.
            files.write(kept.replace_schema_metadata(None))
    written = files.close()
    if files.prove(table) != before:
        raise VerificationRefused(f"{name} does not hold what was written into it.")
    known = [one.batches for one in group if one.batches is not None]
    if len(known) < len(group):
        return written
    batches = min(low for low, _ in known), max(high for _, high in known)
    return [replace(one, batches=batches) for one in written]


#: Most rows and bytes of a deleting transaction. In SQLite all other writers wait for
#: it.
SLICE_ROWS = 2_000
SLICE_BYTES = 8 << 20


def settle(
    log: BatchLog, ledger: Ledger, after: int, until: int, on_step: Step
) -> tuple[int, list[int]]:
    """Settle the rows of the batches after `after`, up to and including `until`. Return
    the number of rows that were deleted from the database, and the ids of rows that
    stay there because they differ from their copies in the lake."""
    gone, left = 0, list[int]()
    amended: dict[LakeFile, set[Row]] = {}
    for file in log.place.of_batches(log.service, after, until):
        different: set[Row] = set()
        for rows, columns in _slices(log, file, after, until):
            began = time.monotonic()
            deleted, living = ledger.settle(rows, columns)
            gone += deleted
            different.update(living)
            if ledger.spec.vendor == "sqlite":  # let others write
                threading.Event().wait(time.monotonic() - began)
        if different:
            amended[file] = different
            left += [one[0] for one in different]
    on_step("settled")
    if amended:
        _amend(log, amended, after, until, on_step)
    return gone, sorted(left)


def _slices(
    log: BatchLog, file: LakeFile, after: int, until: int
) -> Iterator[tuple[pa.RecordBatch, list[Column]]]:
    """Yield the file's rows of these batches, in parts for short transactions, with the
    columns that the checksums cover."""
    for batch in rows_of(log.place.files, f"{log.place.root}/{file.path}"):
        within = batch.filter(_of(batch, after, until))
        for rows, columns in kept_rows(within, log.table):
            most = rows.num_rows * SLICE_BYTES // (rows.nbytes + 1)
            step = max(1, min(SLICE_ROWS, most))
            for start in range(0, rows.num_rows, step):
                yield rows.slice(start, step), columns


def _amend(
    log: BatchLog,
    amended: dict[LakeFile, set[Row]],
    after: int,
    until: int,
    on_step: Step,
) -> None:
    """Remove these rows from the lake, with one log entry."""
    name, place = str(uuid.uuid4()), log.place
    with place.discarding(log.service, [name]):
        files = [
            fresh
            for number, (file, rows) in enumerate(amended.items())
            for fresh in rewritten(
                place, [file], f"{name}-{number}",
                partial(_leaving_out, left=rows, after=after, until=until),
            )
        ]  # fmt: skip
    on_step("amending")
    ids = sorted(one[0] for one in set().union(*amended.values()))
    log.enter(
        log.last + 1, files, replaced=amended, amended=ids[:1000],
        touched=[[after + 1, until]],
    )  # fmt: skip
    on_step("amended")


def _of(batch: pa.RecordBatch, after: int, until: int) -> pa.Array:
    numbers = batch.column("batch_id")
    return pc.and_(pc.greater(numbers, after), pc.less_equal(numbers, until))


def _leaving_out(
    batch: pa.RecordBatch, left: set[Row], after: int, until: int
) -> pa.RecordBatch:
    rows = zip(batch.column("id").to_pylist(), whose(batch), strict=True)
    known = pa.array([row in left for row in rows], pa.bool_())
    return batch.filter(pc.invert(pc.and_(known, _of(batch, after, until))))
