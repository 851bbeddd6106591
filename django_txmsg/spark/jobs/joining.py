"""Joining small files of the lake, day by day, with the checksums that our readers
verify: what the Delta library writes has none."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterator
from itertools import groupby

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import VerificationRefused
from ..lakefile import DayFiles, LakeFile, rows_of
from ..lakelog import Named
from ..laketable import LakeTable
from ..results import CLOCK
from ..schemas import TABLES
from .settling import checksum

#: Files below this size are joined, into files of about this size.
SMALL = 64 << 20


def join(place: LakeTable, service: str) -> int:
    """Join a service's small files in one entry of the log; return how many. Whatever a
    file records about its rows is kept. Raises VerificationRefused if the written rows
    differ from the rows that were read."""
    delta = place.load()
    if delta is None:
        return 0
    small = [
        one for one in place.named(delta) if one.service == service and one.size < SMALL
    ]
    old: list[Named] = []
    new: list[LakeFile] = []
    for group in _groups(place, small):
        old += group
        new += _joined(place, group)
    if old:
        place.commit(
            delta, new, replaced=old, metadata={"joined": len(old)}, same_rows=True
        )
    return len(old)


def _groups(place: LakeTable, small: list[Named]) -> Iterator[list[Named]]:
    """Yield files of a day that have the same columns: an older row must not get a
    later column, not even as null, because its checksum does not cover it."""

    def kind(one: Named) -> tuple[str, tuple[str, ...]]:
        schema = pq.read_schema(f"{place.root}/{one.path}", filesystem=place.files)
        return one.day.isoformat(), tuple(schema.names)

    kinds = {one: kind(one) for one in small}
    for _, of_one_kind in groupby(sorted(small, key=kinds.__getitem__), kinds.get):
        group: list[Named] = []
        size = 0
        for one in of_one_kind:
            group.append(one)
            size += one.size
            if size >= SMALL:
                yield group
                group, size = [], 0
        if len(group) > 1:
            yield group


def _joined(place: LakeTable, group: list[Named]) -> list[LakeFile]:
    table = TABLES.get(place.name)
    files = DayFiles(
        place.files, place.root, group[0].service, table.clock if table else CLOCK,
        f"joined-{uuid.uuid4()}", ready=place.place.insist,
    )  # fmt: skip

    def proof(batch: pa.RecordBatch) -> int:
        return checksum(batch, table) if table else 0

    before = after = rows = 0
    for one in group:
        for batch in rows_of(place.files, f"{place.root}/{one.path}"):
            before += proof(batch)
            files.write(batch.replace_schema_metadata(None))
    written = files.close()
    for file in written:
        for batch in rows_of(place.files, f"{place.root}/{file.path}"):
            after += proof(batch)
            rows += batch.num_rows
    if (rows, after) != (sum(one.rows for one in group), before):
        raise VerificationRefused(
            f"{written[0].path} does not hold what was written into it."
        )
    known = [one.batches for one in group if one.batches is not None]
    if len(known) < len(group):
        return written
    batches = min(low for low, _ in known), max(high for _, high in known)
    return [dataclasses.replace(one, batches=batches) for one in written]
