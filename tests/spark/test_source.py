"""`format("txmsg")` returns rows unchanged, and lets the database apply the filters. A
read sees one snapshot of the database."""

from __future__ import annotations

import datetime as dt
import os
import uuid
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from django_txmsg.spark.databases import open_database
from django_txmsg.spark.errors import EnvironmentFault
from django_txmsg.spark.jobs.reading import Live, _read_live
from django_txmsg.spark.lake import Lake
from django_txmsg.spark.lakefile import DayFiles, rows_of
from django_txmsg.spark.schemas import OUTBOX, TABLES
from django_txmsg.spark.source.batch import id_ranges
from django_txmsg.spark.source.snapshot import snapshot
from django_txmsg.spark.spec import LakeSpec, SourceSpec
from tests.spark.conftest import everywhere, since_pyspark
from tests.spark.log import LONG_AGO, Log


def options(log: Log, **more: str) -> dict[str, str]:
    return {"service": log.spec.service, "url": log.spec.url, **more}


@everywhere
def test_a_row_arrives_with_every_column_as_it_was_stored(spark, log: Log) -> None:
    message_id, session_id = uuid.uuid4(), uuid.uuid4()
    at = dt.datetime(2026, 3, 1, 12, 0, 0, 120_000, tzinfo=dt.timezone.utc)
    log.send(
        [{"message_id": message_id, "session_id": session_id, "created_at": at,
          "body": b"\x00\xff", "headers": {"a": "ü"}, "key": "k", "dispatched_at": at}]
    )  # fmt: skip

    frame = spark.read.format("txmsg").options(**options(log)).load()
    row = frame.selectExpr("*", "unix_micros(created_at) AS micros").collect()[0]

    assert frame.schema == TABLES["outbox"].struct()
    assert (row.service, row.message_id) == ("shop", str(message_id))
    assert (row.session_id, row.body) == (str(session_id), b"\x00\xff")
    assert row.micros == at.timestamp() * 1_000_000
    assert row.expires_at is None


@pytest.mark.parametrize("table", list(TABLES))
def test_every_table_reads_also_when_it_is_empty(spark, log: Log, table: str) -> None:
    frame = spark.read.format("txmsg").options(**options(log, table=table)).load()

    assert frame.count() == 0


def test_a_row_much_older_than_all_others_leaves_the_parts_equal(log: Log) -> None:
    log.send_many(3_000)
    log.execute("UPDATE django_txmsg_outboxmessage SET id = id + 100000 WHERE id > 1")

    parts = id_ranges(open_database(log.spec), OUTBOX, 8)

    counts = [
        log.value(
            f"SELECT count(*) FROM {OUTBOX.relation} t WHERE {part.condition()}"
        )
        for part in parts
    ]  # fmt: skip
    assert sum(counts) == 3_000
    assert len(counts) == 8
    assert max(counts) < 2 * 3_000 / 8


def test_end_of_a_snapshot_ignores_that_its_server_has_died(pg_log: Log) -> None:
    with snapshot(pg_log.spec):
        ended = pg_log.value(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )

    assert ended == 1


def test_unreachable_database_of_a_log_is_named() -> None:
    database = open_database(SourceSpec("billing", "postgresql://u@127.0.0.1:1/x"))
    live = Live("billing", database, "", LONG_AGO)

    with pytest.raises(EnvironmentFault, match="database of service 'billing' failed"):
        list(_read_live(OUTBOX, OUTBOX.struct(), iter([(live, "")])))


def test_partitions_within_a_snapshot_see_one_state(spark, log: Log) -> None:
    log.send_many(500)

    with snapshot(log.spec) as within:
        frame = spark.read.format("txmsg").options(**within, partitions="5").load()
        log.send_many(100)
        log.execute("DELETE FROM django_txmsg_outboxmessage WHERE id <= 50")

        assert frame.rdd.getNumPartitions() == 5
        assert frame.count() == 500
    assert spark.read.format("txmsg").options(**options(log)).load().count() == 550


def test_filters_choose_what_spark_would_choose(spark, log: Log) -> None:
    log.send_many(40, every=0.25)
    log.send([{"destination": "it's", "dispatched_at": None, "key": "%"}])
    chosen = spark.read.format("txmsg").options(**options(log)).load()
    unpushed = chosen.localCheckpoint()
    at = (LONG_AGO + dt.timedelta(seconds=3)).isoformat()
    later = (LONG_AGO + dt.timedelta(seconds=5)).isoformat()
    one_id = chosen.collect()[3].message_id
    for condition in (
        f"created_at >= timestamp'{at}'",
        f"created_at > timestamp'{at}' AND created_at <= timestamp'{later}'",
        f"created_at = timestamp'{at}'",
        "destination = 'it\\'s'",
        "dispatched_at IS NULL",
        "dispatched_at IS NOT NULL AND id > 20",
        f"message_id = '{one_id}'",
        f"message_id IN ('{one_id}', 'no uuid')",
        "key = '%' OR id < 3",
        "destination > 'a'",
    ):
        filtered = {row.id for row in chosen.where(condition).select("id").collect()}
        expected = unpushed.where(condition).select("id").collect()
        assert filtered == {row.id for row in expected}, condition
        assert 0 < len(filtered) < 42, condition


@since_pyspark(4, 1)
def test_a_filter_runs_in_the_database(spark, pg_log: Log) -> None:
    pg_log.send_many(10)

    frame = spark.read.format("txmsg").options(**options(pg_log)).load()

    def plan(frame: Any, condition: str) -> str:
        executed = frame.where(condition)._jdf.queryExecution().executedPlan()
        return executed.toString()

    stored = f"created_at = '{LONG_AGO.isoformat()}'"
    for name, condition in (("id", "id > 5"), ("created_at", stored)):
        assert f"({name}#" in plan(frame.localCheckpoint(), condition)
        # Nothing is left to filter above the scan.
        assert f"({name}#" not in plan(frame, condition)
    assert [row.id for row in frame.where(stored).collect()] == [1]
    transactions = {row.created_xid for row in frame.collect()}
    listed = ", ".join(map(str, [*transactions, 1]))
    assert frame.where(f"created_xid IN ({listed})").count() == 10


@everywhere
def test_since_and_until_bound_the_clock(spark, log: Log) -> None:
    log.send_many(10)
    since = (LONG_AGO + dt.timedelta(seconds=2)).isoformat()
    until = (LONG_AGO + dt.timedelta(seconds=5)).isoformat()

    frame = spark.read.format("txmsg").options(**options(log, since=since, until=until))

    assert [row.id for row in frame.load().collect()] == [3, 4, 5]


def test_columns_that_are_not_asked_for_are_not_read(spark, log: Log) -> None:
    log.send_many(3)

    frame = spark.read.format("txmsg").options(**options(log)).schema("id long").load()

    assert [row.asDict() for row in frame.collect()] == [
        {"id": 1},
        {"id": 2},
        {"id": 3},
    ]


def test_large_bodies_are_read_and_kept_a_few_at_a_time(
    log: Log, tmp_path: Path
) -> None:
    log.send([{"body": os.urandom(4 << 20)} for _ in range(20)])
    place = Lake(LakeSpec(f"{tmp_path}/lake"), create=True).place
    days = DayFiles(place, "outbox", "shop", "created_at", "x")

    largest = 0
    for batch in open_database(log.spec).read(OUTBOX, OUTBOX.columns, ""):
        largest = max(largest, batch.nbytes)
        days.write(batch)
    [written] = days.close()

    assert largest <= 21 << 20
    described = pq.read_metadata(f"{days.root}/{written.path}")
    assert written.rows == 20
    assert described.num_row_groups == 2
    again = list(rows_of(place.files, f"{days.root}/{written.path}"))
    assert max(one.nbytes for one in again) <= 70 << 20


def test_a_password_shows_nowhere(spark, pg_log: Log, capfd) -> None:
    address, _, rest = pg_log.spec.url.partition("://")[2].rpartition("@")
    user, _, password = address.partition(":")
    assert password
    pg_log.send_many(1)

    for given in (
        {"url": f"postgresql://{user}@{rest}", "passwordEnv": "TXMSG_TESTS_PASSWORD"},
        {"url": f"postgresql://{user}:{password}@{rest}"},
    ):
        frame = spark.read.format("txmsg").options(**given).load()
        assert frame.count() == 1
        assert password not in frame._jdf.queryExecution().toString()
    nowhere = f"postgresql://{user}:{password}@127.0.0.1:1/nowhere"
    with pytest.raises(Exception, match=r"127\.0\.0\.1") as failed:
        spark.read.format("txmsg").option("url", nowhere).load().count()

    assert password not in str(failed.value)
    assert password not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"table": "nowhere"}, "There is no table 'nowhere'"),
        ({"url": "mysql://x/y"}, "reads postgresql:// and sqlite://"),
    ],
)
def test_wrong_options_are_reported(spark, make_log, wrong, says) -> None:
    log = make_log("sqlite")

    with pytest.raises(Exception, match=says):
        spark.read.format("txmsg").options(**(options(log) | wrong)).load().count()
