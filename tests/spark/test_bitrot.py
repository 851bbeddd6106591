"""A bit of a file in the lake is flipped. Every reader notices it, and returns no data
of that file."""

from __future__ import annotations

import datetime as dt
import random
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from django_txmsg.spark.errors import EnvironmentFault, SpoiltFile, VerificationRefused
from django_txmsg.spark.lakefile import rows_of
from django_txmsg.spark.schemas import INBOX, OUTBOX
from django_txmsg.spark.spec import JobSpec, LakeSpec
from tests.spark.archives import archive, path_of
from tests.spark.log import LONG_AGO, Log
from tests.spark.running import outcome, run

JUDGE = ("reconcile", "--grace", "0s", "--fail-on", "never")


def files_of(lake: LakeSpec, table: Any = OUTBOX) -> list[Path]:
    return sorted(path_of(lake, table).glob("service=*/day=*/*.parquet"))


def chunk(path: Path, column: str) -> tuple[int, int]:
    """Return the offsets at which a column's bytes begin and end."""
    group = pq.read_metadata(path).row_group(0)
    [found] = [
        one
        for one in map(group.column, range(group.num_columns))
        if one.path_in_schema == column
    ]
    pages = (found.dictionary_page_offset, found.data_page_offset)
    first = min(one for one in pages if one)
    return first, first + found.total_compressed_size


@contextmanager
def flipped(path: Path, place: int, bit: int = 3) -> Iterator[None]:
    """Flip a bit of a file while the block runs. Restore the file at the end."""
    whole = path.read_bytes()
    spoilt = bytearray(whole)
    spoilt[place] ^= 1 << bit
    path.write_bytes(spoilt)
    try:
        yield
    finally:
        path.write_bytes(whole)


def read(path: Path) -> pa.Table:
    return pa.Table.from_batches(rows_of(fs.LocalFileSystem(), str(path)))


def retyped(path: Path, column: str) -> bytes:
    """Return a file with a flipped bit in its footer, with which the column is read as
    an integer, and the other columns as they are."""
    whole = path.read_bytes()
    length = int.from_bytes(whole[-8:-4], "little")
    right = pq.read_schema(path)
    wrong = right.set(right.get_field_index(column), pa.field(column, pa.int64()))
    for bit in range(8 * length):
        spoilt = bytearray(whole)
        spoilt[-8 - length + bit // 8] ^= 1 << bit % 8
        with suppress(OSError, ValueError, pa.ArrowException):
            if pq.read_schema(pa.BufferReader(bytes(spoilt))).equals(wrong):
                return bytes(spoilt)
    raise AssertionError("no bit of the footer does this")


def test_a_file_with_a_wrong_type_is_refused_and_its_rows_stay(
    make_log, lake: LakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit of the footer flips on the way to the disk, so an instant has become a
    number. Converted back, it would be right, but Spark cannot read the file."""
    log: Log = make_log("sqlite")
    log.send_many(20)
    closed = pq.ParquetWriter.close

    def close(writer: pq.ParquetWriter) -> None:
        was_open = writer.is_open
        closed(writer)
        if was_open:
            [path] = path_of(lake).glob("service=*/day=*/*.parquet")
            path.write_bytes(retyped(path, "created_at"))

    monkeypatch.setattr(pq.ParquetWriter, "close", close)

    with pytest.raises(VerificationRefused, match="other columns"):
        archive(None, log, lake)
    assert log.count() == 20


@pytest.mark.parametrize(
    "joined", [False, pytest.param(True, marks=pytest.mark.matrix)]
)
def test_no_flipped_bit_of_any_column_is_read_as_right(
    make_log, lake: LakeSpec, joined: bool
) -> None:
    log: Log = make_log("sqlite")
    log.send_many(400, key="k", headers={"trace": "abc"})
    archive(None, log, lake)
    if joined:
        spec = JobSpec((log.spec,), lake)
        assert run(spec, "sweep")["counts"]["outbox"]["compacted"] == 4
        run(spec, "sweep", "--replaced-older-than", "0s")
    path = files_of(lake)[-1]
    right, dice = read(path), random.Random(7)
    found = wrong = 0
    for column in right.column_names:
        start, end = chunk(path, column)
        for _ in range(40):
            with flipped(path, dice.randrange(start, end), dice.randrange(8)):
                try:
                    wrong += not read(path).equals(right)
                except SpoiltFile as error:
                    found += str(path) in str(error)
    assert wrong == 0
    assert found > 30 * len(right.column_names)


def test_corrupt_files_enter_neither_journeys_nor_verdicts(
    spark: Any, make_log, lake: LakeSpec
) -> None:
    log: Log = make_log("sqlite")
    log.send_many(50)
    log.receive([{"message_id": uuid.uuid4()}])
    for table in (OUTBOX, INBOX):
        archive(spark, log, lake, table=table)
    spec, path = JobSpec((log.spec,), lake), files_of(lake)[0]
    start, end = chunk(path, "message_id")

    with flipped(path, (start + end) // 2):
        with pytest.raises(EnvironmentFault, match=path.name):
            run(spec, *JUDGE)
        for name in ("journeys", "verdicts"):
            assert not list((path_of(lake).parent / name).glob("service=*"))
        assert path.name in "".join(outcome(spec, "verify").lines)

    assert run(spec, *JUDGE)["counts"] == {"never_received": 50, "unknown_sender": 1}
    assert run(spec, "verify")["exit_code"] == 0


def test_a_replay_stores_nothing_that_is_not_as_it_was_proven(
    spark: Any, make_log, lake: LakeSpec
) -> None:
    """An archived row has changed in its file, and the file has no page checksums.
    (Early releases and other tools write such files.) A replay of the row's batch is
    refused, and stores nothing."""
    log: Log = make_log("sqlite")
    log.send_many(50)
    archive(spark, log, lake)
    spec, [path] = JobSpec((log.spec,), lake), files_of(lake)
    backup = shutil.copy(path, path.with_suffix(".backup"))
    rows = pq.read_table(path)
    place = rows.column_names.index("body")
    bodies = [b"spoilt", *rows["body"].to_pylist()[1:]]
    pq.write_table(rows.set_column(place, "body", pa.array(bodies)), path)

    with pytest.raises(VerificationRefused, match="batch 1"):
        run(spec, "replay", "--where", "destination = 'orders.place'")
    assert log.count() == 0

    shutil.copy(backup, path)
    words = ("replay", "--where", f"created_at >= '{LONG_AGO - dt.timedelta(1)}'")
    assert run(spec, *words)["rows"] == 50
