"""`sweep` removes the files of failed attempts and joins small files. It changes
nothing else."""

from __future__ import annotations

import dataclasses
import os
import resource
import shutil
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import psycopg
import pytest
from deltalake import DeltaTable

from django_txmsg.spark.connection import read_json
from django_txmsg.spark.errors import EnvironmentFault, SpoiltFile, faults_told
from django_txmsg.spark.lake import Lake, Overtaken
from django_txmsg.spark.lock import Archiving, archiving
from django_txmsg.spark.results import Results, result_struct
from django_txmsg.spark.schemas import INBOX, OUTBOX, Table
from django_txmsg.spark.spec import JobSpec, LakeSpec, SourceSpec
from django_txmsg.spark.transforms.journeys import EXPECTED
from tests.spark.archives import (
    archive,
    assert_moved_once,
    delta_rows,
    hashes_in,
    path_of,
)
from tests.spark.log import LONG_AGO, Log
from tests.spark.running import outcome, run


def sweep(log: Log, lake: LakeSpec, *words: str) -> dict[str, Any]:
    spec = JobSpec(services=(log.spec,), lake=lake)
    return run(spec, "sweep", *words)["counts"]["outbox"]


def test_orphans_go_small_files_join_and_the_rows_stay(
    spark, log: Log, lake: LakeSpec
) -> None:
    log.send_many(250)
    before = hashes_in(log)
    archive(spark, log, lake)
    [day] = path_of(lake).glob("service=*/day=*")
    old, young = day / "old-attempt.parquet", day / "young-attempt.parquet"
    for orphan in (old, young):
        orphan.write_bytes(b"half a file")
    two_days_ago = time.time() - 2 * 86_400
    os.utime(old, (two_days_ago, two_days_ago))
    files = {path.name for path in day.iterdir()}

    told = sweep(log, lake, "--dry-run")
    assert (told["orphans"], {path.name for path in day.iterdir()}) == (1, files)
    done = sweep(log, lake)

    assert (done["orphans"], done["compacted"]) == (1, 3)
    assert not old.exists()
    # A slow archive may still name this file in the log.
    assert young.exists()
    assert_moved_once(before, log, lake, set(before))
    # What compaction replaced stays for readers that have begun, and goes in the end.
    assert len(list(day.glob("*.parquet"))) == 3 + 1 + 1
    assert sweep(log, lake, "--replaced-older-than", "59m")["replaced"] == 0
    assert sweep(log, lake, "--replaced-older-than", "0s")["replaced"] == 3
    assert len(list(day.glob("*.parquet"))) == 2
    assert_moved_once(before, log, lake, set(before))


def test_days_past_the_lakes_own_retention_are_dropped(
    spark, log: Log, lake: LakeSpec
) -> None:
    log.send_many(30, every=86_400.0)
    archive(spark, log, lake)
    days = len(set(delta_rows(lake)["day"].to_pylist()))
    assert days == 30

    age = f"{(time.time() - 1_774_000_000) / 86_400:.0f}d"
    dropped = sweep(log, lake, "--keep", age)["dropped_days"]

    assert 0 < dropped < 30
    assert len(set(delta_rows(lake)["day"].to_pylist())) == 30 - dropped


def test_what_another_service_has_dropped_leaves_our_batches_proven(
    spark, make_log, lake: LakeSpec
) -> None:
    logs = make_log("sqlite"), make_log("sqlite", "payments")
    for log in logs:
        log.send_many(10)
        archive(spark, log, lake)
    assert sweep(logs[1], lake, "--keep", "1d")["dropped_days"] == 1

    told = outcome(JobSpec((logs[0].spec,), lake), "verify").lines

    assert "outbox: 1 files and 1 batches are as the log says." in told


@pytest.mark.matrix
def test_batches_joined_before_they_are_settled_are_settled(
    spark, log: Log, lake: LakeSpec
) -> None:
    log.send_many(250)
    before = hashes_in(log)

    class Stopped(Exception):
        pass

    committed = []

    def stop(step: str) -> None:
        committed.append(step)
        if committed.count("committed") == 2:
            raise Stopped

    with pytest.raises(Stopped):
        archive(spark, log, lake, on_step=stop)
    assert log.count() == 250
    assert sweep(log, lake, "--replaced-older-than", "0s")["compacted"] == 2
    # As an operator might, meanwhile.
    log.execute(
        "UPDATE django_txmsg_outboxmessage SET dispatched_at = NULL"
        " WHERE id IN (7, 150)"
    )
    before |= {row: hashes_in(log)[row] for row in (7, 150)}

    done = archive(spark, log, lake)

    assert "2 rows differ: id 7, 150." in done.refused[0]
    assert_moved_once(before, log, lake, set(range(1, 251)) - {7, 150})


@pytest.mark.matrix
def test_results_are_tidied_as_rows_are(spark, log: Log, lake: LakeSpec) -> None:
    log.send_many(10)
    archive(spark, log, lake)
    spec = JobSpec(services=(log.spec,), lake=lake)
    for _ in range(3):
        log.send_many(1)
        run(spec, "reconcile", "--fail-on", "never")

    swept = run(spec, "sweep")["counts"]

    # The runs of three jobs, and of each their findings in at least one file.
    assert swept["runs"]["compacted"] == 3
    assert swept["verdicts"]["compacted"] >= 3
    runs = Table("runs", "", "", (), "", ("",))
    assert delta_rows(lake, runs)["job"].to_pylist().count("reconcile") == 3


def test_orphans_of_a_former_name_go(make_log, lake: LakeSpec) -> None:
    """The service was renamed after its archive job was killed."""
    log: Log = make_log("sqlite")
    log.send_many(1)
    archive(None, log, lake)
    orphans = []
    for name in ("orders", "other"):
        day = path_of(lake) / f"service={name}" / "day=2026-03-01"
        day.mkdir(parents=True)
        orphans.append(day / "attempt.parquet")
        orphans[-1].write_bytes(b"half a file")
    renamed = dataclasses.replace(lake, former={"orders": "shop"})

    done = sweep(log, renamed, "--orphans-older-than", "0s")

    assert done["orphans"] == 1
    assert [one.exists() for one in orphans] == [False, True]


def test_a_sweep_makes_room_before_it_writes(make_log, lake: LakeSpec) -> None:
    log: Log = make_log("sqlite")
    log.send_many(250)
    log.receive([{"message_id": uuid.uuid4()}])
    orphans = []
    for table in (OUTBOX, INBOX):
        archive(None, log, lake, table=table)
        [day] = path_of(lake, table).glob("service=*/day=*")
        orphans.append(day / "attempt.parquet")
        orphans[-1].write_bytes(b"half a file")
        two_days_ago = time.time() - 2 * 86_400
        os.utime(orphans[-1], (two_days_ago, two_days_ago))
        # Nothing can be written into this log.
        entries = path_of(lake, table) / "_delta_log"
        version = DeltaTable(path_of(lake, table)).version()
        (entries / f"{version + 1:020}.json").mkdir()

    with pytest.raises(EnvironmentFault, match="outbox was changed"):
        sweep(log, lake)

    assert not any(one.exists() for one in orphans)


def test_a_damaged_file_and_a_damaged_log_are_named(make_log, lake: LakeSpec) -> None:
    log: Log = make_log("sqlite")
    log.send_many(250)
    archive(None, log, lake)
    file = next(path_of(lake).glob("service=*/day=*/*.parquet"))
    os.truncate(file, 100)
    with pytest.raises(SpoiltFile, match=f"{file} cannot be read: [^\n]+`pipeline"):
        sweep(log, lake)

    # The Delta library appends a backtrace to its error.
    entry = max(path_of(lake).glob("_delta_log/*.json"))
    entry.write_text("{nothing")
    with pytest.raises(EnvironmentFault, match=r"outbox cannot be read: [^\n]+\.$"):
        sweep(log, lake)


def test_damaged_file_of_one_table_does_not_stop_the_sweep_of_others(
    make_log, lake: LakeSpec
) -> None:
    log: Log = make_log("sqlite")
    log.send_many(250)
    log.receive([{"message_id": uuid.uuid4()}])
    for table in (OUTBOX, INBOX):
        archive(None, log, lake, table=table)
    [file] = path_of(lake, INBOX).glob("service=*/day=*/*.parquet")
    os.truncate(file, 100)

    with pytest.raises(SpoiltFile, match=f"{file} cannot be read"):
        sweep(log, lake)

    assert len(DeltaTable(path_of(lake)).file_uris()) == 1
    counts = log.value("SELECT counts FROM django_txmsg_pipelinerun")
    assert read_json(counts)["outbox"]["compacted"] == 3


def test_an_archive_of_one_table_does_not_stop_the_sweep_of_others(
    make_log, lake: LakeSpec
) -> None:
    log: Log = make_log("sqlite")
    log.send_many(250)
    for _ in range(2):
        log.receive([{"message_id": uuid.uuid4()}])
        archive(None, log, lake, table=INBOX)
    archive(None, log, lake)

    with (
        log.connected() as connection,
        archiving(connection, log.spec, "inbox"),
        pytest.raises(Archiving, match="inbox of 'shop' is running"),
    ):
        sweep(log, lake)

    counts = read_json(log.value("SELECT counts FROM django_txmsg_pipelinerun"))
    assert counts["outbox"]["compacted"] == 3
    assert len(DeltaTable(path_of(lake, INBOX)).file_uris()) == 2


def test_an_archive_of_one_table_hides_no_damaged_file_of_another(
    make_log, lake: LakeSpec
) -> None:
    log: Log = make_log("sqlite")
    log.send_many(250)
    log.receive([{"message_id": uuid.uuid4()}])
    for table in (OUTBOX, INBOX):
        archive(None, log, lake, table=table)
    [file] = path_of(lake, INBOX).glob("service=*/day=*/*.parquet")
    os.truncate(file, 100)

    for name, error in (("outbox", SpoiltFile), ("inbox", Archiving)):
        with (
            log.connected() as connection,
            archiving(connection, log.spec, name),
            pytest.raises(error, match="inbox"),
        ):
            sweep(log, lake)


def test_a_table_that_another_run_changes_hides_no_other_one(
    make_log, lake: LakeSpec
) -> None:
    log: Log = make_log("sqlite")
    tables = [path_of(lake).with_name(name) for name in ("counts", "subscriptions")]
    for _ in range(2):
        results = Results(lake, "shop", uuid.uuid4().hex, LONG_AGO)
        for table in tables:
            row = dict.fromkeys(EXPECTED.fieldNames())
            results.save_rows(table.name, EXPECTED, [row])
    # No entry with the next number can be added to the log.
    (tables[0] / f"_delta_log/{DeltaTable(tables[0]).version() + 1:020}.json").mkdir()

    with pytest.raises(Overtaken, match="/counts was changed by another process"):
        sweep(log, lake)

    assert [len(DeltaTable(table).file_uris()) for table in tables] == [2, 1]


@pytest.mark.parametrize("same_rows", [False, True])
def test_a_table_is_changed_beside_another_service_and_not_beside_the_same(
    lake: LakeSpec, same_rows: bool
) -> None:
    def add(service: str) -> None:
        results = Results(lake, service, uuid.uuid4().hex, LONG_AGO)
        row = dict.fromkeys(EXPECTED.fieldNames())
        results.save_rows("subscriptions", EXPECTED, [row])

    def version() -> DeltaTable:
        found = place.load()
        assert found is not None
        return found

    def drop(service: str, seen: DeltaTable) -> None:
        first = place.named(seen, service)[:1]
        place.commit(seen, (), replaced=first, metadata={}, same_rows=same_rows)

    for service in ("shop", "payments"):
        for _ in range(3):
            add(service)
    place = Lake(lake).table("subscriptions", result_struct(EXPECTED))
    seen = version()
    drop("payments", version())

    drop("shop", seen)

    left = Counter(one.service for one in place.named())
    assert left == {"shop": 2, "payments": 2}
    with pytest.raises(Overtaken, match=r"changed by another process .* Run again\."):
        drop("shop", seen)
    assert Counter(one.service for one in place.named()) == left


def test_files_that_a_sweep_has_merged_are_not_replaced_by_an_archive(
    make_log, lake: LakeSpec, tmp_path: Path
) -> None:
    """The two work on different databases of a service. A row has changed, so the
    archive removes the row's copy from a file."""
    log: Log = make_log("sqlite")
    other = Log(SourceSpec("shop", f"sqlite:///{tmp_path}/other.sqlite3"))
    shutil.copy(log.spec.path, other.spec.path)
    log.send_many(250)
    before = hashes_in(log)

    def meanwhile(step: str) -> None:
        if step == "committed":
            log.execute(
                "UPDATE django_txmsg_outboxmessage SET dispatched_at = NULL"
                " WHERE id = 5"
            )
        if step == "amending":
            assert sweep(other, lake)["compacted"] == 2

    with pytest.raises(EnvironmentFault, match="no row is lost or doubled"):
        archive(None, log, lake, on_step=meanwhile)
    before |= {5: hashes_in(log)[5]}
    archive(None, log, lake)

    assert_moved_once(before, log, lake, before.keys() - {5})


def test_a_file_that_cannot_be_used_is_told_in_a_sentence(tmp_path: Path) -> None:
    told = pytest.raises(EnvironmentFault, match=r"disk is full\. .*`pipeline sweep`")
    with told, faults_told(), Path("/dev/full").open("w") as full:
        full.write("a report")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        told = pytest.raises(EnvironmentFault, match=r"File too large.*`ulimit -f`")
        with told, faults_told():
            (tmp_path / "report").write_text("more than ten letters")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(EnvironmentFault, match="'/nowhere/report'"), faults_told():
        Path("/nowhere/report").read_text()
    told = pytest.raises(EnvironmentFault, match="terminating connection")
    with told, faults_told():
        raise psycopg.errors.AdminShutdown("terminating connection")
    with pytest.raises(ValueError, match="bug"), faults_told():
        raise ValueError("a bug of ours")
