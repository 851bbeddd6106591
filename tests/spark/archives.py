"""Checks of a lake after an archive run. They read the lake with the Delta library."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from django_txmsg.spark.databases import open_database
from django_txmsg.spark.jobs.archive import ArchiveOptions, Archiver, ArchiveResult
from django_txmsg.spark.rowhash import row_hashes
from django_txmsg.spark.schemas import OUTBOX, Table
from django_txmsg.spark.spec import LakeSpec
from tests.spark.log import Log

#: Small batches, several to a Spark job: every step happens more than once.
SMALL = ArchiveOptions(
    timedelta(days=1), batch_rows=100, batches=2, tasks=2, purges=2, vacuum=False
)

#: The same, with the next wave's files written while this one's rows are deleted.
OVERLAPPING = replace(SMALL, overlap=True)

#: The archive locks that are held in this database, on PostgreSQL.
LOCKS = (
    "FROM pg_locks WHERE locktype = 'advisory' AND granted AND database ="
    " (SELECT oid FROM pg_database WHERE datname = current_database())"
)


def archive(
    spark: Any, log: Log, lake: LakeSpec, *, table: Table = OUTBOX, **more: Any
) -> ArchiveResult:
    """Archive all settled rows of one table."""
    options = more.pop("options", SMALL)
    return Archiver(spark, log.spec, lake, table, options, **more).run()


def path_of(lake: LakeSpec, table: Table = OUTBOX) -> Path:
    return Path(lake.uri.removeprefix("file://")) / table.name


def delta_rows(lake: LakeSpec, table: Table = OUTBOX) -> pa.Table:
    """Return all rows of a table in the lake, read with the Delta library."""
    return pa.table(DeltaTable(path_of(lake, table)).to_pyarrow_table())


def hashes_in(log: Log, table: Table = OUTBOX) -> dict[int, int]:
    """Return the checksum of every row in the database, by the row's id."""
    found: dict[int, int] = {}
    for batch in open_database(log.spec).read(table, table.columns, ""):
        ids = batch.column(0).to_pylist()
        found.update(zip(ids, row_hashes(batch, table.columns), strict=True))
    return found


def hashes_of_lake(lake: LakeSpec, table: Table = OUTBOX) -> list[tuple[int, int]]:
    """Return the id and the checksum of every row of the lake, including duplicates."""
    names = [one.name for one in table.columns]
    rows = delta_rows(lake, table).select(names).combine_chunks()
    schema = pa.schema([one.arrow.with_nullable(True) for one in table.columns])
    found: list[tuple[int, int]] = []
    for batch in rows.cast(schema).to_batches():
        ids = batch.column(0).to_pylist()
        found += zip(ids, row_hashes(batch, table.columns), strict=True)
    return found


def assert_moved_once(
    before: dict[int, int], log: Log, lake: LakeSpec, expected: set[int]
) -> None:
    """Check that an archive run has moved exactly the rows with the ids `expected`. The
    lake must contain these rows, each once. The database must contain all other rows of
    `before`. No row may have changed."""
    there = hashes_of_lake(lake)
    assert len(there) == len(dict(there)), "a row is in the lake twice"
    assert dict(there) == {one: before[one] for one in expected}
    left = {one: value for one, value in before.items() if one not in expected}
    assert hashes_in(log) == left
