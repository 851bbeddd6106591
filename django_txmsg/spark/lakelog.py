"""The data files of a table, as named in its Delta log."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.transaction import AddAction, RemoveAction

from .lakefile import LakeFile

PARTITIONS = ["service", "day"]


@dataclass(frozen=True)
class Named:
    """A data file that the log names."""

    path: str
    service: str
    day: dt.date
    size: int
    rows: int
    batches: tuple[int, int] | None = None
    """The lowest and the highest batch of its rows, if the log has them."""


def added(file: LakeFile, *, same_rows: bool = False) -> AddAction:
    """Return the log action that adds a file. `same_rows` means that the file contains
    exactly the rows of the files that it replaces."""
    return AddAction(
        path=file.path,
        size=file.size,
        partition_values=_partition(file),
        modification_time=file.modified_ms,
        data_change=not same_rows,
        stats=json.dumps(_stats(file)),
    )


def removed(file: Named, now_ms: int, *, same_rows: bool = False) -> RemoveAction:
    """Return the log action that removes a file from the table."""
    return RemoveAction(
        path=file.path,
        data_change=not same_rows,
        deletion_timestamp=now_ms,
        partition_values=_partition(file),
        size=file.size,
    )


def named_by(delta: DeltaTable) -> list[Named]:
    """Return all files of this version of the table."""
    actions = pa.table(delta.get_add_actions(flatten=True))
    if not actions.num_rows:
        return []
    return [
        Named(
            # The log always has it URI-encoded.
            path=unquote(row["path"]),
            service=row["partition.service"],
            day=row["partition.day"],
            size=row["size_bytes"],
            rows=row["num_records"] or 0,
            batches=_batches(row),
        )
        for row in actions.to_pylist()
    ]


def touched(files: Iterable[Named]) -> list[list[int]]:
    """Return the ranges of batches that these files contain, as stored in the log."""
    return [list(one) for one in sorted({f.batches for f in files if f.batches})]


def _partition(file: LakeFile | Named) -> dict[str, str | None]:
    return {"service": file.service, "day": file.day.isoformat()}


def _stats(file: LakeFile) -> dict[str, Any]:
    """Return the statistics of a file for the log. Readers use them to skip files."""
    stats: dict[str, Any] = {"numRecords": file.rows}
    if file.batches is not None:
        low, high = file.batches
        stats |= {"minValues": {"batch_id": low}, "maxValues": {"batch_id": high}}
        stats["nullCount"] = {"batch_id": 0}
    return stats


def _batches(row: dict[str, Any]) -> tuple[int, int] | None:
    low, high = row.get("min.batch_id"), row.get("max.batch_id")
    return None if low is None or high is None else (low, high)
