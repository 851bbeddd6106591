"""`archive`: which rows it moves, which rows it leaves, and which rows it refuses."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from django_txmsg.spark import lake as lake_module
from django_txmsg.spark.connection import connect_plain
from django_txmsg.spark.errors import EnvironmentFault, VerificationRefused
from django_txmsg.spark.jobs.archive import (
    ArchiveOptions,
    Archiver,
    ArchiveResult,
    tasks_on,
)
from django_txmsg.spark.lake import Lake
from django_txmsg.spark.lakefile import DayFiles
from django_txmsg.spark.rowhash import row_hashes
from django_txmsg.spark.schemas import ATTEMPTS, DEAD_LETTERS, INBOX, OUTBOX
from django_txmsg.spark.spec import JobSpec, LakeSpec
from tests.faults import Proxy, wait_until
from tests.spark.archives import (
    LOCKS,
    OVERLAPPING,
    SMALL,
    archive,
    assert_moved_once,
    delta_rows,
    hashes_in,
    hashes_of_lake,
    path_of,
)
from tests.spark.conftest import ROOT, everywhere
from tests.spark.log import LONG_AGO, Log
from tests.spark.running import outcome

NOW = datetime.now(timezone.utc)


@everywhere
def test_settled_rows_move_to_the_lake_once_and_all_others_stay(
    spark, log: Log, lake: LakeSpec
) -> None:
    log.send_many(250, every=900.0)
    buried = uuid.uuid4()
    log.send(
        [
            {"dispatched_at": None},
            {"created_at": NOW},
            {"message_id": buried, "dead_at": LONG_AGO},
            {"dead_at": LONG_AGO},
        ]
    )
    log.bury([{"message_id": buried, "stage": ""}])
    before = hashes_in(log)

    result = archive(spark, log, lake)

    assert (result.rows, result.batches, result.refused) == (251, 3, [])
    # 251: pending. 252: young. 253: dead, and its dead letter is open.
    assert_moved_once(before, log, lake, {*range(1, 251), 254})
    rows = delta_rows(lake)
    assert set(rows["service"].to_pylist()) == {"shop"}
    assert {row["outcome"] for row in rows.to_pylist()} == {"dispatched", "dead"}
    assert rows.num_rows == 251
    assert all(
        row["created_at"].date() == row["day"]
        for row in rows.select(["created_at", "day"]).to_pylist()
    )
    marks = log.rows(
        "SELECT source, purged_through, begun_through, rows"
        " FROM django_txmsg_archivemark"
    )
    assert [tuple(row) for row in marks] == [("outbox", 3, 3, 251)]


@pytest.mark.parametrize("log", ["sqlite"], indirect=True)
def test_a_row_with_undecodable_text_is_named(log: Log, lake: LakeSpec) -> None:
    log.send_many(250, every=900.0)
    before = hashes_in(log)
    with log.connected() as connection:
        connection.execute(
            "UPDATE django_txmsg_outboxmessage SET last_error ="
            " CAST(x'73656372657480' AS TEXT) WHERE id = 142"
        )

    named = "column last_error of the row 142 of django_txmsg_outboxmessage is not UTF"
    with pytest.raises(EnvironmentFault, match=named) as raised:
        archive(None, log, lake)
    assert "secret" not in str(raised.value)

    with log.connected() as connection:
        connection.execute("UPDATE django_txmsg_outboxmessage SET last_error = ''")
    archive(None, log, lake)
    assert_moved_once(before, log, lake, {*range(1, 251)})


def test_the_other_tables_move_as_well(spark, log: Log, lake: LakeSpec) -> None:
    late = {"last_received_at": NOW}
    log.receive([{"message_id": uuid.uuid4()}, {"message_id": uuid.uuid4(), **late}])
    log.bury(
        [
            {"message_id": uuid.uuid4()},
            {"message_id": uuid.uuid4(), "resolution": "discarded",
             "resolved_at": LONG_AGO},
        ]
    )  # fmt: skip
    log.insert(
        "django_txmsg_attempt",
        [{"message_id": uuid.uuid4(), "stage": "s", "number": 1, "worker": "w",
          "failed_at": LONG_AGO, "duration": 0.25, "exception": "e", "traceback": "t",
          "fingerprint": "f"}],
    )  # fmt: skip

    moved = {
        table.name: archive(spark, log, lake, table=table).rows
        for table in (INBOX, DEAD_LETTERS, ATTEMPTS)
    }

    # A redelivery came lately: that inbox row still guards. An open letter stays open.
    assert moved == {"inbox": 1, "dead_letters": 1, "attempts": 1}
    assert log.count("django_txmsg_inboxmessage") == 1
    assert log.count("django_txmsg_deadletter") == 1
    assert delta_rows(lake, ATTEMPTS)["duration"].to_pylist() == [0.25]


def test_the_attempts_of_an_open_dead_letter_stay_and_a_killed_task_goes(
    spark, log: Log, lake: LakeSpec
) -> None:
    buried, killed = uuid.uuid4(), uuid.uuid4()
    log.receive(
        [
            {"message_id": buried, "dead_at": LONG_AGO, "last_error": "no"},
            {"message_id": killed, "processed_at": None, "created_at": None},
        ]
    )
    log.bury([{"message_id": buried}])
    log.insert(
        "django_txmsg_attempt",
        [{"message_id": one, "stage": "orders.place", "number": 1, "worker": "w",
          "failed_at": LONG_AGO, "duration": 0.25, "exception": "e", "traceback": "t",
          "fingerprint": "f"} for one in (buried, killed)],
    )  # fmt: skip

    moved = [archive(spark, log, lake, table=one).rows for one in (INBOX, ATTEMPTS)]

    assert moved == [1, 1]
    assert delta_rows(lake, INBOX)["outcome"].to_pylist() == ["killed"]
    assert log.count("django_txmsg_attempt") == 1
    log.execute(
        "UPDATE django_txmsg_deadletter SET resolution = 'discarded',"
        " resolved_at = created_at"
    )
    moved = [archive(spark, log, lake, table=one).rows for one in (INBOX, ATTEMPTS)]
    assert moved == [1, 1]
    outcomes = delta_rows(lake, INBOX)["outcome"].to_pylist()
    assert sorted(outcomes) == ["dead", "killed"]


def test_a_row_changed_on_the_way_is_refused_named_and_stays(
    spark, log: Log, lake: LakeSpec
) -> None:
    log.send_many(250)
    before = hashes_in(log)
    requeued = "UPDATE django_txmsg_outboxmessage SET dispatched_at = NULL WHERE id = 7"

    def requeue(step: str) -> None:
        if step == "written":
            log.execute(requeued)

    result = archive(spark, log, lake, on_step=requeue)

    assert len(result.refused) == 1
    assert "1 rows differ: id 7." in result.refused[0]
    before[7] = hashes_in(log)[7]
    assert_moved_once(before, log, lake, set(range(1, 251)) - {7})


@pytest.mark.matrix
def test_the_next_wave_is_written_while_this_one_is_deleted(
    spark, pg_log: Log, lake: LakeSpec
) -> None:
    pg_log.send_many(450)
    before = hashes_in(pg_log)
    steps: list[str] = []
    ahead = threading.Event()

    def wait_for_it(step: str) -> None:
        steps.append(step)
        if step == "ahead":
            ahead.set()
        # Nothing of this wave is deleted before the next one's files are there.
        if step == "purging":
            assert ahead.wait(60)

    result = archive(spark, pg_log, lake, options=OVERLAPPING, on_step=wait_for_it)

    assert (result.rows, result.batches) == (450, 5)
    assert steps.count("ahead") == 2
    assert steps.index("ahead") < steps.index("purged")
    assert_moved_once(before, pg_log, lake, set(before))


@pytest.mark.matrix
def test_batch_written_ahead_is_rewritten_if_its_number_is_taken(
    spark, pg_log: Log, lake: LakeSpec
) -> None:
    pg_log.send_many(450)
    before = hashes_in(pg_log)
    written: list[str] = []

    def requeue(step: str) -> None:
        if step == "written" and not written:
            pg_log.execute(
                "UPDATE django_txmsg_outboxmessage SET dispatched_at = NULL"
                " WHERE id = 7"
            )
        if step in ("ahead", "written"):
            written.append(step)

    result = archive(spark, pg_log, lake, options=OVERLAPPING, on_step=requeue)

    assert "1 rows differ: id 7." in result.refused[0]
    # The first wave's rows leave the lake by an entry of their own: the third.
    assert written == ["written", "ahead", "written", "ahead", "written"]
    before[7] = hashes_in(pg_log)[7]
    assert_moved_once(before, pg_log, lake, set(before) - {7})


@pytest.mark.matrix
def test_a_body_changed_behind_our_back_is_never_deleted(
    spark, log: Log, lake: LakeSpec
) -> None:
    log.send_many(50)
    changed = b"changed by hand"

    def tamper(step: str) -> None:
        if step == "committed" and log.count():
            log.execute(
                "UPDATE django_txmsg_outboxmessage SET body = %s WHERE id = 3", changed
            )

    result = archive(spark, log, lake, on_step=tamper)

    # The changed row is refused at first, and then archived as it is now. On PostgreSQL
    # only the next run does that, because the change is younger than this run.
    assert "id 3" in result.refused[0]
    archive(spark, log, lake)
    rows = {row["id"]: row["body"] for row in delta_rows(lake).to_pylist()}
    assert len(rows) == delta_rows(lake).num_rows == 50
    assert rows[3] == changed


def test_a_locked_row_that_is_no_longer_settled_is_not_waited_for(
    pg_log: Log, lake: LakeSpec
) -> None:
    """A relay or a handler may hold the lock for as long as it runs."""
    pg_log.send_many(50)
    name = pg_log.value("SELECT current_database()")
    pg_log.execute(f"ALTER DATABASE \"{name}\" SET lock_timeout = '2s'")

    with pg_log.connected() as relay:

        def send_again(step: str) -> None:
            if step == "committed":
                table = "django_txmsg_outboxmessage"
                pg_log.execute(f"UPDATE {table} SET dispatched_at = NULL WHERE id = 3")
                relay.raw.autocommit = False
                relay.execute(f"SELECT id FROM {table} WHERE id = 3 FOR UPDATE")

        result = archive(None, pg_log, lake, on_step=send_again)

    assert (result.rows, pg_log.count()) == (49, 1)
    assert "id 3" in result.refused[0]


def test_two_archives_of_a_table_exclude_each_other(
    spark, log: Log, lake: LakeSpec
) -> None:
    log.send_many(10)
    refusals = []

    def intrude(step: str) -> None:
        if step == "planned":
            with pytest.raises(EnvironmentFault, match="sweep or erasure of outbox"):
                archive(spark, log, lake)
            refusals.append(step)

    assert archive(spark, log, lake, on_step=intrude).rows == 10
    assert refusals


@pytest.mark.parametrize(
    "step", ["committing", pytest.param("written", marks=pytest.mark.matrix)]
)
def test_an_archiver_that_has_lost_its_lock_changes_nothing(
    spark, pg_log: Log, lake: LakeSpec, step: str
) -> None:
    pg_log.send_many(150)
    before = hashes_in(pg_log)
    done = []

    def lose_the_lock(reached: str) -> None:
        if reached == step and not done:
            # What a network fault does to a session lock, without our knowing.
            pg_log.execute(f"SELECT pg_terminate_backend(pid) {LOCKS}")
            done.append(archive(spark, pg_log, lake).rows)

    with pytest.raises(EnvironmentFault):
        archive(spark, pg_log, lake, on_step=lose_the_lock)

    assert done == [150]
    assert_moved_once(before, pg_log, lake, set(before))


def test_archiver_whose_lock_a_proxy_has_lost_does_not_reset_the_mark_of_another(
    pg_log: Log, lake: LakeSpec
) -> None:
    """Both archive the first batches of a new lake. Behind a transaction-pooling proxy,
    the lock is gone while the connection works."""
    pg_log.send_many(150)
    before = hashes_in(pg_log)

    def overtake(step: str) -> None:
        if step == "written":
            first.ledger.connection.value("SELECT pg_advisory_unlock_all()")
            assert archive(None, pg_log, lake).rows == 150

    first = Archiver(None, pg_log.spec, lake, OUTBOX, SMALL, on_step=overtake)
    with pytest.raises(EnvironmentFault, match="its log is at 2, not at 0"):
        first.run()

    assert pg_log.value("SELECT purged_through FROM django_txmsg_archivemark") == 2
    assert_moved_once(before, pg_log, lake, set(before))


def test_rows_that_another_archiver_is_deleting_stay_in_the_lake(
    pg_log: Log, lake: LakeSpec
) -> None:
    """The first archiver has lost its lock, and has deleted rows in a transaction that
    is still open. The second one settles the same rows."""
    pg_log.send_many(150)
    before = hashes_in(pg_log)
    second: list[Future[ArchiveResult]] = []

    def overtake(step: str) -> None:
        if step != "purging" or second:
            return
        pg_log.execute(f"SELECT pg_terminate_backend(pid) {LOCKS}")
        second.append(pool.submit(archive, None, pg_log, lake))
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            " AND datname = current_database()"
        )
        wait_until(lambda: pg_log.value(waiting) == 1, deadline=60)

    with ThreadPoolExecutor(max_workers=1) as pool:
        with pytest.raises(EnvironmentFault):
            archive(None, pg_log, lake, on_step=overtake)
        with pytest.raises(EnvironmentFault, match="has gone past batch 0"):
            second[0].result()

    archive(None, pg_log, lake)
    assert_moved_once(before, pg_log, lake, set(before))


class Killed(BaseException):
    """Ends an archive like a kill."""


def test_rows_of_an_earlier_run_s_batches_are_reported_apart(
    make_log, lake: LakeSpec
) -> None:
    log: Log = make_log("sqlite")
    log.send_many(5)

    def fail(step: str) -> None:
        if step == "committed":
            raise Killed

    with pytest.raises(Killed):
        archive(None, log, lake, on_step=fail)
    log.send_many(2)

    done = outcome(JobSpec((log.spec,), lake), "archive", "--older-than", "1d")

    assert done.facts["rows"] == 7
    assert done.lines[0].startswith("outbox: 2 rows in 1 batches")
    assert "5 rows were removed here" in done.lines[1]


def test_entry_of_a_killed_run_is_synced_before_its_rows_are_deleted(
    make_log: Callable[..., Log], lake: LakeSpec, monkeypatch
) -> None:
    log: Log = make_log("sqlite")
    log.send_many(5)
    entry = f"{path_of(lake)}/_delta_log/{1:020}.json"
    left: list[int] = []

    def killed(files: object, root: str, paths: Iterable[str]) -> None:
        if entry in paths:
            raise Killed

    def synced(files: object, root: str, paths: Iterable[str]) -> None:
        if entry in paths:
            left.append(log.count())

    monkeypatch.setattr(lake_module, "sync", killed)
    with pytest.raises(Killed):
        archive(None, log, lake)
    monkeypatch.setattr(lake_module, "sync", synced)
    archive(None, log, lake)

    assert left == [5]
    assert log.count() == 0


def test_bodies_stay_out_of_the_lake_where_they_must(
    spark, log: Log, tmp_path: Path
) -> None:
    log.send_many(5)

    result = archive(spark, log, LakeSpec(f"{tmp_path}/lake", keep_bodies=False))

    assert result.rows == 5
    rows = delta_rows(LakeSpec(f"{tmp_path}/lake"))
    assert rows["body"].to_pylist() == [None] * 5


@pytest.mark.matrix
def test_two_services_share_a_lake(
    spark, make_log: Callable[..., Log], lake: LakeSpec
) -> None:
    for service in ("shop", "pay/é ment"):
        log = make_log("sqlite", service.replace("/", "-"))
        log.send_many(3)
        archive(spark, log, lake)

    table = Lake(lake).table("outbox", OUTBOX.lake_struct())
    counts = table.read(spark).groupBy("service").count().collect()

    assert {row["service"]: row["count"] for row in counts} == {
        "shop": 3,
        "pay-é ment": 3,
    }
    assert table.read(spark, services=["shop"]).count() == 3
    assert table.read(spark, since=LONG_AGO.date() + timedelta(days=1)).count() == 0


def test_two_databases_of_a_service_share_a_log_and_come_to_rest(
    make_log, lake: LakeSpec
) -> None:
    logs: list[Log] = [make_log("sqlite"), make_log("sqlite", "other")]
    logs[1].spec = replace(logs[1].spec, service="shop")
    for log in logs:
        log.send_many(250)
    before = [hashes_in(log) for log in logs]

    for log in (*logs, *logs):
        archive(None, log, lake)

    assert [log.count() for log in logs] == [0, 0]
    there = sorted(hashes_of_lake(lake))
    assert there == sorted([*before[0].items(), *before[1].items()])
    version = DeltaTable(path_of(lake)).version()
    for log in (*logs, *logs):
        done = archive(None, log, lake)
        assert (done.rows, done.notes) == (0, [])
    assert DeltaTable(path_of(lake)).version() == version


def test_rows_of_two_databases_with_the_same_id_and_message_are_not_doubled(
    spark, make_log, lake: LakeSpec
) -> None:
    """A topic's message arrived at a stage of each database of the service."""
    logs: list[Log] = [make_log("sqlite"), make_log("sqlite", "other")]
    logs[1].spec = replace(logs[1].spec, service="shop")
    message = uuid.uuid4()
    for log, stage in zip(logs, ("one", "two"), strict=True):
        log.receive([{"message_id": message, "stage": stage}])
        archive(None, log, lake, table=INBOX)

    told = outcome(JobSpec(tuple(log.spec for log in logs), lake), "verify")

    assert told.facts["problems"] == []


@pytest.mark.parametrize("reached", ["written", "committing"])
def test_two_databases_of_a_service_at_once_lose_and_double_nothing(
    make_log, lake: LakeSpec, reached: str
) -> None:
    logs: list[Log] = [make_log("sqlite"), make_log("sqlite", "other")]
    logs[1].spec = replace(logs[1].spec, service="shop")
    for log in logs:
        log.send_many(250)
    before = [hashes_in(log) for log in logs]

    def intrude(step: str) -> None:
        if step == reached and logs[1].count():
            archive(None, logs[1], lake)

    with pytest.raises(EnvironmentFault, match="let the two run one after the other"):
        archive(None, logs[0], lake, on_step=intrude)
    archive(None, logs[0], lake)

    assert [log.count() for log in logs] == [0, 0]
    there = sorted(hashes_of_lake(lake))
    assert there == sorted([*before[0].items(), *before[1].items()])


@pytest.mark.matrix
def test_services_archive_into_one_lake_at_the_same_time(
    spark, make_log: Callable[..., Log], lake: LakeSpec
) -> None:
    logs = [make_log("sqlite", f"service-{number}") for number in range(4)]
    for log in logs:
        log.send_many(250)
    # All of them find no lake, and commit batch after batch side by side.
    gate = threading.Barrier(len(logs))

    def run(log: Log) -> int:
        gate.wait(60)
        return archive(spark, log, lake).rows

    with ThreadPoolExecutor(len(logs)) as pool:
        moved = list(pool.map(run, logs))

    assert moved == [250] * len(logs)
    rows = delta_rows(lake)
    pairs = set(zip(rows["service"].to_pylist(), rows["id"].to_pylist(), strict=True))
    assert (rows.num_rows, len(pairs)) == (1000, 1000)


@pytest.mark.matrix
def test_a_row_that_settles_late_joins_its_day(spark, log: Log, lake: LakeSpec) -> None:
    log.send_many(5)
    log.send([{"dispatched_at": None}])
    before = hashes_in(log)
    assert archive(spark, log, lake).rows == 5

    log.execute(
        "UPDATE django_txmsg_outboxmessage SET dispatched_at = due_at WHERE id = 6"
    )
    before[6] = hashes_in(log)[6]
    moved = archive(spark, log, lake)
    # (On PostgreSQL the change is settled when no older transaction is open.)
    assert moved.rows == 1

    assert_moved_once(before, log, lake, set(before))
    assert len(set(delta_rows(lake)["day"].to_pylist())) == 1


def test_a_column_that_a_later_version_adds_is_null_in_older_rows(
    spark, log: Log, lake: LakeSpec
) -> None:
    log.send_many(2)
    older = OUTBOX.lake_struct()
    older.fields = [f for f in older.fields if f.name != "correlation_id"]
    older.names.remove("correlation_id")
    Lake(lake, create=True).table("outbox", older).ensure()
    assert "correlation_id" not in {
        f.name for f in DeltaTable(path_of(lake)).schema().fields
    }

    archive(spark, log, lake)

    table = Lake(lake).table("outbox", OUTBOX.lake_struct())
    assert {row.correlation_id for row in table.read(spark).collect()} == {""}
    assert delta_rows(lake).num_rows == 2


def test_a_directory_that_is_not_our_lake_is_left_alone(
    spark, log: Log, tmp_path: Path
) -> None:
    log.send_many(2)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "holiday.jpg").touch()

    with pytest.raises(EnvironmentFault, match="not a lake of django_txmsg"):
        archive(spark, log, LakeSpec(f"{tmp_path}/data"))

    assert log.count() == 2


@pytest.mark.matrix
def test_a_newer_lake_is_left_alone(spark, log: Log, lake: LakeSpec) -> None:
    log.send_many(2)
    place = Lake(lake, create=True)
    Path(place.root, "_txmsg.json").write_text(json.dumps({"version": 99}))

    with pytest.raises(EnvironmentFault, match="version 99"):
        archive(spark, log, lake)

    assert log.count() == 2


@pytest.mark.parametrize("text", ["", "[]", "7", "{}", '{"version": null}'])
def test_a_damaged_marker_of_a_lake_is_reported(text: str, lake: LakeSpec) -> None:
    place = Lake(lake, create=True)
    Path(place.root, "_txmsg.json").write_text(text)

    with pytest.raises(EnvironmentFault, match="is damaged"):
        Lake(lake)


@pytest.mark.matrix
def test_a_batch_on_its_way_into_one_lake_does_not_go_to_another(
    spark, log: Log, lake: LakeSpec, tmp_path: Path
) -> None:
    log.send_many(10)

    class Stopped(Exception):
        pass

    def stop(step: str) -> None:
        if step == "committed":
            raise Stopped

    with pytest.raises(Stopped):
        archive(spark, log, lake, on_step=stop)
    with pytest.raises(EnvironmentFault, match="finish it there"):
        archive(spark, log, LakeSpec(f"{tmp_path}/other"))

    assert archive(spark, log, lake).rows == 10


def test_unreachable_database_is_reported_without_its_password(
    spark, lake: LakeSpec, pg_log: Log
) -> None:
    from django_txmsg.spark.spec import SourceSpec

    pg_log.spec = SourceSpec("shop", "postgresql://u:secret@127.0.0.1:1/x")
    log = pg_log

    with pytest.raises(EnvironmentFault, match=r"u@127.0.0.1:1/x cannot be") as caught:
        archive(spark, log, lake)

    assert "secret" not in str(caught.value)
    pg_log.spec = SourceSpec("shop", "sqlite:////nowhere")


def test_rows_of_many_days_need_few_open_files(tmp_path: Path) -> None:
    place = Lake(LakeSpec(f"{tmp_path}"), create=True).place
    days = DayFiles(place, "outbox", "shop", "at", "x")
    schema = pa.schema([("id", pa.int64()), ("at", pa.timestamp("us", tz="UTC"))])
    at = [LONG_AGO + timedelta(days=number % 150) for number in range(900)]

    for start in range(0, 900, 300):
        ids = list(range(start, start + 300))
        days.write(pa.RecordBatch.from_arrays(
            [pa.array(ids), pa.array(at[start : start + 300], schema.field("at").type)],
            schema=schema,
        ))  # fmt: skip
    written = days.close()

    assert sum(one.rows for one in written) == 900
    assert len({one.path for one in written}) == len(written) >= 150


def test_a_file_that_lost_rows_is_not_proven(tmp_path: Path) -> None:
    place = Lake(LakeSpec(f"{tmp_path}"), create=True).place
    days = DayFiles(place, "attempts", "shop", "failed_at", "x")
    schema = pa.schema([one.arrow for one in ATTEMPTS.columns])
    row = {"id": 1, "message_id": str(uuid.uuid4()), "stage": "s", "number": 1,
           "worker": "", "failed_at": LONG_AGO, "duration": None, "exception": "",
           "traceback": "", "fingerprint": ""}  # fmt: skip
    batch = pa.RecordBatch.from_pylist([row], schema=schema)
    days.write(batch)
    days.close()
    hashes = row_hashes(batch, ATTEMPTS.columns)
    assert days.prove(ATTEMPTS) == sum(hashes)

    days.rows = 2
    with pytest.raises(VerificationRefused, match="2 rows were written, and 1 are"):
        days.prove(ATTEMPTS)


def test_a_transaction_still_open_is_waited_for(
    spark, pg_log: Log, lake: LakeSpec
) -> None:
    pg_log.send_many(10)
    options = ArchiveOptions(timedelta(0), batch_rows=100, vacuum=False)

    with pg_log.connected() as other, other.transaction():
        other.execute("UPDATE django_txmsg_outboxmessage SET attempts = 1 WHERE id = 4")
        other.execute(
            "INSERT INTO django_txmsg_outboxmessage (message_id, replay_id, broker,"
            " destination, key, correlation_id, headers, content_type, body, attempts,"
            " last_error, dispatched_at) VALUES (gen_random_uuid(), '', '', '', '', '',"
            " '{}', '', '', 0, '', now())"
        )
    with pg_log.connected() as other, other.transaction():
        # Nothing to do with our rows, but open: its rows may yet come.
        other.execute("SELECT pg_current_xact_id()")
        pg_log.send_many(5)
        first = archive(spark, pg_log, lake, options=options)

    second = archive(spark, pg_log, lake, options=options)

    assert (first.rows, second.rows, first.refused) == (11, 5, [])
    assert SMALL.vacuum is False


def test_on_one_machine_half_the_cores_are_the_databases(spark) -> None:
    assert spark.sparkContext.master == "local[2]"
    assert tasks_on(spark) == 1


def test_other_writers_of_a_sqlite_file_wait_for_less_than_a_second(
    spark, make_log: Callable[..., Log], lake: LakeSpec
) -> None:
    log: Log = make_log("sqlite")
    log.send_many(40_000, body=b"x" * 1000)
    over, waited = threading.Event(), list[float]()

    def write() -> None:
        connection = sqlite3.connect(log.spec.path, timeout=30, isolation_level=None)
        while not over.wait(0.01):
            began = time.monotonic()
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(
                "UPDATE django_txmsg_outboxmessage SET attempts = 1 WHERE id = -1"
            )
            connection.execute("COMMIT")
            waited.append(time.monotonic() - began)
        connection.close()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        options = ArchiveOptions(timedelta(days=1))
        done = archive(spark, log, lake, options=options)
        assert done.rows == 40_000
    finally:
        over.set()
        writer.join()

    assert len(waited) > 10
    # All deletes in one transaction would keep a writer waiting for all of their time,
    # which on a busy machine is longer.
    assert max(waited) < max(1.0, done.seconds["purge"] / 2)


@everywhere
def test_little_is_archived_without_spark_to_the_same_files_rows(
    log: Log, lake: LakeSpec
) -> None:
    log.send_many(1050, every=60.0)
    before = hashes_in(log)
    log.send([{"dispatched_at": None}] * 3)

    done = archive(None, log, lake, options=replace(SMALL, tasks=2))

    assert (done.rows, done.batches) == (1050, 11)
    assert_moved_once(before | hashes_in(log), log, lake, set(before))


NO_JVM = """
import sys
from pyspark.core import context
from django_txmsg.spark.cli import main

def launch(*given, **more):
    raise AssertionError("a JVM is started")

context.launch_gateway = launch
sys.exit(main(sys.argv[1:]))
"""


def test_choosing_the_engine_only_counts_the_rows(
    pg_log: Log, lake: LakeSpec, tmp_path: Path, postgres, monkeypatch
) -> None:
    """Apart from that, `auto` does with few rows what `local` does."""
    monkeypatch.setenv("TXMSG_PASSWORD_SHOP", "txmsg-secret")
    spec = tmp_path / "job.json"
    words = ["archive", "--table", "outbox", "--older-than", "1d", "--spec", str(spec)]

    def job(*more: str) -> None:
        program = [sys.executable, "-c", NO_JVM, *words, *more]
        subprocess.run(program, cwd=ROOT, check=True)

    with Proxy(postgres.port) as proxy:

        def trips(work: Callable[[], None]) -> int:
            before = proxy.round_trips
            work()
            wait_until(lambda: not proxy.connections)
            return proxy.round_trips - before

        url = pg_log.spec.url.replace(f":{postgres.port}/", f":{proxy.port}/")
        source = replace(pg_log.spec, url=url)
        spec.write_text(JobSpec((source,), lake).to_json())
        connecting = trips(lambda: connect_plain(source).close())
        local, chosen = trips(lambda: job("--engine", "local")), trips(job)

    # The present horizon, and the number of rows.
    assert chosen - local == connecting + 2


def test_no_jvm_starts_for_nothing_or_little_to_do_or_a_sweep(
    make_log, lake: LakeSpec, tmp_path: Path
) -> None:
    log: Log = make_log("sqlite")
    spec = tmp_path / "job.json"
    spec.write_text(JobSpec((log.spec,), lake).to_json())

    def job(*words: str) -> tuple[int, dict[str, Any]]:
        done = subprocess.run(
            [sys.executable, "-c", NO_JVM, *words, "--spec", str(spec), "--json"],
            cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        return done.returncode, json.loads(done.stdout)

    archived = ("archive", "--older-than", "1d")
    code, facts = job(*archived)
    assert (code, facts["rows"], facts["engine"]) == (0, 0, "local")
    log.send_many(10)
    code, facts = job(*archived)
    assert (code, facts["rows"], facts["engine"]) == (0, 10, "local")
    assert job("sweep")[0] == 0
    code, facts = job(*archived, "--engine", "spark")
    assert code == 3
    assert "Spark does not start: a JVM is started" in facts["error"]
