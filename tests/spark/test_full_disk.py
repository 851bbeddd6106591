"""A job that fails because the lake's disk is full leaves no files behind. So the disk
has room again."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from django_txmsg.spark.cli import parsed
from django_txmsg.spark.errors import EnvironmentFault
from django_txmsg.spark.jobs.sweep import sweep_command
from django_txmsg.spark.lake import Lake
from django_txmsg.spark.runs import Run
from django_txmsg.spark.schemas import OUTBOX
from django_txmsg.spark.spec import JobSpec, LakeSpec
from tests import services
from tests.spark.archives import archive, hashes_of_lake, path_of
from tests.spark.log import Log
from tests.spark.running import run


@pytest.fixture
def disk() -> Iterator[services.SmallDisk]:
    """A disk of 24 megabytes for the lake."""
    absent = services.SmallDisk.missing()
    if absent and os.environ.get("CI") == "true":
        pytest.fail(absent)
    if absent:
        pytest.skip(absent)
    small = services.SmallDisk(24)
    yield small
    small.remove()


def send(log: Log, megabytes: int) -> None:
    """Add rows with random bodies of 256 KiB, which no codec makes smaller."""
    rows = [{"body": os.urandom(1 << 18)} for _ in range(4 * megabytes)]
    log.send(rows)


def data_files(lake: LakeSpec) -> tuple[set[Path], set[Path]]:
    """Return the data files that exist, and those that the log names."""
    named = Lake(lake).table(OUTBOX.name, OUTBOX.lake_struct()).named()
    root = path_of(lake)
    return set(root.glob("service=*/*/*.parquet")), {root / one.path for one in named}


@pytest.mark.parametrize(
    "engine", [None, pytest.param("spark", marks=pytest.mark.matrix)]
)
@pytest.mark.parametrize("before", [0, 8])
def test_an_archive_without_room_leaves_no_files(
    request: pytest.FixtureRequest, make_log, disk: services.SmallDisk, before: int,
    engine: str | None,
) -> None:  # fmt: skip
    log: Log = make_log("sqlite")
    lake = LakeSpec(f"file://{disk.path}/lake")
    spark = None if engine is None else request.getfixturevalue(engine)
    if before:
        send(log, before)
        archive(spark, log, lake)
    send(log, 30)

    with pytest.raises(Exception, match="No space left on device"):
        archive(spark, log, lake)

    there, named = data_files(lake)
    assert there == named
    assert len(there) == (before > 0)
    assert log.count() == 120


@pytest.mark.parametrize("words", [("verify",), ("sweep", "--dry-run")])
def test_job_that_only_reads_succeeds_without_room_for_its_record(
    spark: object, make_log, disk: services.SmallDisk, words: tuple[str, ...]
) -> None:
    log: Log = make_log("sqlite")
    lake = LakeSpec(f"file://{disk.path}/lake")
    send(log, 1)
    archive(None, log, lake)
    disk.fill()

    assert run(JobSpec((log.spec,), lake), *words)["state"] == "clean"

    assert disk.is_full
    [state] = log.rows("SELECT state FROM django_txmsg_pipelinerun")
    assert tuple(state) == ("clean",)


def test_full_disk_is_the_reported_reason_of_a_failed_transaction(make_log) -> None:
    """SQLite itself rolls the transaction back."""
    log: Log = make_log("sqlite")
    with log.connected() as connection:
        connection.execute("PRAGMA max_page_count = 1")  # no more than there are
        with (
            pytest.raises(EnvironmentFault, match="database or disk is full"),
            connection.transaction(),
        ):
            connection.execute("CREATE TABLE large AS SELECT zeroblob(1000000)")


def test_a_join_and_a_rewriting_without_room_leave_no_files(
    spark: object, make_log, disk: services.SmallDisk
) -> None:
    log: Log = make_log("sqlite")
    lake = LakeSpec(f"file://{disk.path}/lake")
    spec = JobSpec((log.spec,), lake)
    erased = uuid.uuid4()
    send(log, 6)
    archive(None, log, lake)
    log.send([{"message_id": erased}])
    send(log, 7)
    with pytest.raises(Stopped):
        archive(None, log, lake, on_step=stop_at_the_log_entry)
    # The batch is in the lake, and one of its rows has changed.
    log.execute(
        "UPDATE django_txmsg_outboxmessage SET dispatched_at = NULL WHERE id ="
        " (SELECT max(id) FROM django_txmsg_outboxmessage)"
    )
    files = data_files(lake)
    assert files[0] == files[1]
    assert len(files[0]) == 2

    with pytest.raises(OSError, match="No space left on device"):
        sweep_command(spec, parsed(["sweep"]), Run("sweep", {}))
    assert data_files(lake) == files
    (disk.path / "other").write_bytes(bytes(6 << 20))
    with pytest.raises(OSError, match="No space left on device"):
        archive(None, log, lake)
    assert data_files(lake) == files
    with pytest.raises(EnvironmentFault, match="disk is full"):
        run(spec, "erase", "--message-id", str(erased))
    assert data_files(lake) == files

    (disk.path / "other").unlink()
    archive(None, log, lake)
    assert (len(hashes_of_lake(lake)), log.count()) == (52, 1)
    assert run(spec, "erase", "--message-id", str(erased))["lake"]["outbox"] == 1
    there, named = data_files(lake)
    assert there == named


class Stopped(Exception):
    pass


def stop_at_the_log_entry(step: str) -> None:
    if step == "committed":
        raise Stopped
