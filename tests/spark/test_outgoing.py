"""Messages that are stored from a dataset are stored once, despite repetitions, kills
and failures."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from deltalake import DeltaTable

from django_txmsg import wire
from django_txmsg.spark.cli import parsed
from django_txmsg.spark.connection import read_json
from django_txmsg.spark.errors import EnvironmentFault, PipelineError, UsageError
from django_txmsg.spark.jobs.archive import ArchiveOptions
from django_txmsg.spark.jobs.outgoing import choose
from django_txmsg.spark.jobs.reading import WholeLog
from django_txmsg.spark.runs import next_request
from django_txmsg.spark.schemas import OUTBOX, STAGED
from django_txmsg.spark.spec import JobSpec, LakeSpec
from django_txmsg.spark.staging import Brought, Staging
from tests.faults import wait_until
from tests.spark.archives import archive, path_of
from tests.spark.conftest import ROOT, everywhere
from tests.spark.log import LONG_AGO, Log
from tests.spark.running import outcome, run

COLUMNS = ", ".join(f"{f.name} {f.dataType.simpleString()}" for f in STAGED.fields)


def message(number: int, **more: Any) -> dict[str, Any]:
    row = {
        "message_id": str(uuid.UUID(int=number)), "broker": "default",
        "destination": "d", "key": "", "correlation_id": "", "headers": '{"a":"\\"ü"}',
        "content_type": "application/json", "body": b'{"x": "\\u00e9, \\"quoted\\""}',
        "position": None,
    }  # fmt: skip
    return row | more


def test_a_dataframe_is_stored_as_it_is_and_once(spark, log: Log) -> None:
    rows = [message(n) for n in range(50)]
    frame = spark.createDataFrame(rows, COLUMNS).repartition(4)
    write = lambda run: (  # noqa: E731
        frame.write.format("txmsg").mode("append")
        .options(url=log.spec.url, run=run).save()
    )  # fmt: skip

    write("one")
    write("one")

    stored = log.rows(
        "SELECT body, headers, replay_id, dispatched_at FROM django_txmsg_outboxmessage"
    )
    assert len(stored) == 50
    for body, headers, replay_id, dispatched_at in stored:
        assert bytes(body) == rows[0]["body"]
        assert (
            json.loads(headers) if isinstance(headers, str) else headers == {"a": '"ü'}
        )
        assert (replay_id, dispatched_at) == ("one", None)
    assert log.count("django_txmsg_stagedmessage") == 0
    write("two")
    assert log.count() == 100


@pytest.mark.matrix
def test_an_id_a_destination_and_a_body_make_a_message(spark, log: Log) -> None:
    one = str(uuid.uuid4())
    frame = spark.createDataFrame(
        [('{"n": 1}', "mail.send", one)],
        "body string, destination string, message_id string",
    )

    frame.write.format("txmsg").mode("append").options(
        url=log.spec.url, run="few"
    ).save()

    [row] = log.rows(
        'SELECT destination, broker, "key", headers, content_type, body, attempts'
        " FROM django_txmsg_outboxmessage"
    )
    destination, broker, key, headers, content_type, body, attempts = row
    assert (destination, broker, key, attempts) == ("mail.send", "default", "", 0)
    assert headers in ({}, "{}")
    assert (content_type, bytes(body)) == ("application/json", b'{"n": 1}')


def test_wrong_columns_are_reported(spark, log: Log) -> None:
    frame = spark.createDataFrame([("x", "y")], "body string, recipient string")

    with pytest.raises(
        Exception, match="Missing: destination, message_id; unknown: recipient"
    ):
        frame.write.format("txmsg").mode("append").options(
            url=log.spec.url, run="wrong"
        ).save()

    assert log.count() == 0


@pytest.mark.parametrize("headers", ["[1]", "null", '"a"'])
def test_headers_that_no_relay_could_send_are_refused(
    spark, make_log, headers: str
) -> None:
    log: Log = make_log("sqlite")
    frame = spark.createDataFrame([message(1, headers=headers)], COLUMNS)

    with pytest.raises(Exception, match="headers of a message are a JSON object"):
        frame.write.format("txmsg").mode("append").options(
            url=log.spec.url, run="wrong"
        ).save()

    assert log.count() == log.count("django_txmsg_stagedmessage") == 0


def staged(staging: Staging, task: str, rows: list[dict[str, Any]]) -> Brought:
    kinds = {
        "binary": pa.binary(),
        "timestamp": pa.timestamp("us", tz="UTC"),
        "bigint": pa.int64(),
    }
    schema = pa.schema(
        [(f.name, kinds.get(f.dataType.simpleString(), pa.string()))
         for f in STAGED.fields]
    )  # fmt: skip
    return staging.stage(task, [pa.RecordBatch.from_pylist(rows, schema=schema)])


def test_a_task_that_fails_after_its_rows_are_staged_stores_none_twice(
    spark, log: Log
) -> None:
    staging = Staging(log.spec, "r")
    # Two attempts at one task have staged; only one of them is announced.
    rows = [message(n) for n in range(10)]
    staged(staging, "0-1", rows)

    assert staging.merge([staged(staging, "0-2", rows)]) == 10
    assert log.count() == 10
    assert log.count("django_txmsg_stagedmessage") == 0


def test_a_merge_with_less_than_was_announced_stores_nothing(spark, log: Log) -> None:
    with pytest.raises(EnvironmentFault, match="5 messages were announced and 0"):
        Staging(log.spec, "r").merge([Brought("0-0", 5, 0)])

    assert log.count() == 0


def test_rows_that_another_process_of_the_run_clears_are_not_taken_as_stored(
    pg_log: Log,
) -> None:
    """The same replay was started twice, and the second one is stopped while the first
    one stores the messages."""
    staging = Staging(pg_log.spec, "r")
    rows = [message(n) for n in range(3)]
    for sql in (
        "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM pg_advisory_xact_lock(42); RETURN NEW; END $$",
        "CREATE TRIGGER waits BEFORE INSERT ON django_txmsg_storedrun"
        " FOR EACH ROW EXECUTE FUNCTION wait()",
    ):
        pg_log.execute(sql)
    waiting = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND wait_event = 'advisory'"
    )
    with pg_log.connected() as connection, ThreadPoolExecutor(1) as pool:
        connection.rows("SELECT pg_advisory_lock(42)")
        first = pool.submit(staging.merge, [staged(staging, "0-1", rows)])
        wait_until(lambda: connection.value(waiting))
        Staging(pg_log.spec, "r").clear()
        connection.rows("SELECT pg_advisory_unlock(42)")
        with pytest.raises(EnvironmentFault, match="3 messages were announced and 0"):
            first.result()

    assert staging.merge([staged(staging, "0-1", rows)]) == 3
    assert pg_log.count() == 3


def test_a_merge_takes_more_tasks_than_a_statement_has_parameters(log: Log) -> None:
    staging = Staging(log.spec, "r")
    last = staged(staging, "last", [message(1)])
    empty = [Brought(f"{n}-{n}", 0, 0) for n in range(70_000)]

    assert staging.merge([*empty, last]) == 1
    assert log.count() == 1


def test_send_makes_each_row_of_a_dataset_one_message(
    spark, log: Log, tmp_path: Path
) -> None:
    source = tmp_path / "people.csv"
    source.write_text("id,name\n" + "".join(f"{n},n{n}\n" for n in range(30)))
    spec = JobSpec(services=(log.spec,))
    words = ["send", "--from", str(source), "--destination", "mail.send",
             "--template", '{"to": "{name}", "id": "{id}"}', "--id", "id",
             "--name", "march"]  # fmt: skip

    dry = run(spec, *words, "--dry-run")
    assert (dry["chosen"], dry["destinations"], log.count()) == (
        30,
        {"mail.send": 30},
        0,
    )
    first, second = run(spec, *words), run(spec, *words)

    assert (first["rows"], second["rows"], second["counts"]["known"]) == (30, 0, 30)
    bodies = {json.loads(bytes(row[0]))["to"] for row in log.rows(
        "SELECT body FROM django_txmsg_outboxmessage")}  # fmt: skip
    assert bodies == {f"n{n}" for n in range(30)}

    source.write_text("id,name\n1,a\n1,b\n")
    with pytest.raises(UsageError, match="occur in several rows"):
        run(spec, *words, "--name", "other")


def test_send_reads_values_whole_and_refuses_broken_rows(
    spark, make_log, tmp_path: Path
) -> None:
    log: Log = make_log("sqlite")
    spec = JobSpec(services=(log.spec,))
    words = ["--destination", "mail.send", "--template", '{"text": "{text}"}']
    texts = ['He said "hi", ok', "two\nlines", "back\\slash"]
    with (tmp_path / "good.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["id", "text"], *enumerate(texts)])
    at = datetime(2026, 1, 1, 12, 0, 0, 123456)
    columns = {"text": [at], "aware": pa.array([at], pa.timestamp("us", tz="UTC"))}
    parquet.write_table(pa.table(columns), tmp_path / "good.parquet")
    (tmp_path / "short.csv").write_text("id,text\n1,a\n2\n")
    (tmp_path / "broken.json").write_text('{"text": "a"}\n{"text":\n')
    (tmp_path / "open.csv").write_text('id,text\n1,"a\n2,b\n')
    (tmp_path / "two.csv").write_text('id,text\n1,"a\n2,b\n3,"c\n4,d\n')
    (tmp_path / "order.csv").mkdir()
    for names, values in (("id,text", "1,a"), ("text,id", "b,2")):
        part = tmp_path / "order.csv" / f"{names}.csv"
        part.write_text(f"{names}\n{values}\n")

    for name, why in {
        "short.csv": "Malformed records", "broken.json": "Malformed records",
        "open.csv": r"value in \S*open\.csv has no end", "two.csv": "Unescaped quote",
        "order.csv": "header does not conform",
    }.items():  # fmt: skip
        with pytest.raises(PipelineError, match=why):
            run(spec, "send", "--from", str(tmp_path / name), "--name", name, *words)
    assert log.count() == 0
    run(spec, "send", "--from", str(tmp_path / "good.csv"), "--name", "a", *words)
    words[-1] = '{"text": "{text} {aware}", "at": "{text}", "aware": "{aware}"}'
    run(spec, "send", "--from", str(tmp_path / "good.parquet"), "--name", "b", *words)

    bodies = [json.loads(bytes(row[0])) for row in log.rows(
        "SELECT body FROM django_txmsg_outboxmessage ORDER BY id")]  # fmt: skip
    assert sorted(one["text"] for one in bodies[:-1]) == sorted(texts)
    digits = "12:00:00.123456"
    assert bodies[-1] == {
        "text": f"2026-01-01 {digits} 2026-01-01 {digits}",
        "at": f"2026-01-01T{digits}", "aware": f"2026-01-01T{digits}Z",
    }  # fmt: skip


@pytest.mark.matrix
def test_replayed_copies_have_new_ids_that_are_stable(
    spark, log: Log, lake: LakeSpec
) -> None:
    log.send_many(20, key="k")
    archive(spark, log, lake)
    spec = JobSpec(services=(log.spec,), lake=lake)
    words = ["replay", "--where", "id <= 10", "--as", "copy"]

    first, second = run(spec, *words), run(spec, *words)

    assert (first["rows"], second["rows"]) == (10, 0)
    assert log.count() == 10
    assert run(spec, *words, "--name", "once-more")["rows"] == 10
    assert run(spec, *words, "--limit", "3", "--dry-run")["chosen"] == 3


def test_celery_tasks_are_replayed_under_their_own_ids_only(spark, log: Log) -> None:
    log.send([{"broker": "celery"}, {}])
    spec = JobSpec((log.spec,), task_brokers=((log.spec.service, "celery"),))
    words = ["replay", "--where", "true", "--as"]

    with pytest.raises(UsageError, match="broker <> 'celery'"):
        run(spec, *words, "copy")
    assert log.count() == 2
    words[2] += " AND broker <> 'celery'"
    assert run(spec, *words, "copy")["rows"] == 1


@everywhere
def test_replayed_request_of_a_flow_keeps_its_deadline(spark, log: Log) -> None:
    until, second = LONG_AGO + timedelta(microseconds=7), timedelta(seconds=1)
    request = {wire.TICKET: "t", wire.REPLY_TO: "r", "name": 'a "ü"'}
    rows = [
        {"headers": request, "expires_at": until},
        {"headers": {**request, "name": "b"}},
        {"headers": {wire.REPLY_TO: "r"}, "expires_at": until},
    ]
    log.send(
        [{**row, "created_at": LONG_AGO + n * second} for n, row in enumerate(rows)]
    )

    run(JobSpec((log.spec,)), "replay", "--where", "true")

    first, *others = map(read_json, replayed(log, "headers"))
    assert wire.parse_instant(first.pop(wire.EXPIRES)) == until
    assert [first, *others] == [row["headers"] for row in rows]


@everywhere
@pytest.mark.parametrize("mode", ["same", "copy"])
def test_only_a_replay_under_the_same_id_keeps_the_link_to_the_predecessor(
    spark, log: Log, mode: str
) -> None:
    link = f"{uuid.uuid4()};at={wire.format_instant(LONG_AGO)}"
    log.send([{"key": "k", "headers": {wire.AFTER: link, "name": 'a "ü"'}}])

    run(JobSpec((log.spec,)), "replay", "--where", "true", "--as", mode)

    [headers] = map(read_json, replayed(log, "headers"))
    assert headers.pop("name") == 'a "ü"'
    assert headers == ({wire.AFTER: link} if mode == "same" else {})


def test_replay_keeps_the_order_of_messages_stored_at_one_instant(
    spark, log: Log, lake: LakeSpec
) -> None:
    ids = [uuid.UUID(int=number) for number in random.Random(7).sample(range(999), 80)]
    log.send([{"message_id": one, "key": "k"} for one in ids[:40]])
    archive(None, log, lake)
    log.send([{"message_id": one, "key": "k"} for one in ids[40:]])
    # Several tasks stage the messages.
    settings = {
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.shuffle.partitions": "8",
    }
    before = {name: spark.conf.get(name) for name in settings}

    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        run(JobSpec((log.spec,), lake), "replay", "--where", "true")
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)

    assert [uuid.UUID(str(one)) for one in replayed(log, "message_id")] == ids


def replayed(log: Log, column: str) -> list[Any]:
    """Return a column of the messages that replays have stored, in their order."""
    rows = log.rows(
        f"SELECT {column} FROM django_txmsg_outboxmessage WHERE replay_id <> ''"
        " ORDER BY id"
    )
    return [row[0] for row in rows]


@pytest.mark.matrix
def test_a_run_is_remembered_when_its_messages_are_archived_and_pruned(
    spark, log: Log, lake: LakeSpec, tmp_path: Path
) -> None:
    source = tmp_path / "people.json"
    source.write_text("".join(f'{{"id": {n}}}\n' for n in range(20)))
    log.send_many(10)
    archive(spark, log, lake)
    spec = JobSpec(services=(log.spec,), lake=lake)
    send = ["send", "--from", str(source), "--destination", "mail.send", "--id", "id",
            "--template", '{"id": "{id}"}', "--name", "march"]  # fmt: skip
    replay = ["replay", "--where", "destination = 'orders.place'", "--as", "copy"]
    assert [run(spec, *send)["rows"], run(spec, *replay)["rows"]] == [20, 10]

    log.execute("UPDATE django_txmsg_outboxmessage SET dispatched_at = created_at")
    again = ArchiveOptions(timedelta(0), vacuum=False)
    assert archive(spark, log, lake, options=again).rows == 30
    for gone in (False, True):
        if gone:
            # As far as the lake's own retention goes.
            run(spec, "sweep", "--keep", "0s")
        done = run(spec, *send)
        assert (done["rows"], done["counts"]["known"]) == (0, 20)
    assert log.count() == 0


@pytest.mark.matrix
def test_replay_excludes_replayed_messages_by_default(
    spark, log: Log, lake: LakeSpec
) -> None:
    log.send_many(10)
    archive(spark, log, lake)
    spec = JobSpec(services=(log.spec,), lake=lake)
    words = ["replay", "--where", "destination = 'orders.place'", "--as", "copy"]
    stored = []
    for name in ("one", "two", "three"):
        stored.append(run(spec, *words, "--name", name)["rows"])
        log.execute("UPDATE django_txmsg_outboxmessage SET dispatched_at = created_at")
        archive(spark, log, lake, options=ArchiveOptions(timedelta(0), vacuum=False))

    assert stored == [10, 10, 10]
    told = run(spec, *words, "--name", "four", "--replayed", "--dry-run")
    assert told["chosen"] == 40


def in_both_places(spark, log: Log, lake: LakeSpec) -> JobSpec:
    """Store messages of each outcome, some in the database and some in the lake."""
    ended = {"dispatched_at": None, "dead_at": LONG_AGO}
    dead = {**ended, "last_error": "expired: at noon"}
    cancelled = {**ended, "last_error": "cancelled: by ada", "cancelled_at": LONG_AGO}
    log.send_many(5)
    log.send([cancelled, dead])
    # Files of the release before say it in the error alone.
    before = tuple(one for one in OUTBOX.columns if one.name != "cancelled_at")
    archive(spark, log, lake, table=replace(OUTBOX, columns=before))
    log.send([cancelled])
    archive(spark, log, lake)
    log.send_many(4)
    log.send([{"dispatched_at": None}, dead, cancelled])
    return JobSpec(services=(log.spec,), lake=lake)


def test_a_message_is_replayed_from_the_database_or_from_the_lake(
    spark, log: Log, lake: LakeSpec
) -> None:
    spec = in_both_places(spark, log, lake)
    ids = [str(uuid.UUID(str(row[0]))) for row in log.rows(
        "SELECT message_id FROM django_txmsg_outboxmessage ORDER BY id")]  # fmt: skip

    # What is still to leave is not sent twice.
    everything = run(spec, "replay", "--where", "outcome = 'dispatched'", "--dry-run")
    one = run(spec, "replay", "--where", f"message_id = '{ids[0]}'")
    without_a_lake = JobSpec(services=(log.spec,))
    other = run(without_a_lake, "replay", "--where", f"message_id = '{ids[1]}'")

    assert (everything["chosen"], one["rows"], other["rows"]) == (9, 1, 1)
    assert log.count() == 9


def test_replay_reports_batches_whose_checksum_the_log_no_longer_has(
    spark, log: Log, lake: LakeSpec
) -> None:
    log.send_many(150)
    assert archive(None, log, lake).batches == 2
    for entry in (path_of(lake) / "_delta_log").iterdir():
        os.utime(entry, (0, 0))
    table = DeltaTable(path_of(lake))
    table.create_checkpoint()
    table.cleanup_metadata()

    replay = ["replay", "--where", "outcome = 'dispatched'"]
    done = outcome(JobSpec(services=(log.spec,), lake=lake), *replay)

    assert done.facts["rows"] == 150
    assert "Archived batches that have no checksum to compare with: 1." in done.lines


@pytest.mark.matrix
def test_an_outcome_is_a_choice_wherever_a_message_lies(
    spark, log: Log, lake: LakeSpec
) -> None:
    spec = in_both_places(spark, log, lake)

    # What was cancelled is no failure, and replayed where it is asked for.
    filters = (
        "dead_at IS NOT NULL",
        "outcome = 'dead'",
        "destination <> 'cancelled'",
        "last_error LIKE 'cancelled: %'",
        "outcome IN ('dead', 'cancelled')",
        "cancelled_at IS NOT NULL",
        "destination = 'orders.place' AND outcome <> 'dispatched'",
    )
    chosen = [
        run(spec, "replay", "--where", one, "--dry-run")["chosen"] for one in filters
    ]
    assert chosen == [2, 2, 11, 3, 5, 3, 2]
    assert log.count() == 7


def test_a_name_is_one_choice_of_messages(
    spark, log: Log, lake: LakeSpec, tmp_path: Path
) -> None:
    source = tmp_path / "customers.json"
    spec = JobSpec(services=(log.spec,), lake=lake)
    words = ["send", "--from", str(source), "--destination", "mail.send", "--id", "id",
             "--template", '{"id": "{id}"}', "--name", "march"]  # fmt: skip
    source.write_text('{"id": 1}\n{"id": 2}\n')
    assert run(spec, *words)["rows"] == 2

    # The next month's file has come under the same path.
    source.write_text('{"id": 1}\n{"id": 3}\n')
    with pytest.raises(UsageError, match=r"march has stored 2 messages at .*another"):
        run(spec, *words)

    assert log.count() == 2
    assert log.count("django_txmsg_stagedmessage") == 0
    assert run(spec, *words[:-1], "april")["rows"] == 2


def test_messages_that_could_not_be_stored_are_not_left_in_the_staging_table(
    spark, make_log, tmp_path: Path
) -> None:
    log: Log = make_log("sqlite")
    source = tmp_path / "customers.json"
    source.write_text('{"id": 1}\n{"id": 2}\n')
    log.execute(
        "CREATE TRIGGER refusal BEFORE INSERT ON django_txmsg_outboxmessage"
        " BEGIN SELECT RAISE(ABORT, 'refused'); END"
    )
    words = ["send", "--from", str(source), "--destination", "mail.send", "--id", "id",
             "--template", '{"id": "{id}"}', "--name", "march"]  # fmt: skip

    with pytest.raises(EnvironmentFault, match="refused"):
        run(JobSpec((log.spec,)), *words)

    assert log.count("django_txmsg_stagedmessage") == 0


@pytest.mark.matrix
def test_a_replay_beside_an_archive_finds_each_message_once(
    spark, log: Log, lake: LakeSpec
) -> None:
    log.send_many(110)
    archive(spark, log, lake)
    log.send_many(110, destination="later")
    with WholeLog(spark, JobSpec((log.spec,), lake)) as whole:
        # Rows leave the database after its snapshot was taken,
        archive(spark, log, lake)
        log.send_many(5)
        chosen = choose(whole, OUTBOX, parsed(["replay", "--where", "true"]), [])
        # and after the files of the lake were named.
        archive(spark, log, lake)
        assert log.count() == 0
        rows = chosen.select("message_id").collect()

    assert len(rows) == len({row[0] for row in rows}) == 220


def test_messages_archived_without_bodies_are_reported(
    spark, log: Log, tmp_path: Path
) -> None:
    log.send_many(3)
    lake = LakeSpec(f"{tmp_path}/lake", keep_bodies=False)
    archive(spark, log, lake)
    spec = JobSpec(services=(log.spec,), lake=lake)

    with pytest.raises(UsageError, match=r"no body of message .* KEEP_BODIES off"):
        run(spec, "replay", "--where", "true")

    assert log.count() == 0


def test_filter_that_does_not_parse_is_reported(
    spark, log: Log, lake: LakeSpec
) -> None:
    log.send_many(1)
    archive(spark, log, lake)
    spec = JobSpec(services=(log.spec,), lake=lake)

    for wrong in ("destination =", "no_such_column = 1 AND key = 'customer-4711'"):
        with pytest.raises(UsageError, match="does not parse"):
            run(spec, "replay", "--where", wrong)
    failed = log.rows("SELECT state, options, error FROM django_txmsg_pipelinerun")
    assert [row[0] for row in failed] == ["failed", "failed"]
    # An erased person's key is not kept by who has looked for it.
    assert "4711" not in str(failed)
    assert "sha256:" in str(failed)


def start_replay(directory: Path, spec: JobSpec) -> subprocess.Popen[bytes]:
    (directory / "job.json").write_text(spec.to_json())
    return subprocess.Popen(
        [sys.executable, "-m", "django_txmsg.spark", "replay", "--where", "true",
         "--spec", str(directory / "job.json"), "--name", "r"],
        cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip


def kill(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def assert_stored_once(log: Log, count: int) -> None:
    ids = log.value("SELECT count(DISTINCT message_id) FROM django_txmsg_outboxmessage")
    assert (log.count(), ids) == (count, count)
    assert log.count("django_txmsg_stagedmessage") == 0


#: The table whose lock stops a replay at a moment, and what is stored by then.
MOMENTS = {
    "staging": ("django_txmsg_stagedmessage", "EXCLUSIVE", 0),
    "merging": ("django_txmsg_outboxmessage", "SHARE ROW EXCLUSIVE", 0),
    "recording": ("django_txmsg_pipelinerun", "SHARE ROW EXCLUSIVE", 3000),
}


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("staging", marks=pytest.mark.matrix),
        "merging",
        pytest.param("recording", marks=pytest.mark.matrix),
    ],
)
def test_replay_killed_and_run_again_stores_each_message_once(
    spark, pg_log: Log, lake: LakeSpec, tmp_path: Path, moment: str
) -> None:
    pg_log.send_many(3000)
    archive(spark, pg_log, lake)
    spec = JobSpec(services=(pg_log.spec,), lake=lake)
    table, mode, stored = MOMENTS[moment]
    waiting = (
        "SELECT count(*) FROM pg_locks WHERE NOT granted AND database ="
        " (SELECT oid FROM pg_database WHERE datname = current_database())"
    )

    process = start_replay(tmp_path, spec)
    try:
        # Its record is the first thing it writes, and the last.
        wait_until(lambda: pg_log.count("django_txmsg_pipelinerun"), deadline=200)
        with pg_log.connected() as holder, holder.transaction():
            holder.execute(f"LOCK TABLE {table} IN {mode} MODE")
            wait_until(lambda: pg_log.value(waiting), deadline=200)
            kill(process)
    finally:
        if process.poll() is None:
            kill(process)

    assert pg_log.count() == stored
    again = run(spec, "replay", "--where", "true", "--name", "r")
    assert again["rows"] == 3000 - stored
    assert run(spec, "replay", "--where", "true", "--name", "r")["rows"] == 0
    assert_stored_once(pg_log, 3000)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_replay_killed_at_random_many_times_stores_each_message_once(
    spark, pg_log: Log, lake: LakeSpec, tmp_path: Path
) -> None:
    pg_log.send_many(60_000)
    archive(spark, pg_log, lake, options=ArchiveOptions(timedelta(days=1)))
    spec = JobSpec(services=(pg_log.spec,), lake=lake)
    dice = random.Random(20260321)
    kills = 0
    for _ in range(25):
        process = start_replay(tmp_path, spec)
        runs = pg_log.count("django_txmsg_pipelinerun")
        wait_until(
            lambda r=runs: pg_log.count("django_txmsg_pipelinerun") > r, deadline=120
        )
        try:
            # From before Spark is up to after the end, now and then.
            process.wait(timeout=dice.uniform(0, 25))
        except subprocess.TimeoutExpired:
            kill(process)
            kills += 1
        assert pg_log.count() in (0, 60_000)

    run(spec, "replay", "--where", "true", "--name", "r")
    assert kills >= 8
    assert_stored_once(pg_log, 60_000)


@pytest.mark.matrix
def test_what_a_reconciliation_has_found_is_replayed(
    spark, make_log, lake: LakeSpec
) -> None:
    log: Log = make_log("sqlite")
    ids = [uuid.uuid4() for _ in range(5)]
    log.send([{"message_id": one} for one in ids])
    log.receive([{"message_id": one} for one in ids[2:]])
    spec = JobSpec((log.spec,), lake)
    replay = ("replay", "--verdict", "never_received")
    with pytest.raises(UsageError, match="reconcile first"):
        run(spec, *replay)
    first = run(spec, "reconcile", "--grace", "0s")["run"]
    # An acknowledged finding is not replayed until it is open again.
    known = ("findings", "--message-id", str(ids[1]))
    run(spec, *known, "--acknowledge", "delivered by hand")
    assert run(spec, *replay, "--dry-run")["chosen"] == 1
    run(spec, *known, "--reopen")

    stored = run(spec, *replay)

    assert stored["rows"] == 2
    again = log.rows(
        "SELECT message_id FROM django_txmsg_outboxmessage WHERE replay_id <> ''"
    )
    assert {uuid.UUID(str(row[0])) for row in again} == set(ids[:2])
    # The next run no longer finds the replayed messages: they are in flight.
    run(spec, "reconcile", "--grace", "0s", "--dry-run")
    assert run(spec, *replay, "--run", first)["rows"] == 0
    for words, says in (
        (["--verdict", "lost"], "not a finding"),
        (["--verdict", "dead", "--run", "x"], "the run x"),
        ([], "Which messages"),
    ):
        with pytest.raises(UsageError, match=says):
            run(spec, "replay", *words)


def test_replay_of_dead_messages_names_the_way_for_those_dead_at_a_stage(
    spark, log: Log, lake: LakeSpec
) -> None:
    message, hint = uuid.uuid4(), "redeliver its dead letter"
    log.send([{"message_id": message}])
    log.receive([{"message_id": message, "dead_at": LONG_AGO, "last_error": "no"}])
    log.bury([{"message_id": message}])
    spec = JobSpec((log.spec,), lake)
    run(spec, "reconcile", "--grace", "0s")
    replay = ("replay", "--verdict", "dead")

    found = [
        outcome(spec, *replay, *more)
        for more in (("--dry-run",), (), ("--from", "dead_letters"), ("--as", "copy"))
    ]

    assert [one.counts["chosen"] for one in found] == [1, 1, 1, 1]
    told = [hint in " ".join(one.lines) for one in found]
    assert told == [True, True, False, False]


@pytest.mark.parametrize(
    "words", [[], ["--verdict", "lost"], ["--from", "dead_letters", "--as", "copy"]]
)
def test_wrong_options_of_a_replay_start_no_spark(make_log, words: list[str]) -> None:
    log: Log = make_log("sqlite")
    where = ["--where", "true"] if "--as" in words else []
    service = f"{log.spec.service}={log.spec.url}"

    ended = subprocess.run(
        [sys.executable, "-m", "django_txmsg.spark", "replay", *where, *words,
         "--service", service],
        cwd=ROOT, env=os.environ | {"JAVA_HOME": "/nowhere"}, check=False,
    )  # fmt: skip

    assert ended.returncode == UsageError.exit_code


def request_replay(log: Log, *ids: uuid.UUID, age: timedelta = timedelta()) -> str:
    """Store a request for a replay, like the admin."""
    now, request = datetime.now(timezone.utc) - age, uuid.uuid4()
    options = {"requested_at": now.isoformat(), "message_ids": list(map(str, ids))}
    log.insert(
        "django_txmsg_pipelinerun",
        [{"id": request, "job": "replay", "service": "shop", "state": "requested",
          "run_by": "ann", "lake": "", "options": options, "rows": 0, "counts": {},
          "error": "", "started_at": now}],
    )  # fmt: skip
    return str(request)


def test_requested_replay_stores_its_messages_once(spark, log: Log) -> None:
    ids = [uuid.uuid4() for _ in range(3)]
    log.send([{"message_id": one} for one in ids])
    expired = request_replay(log, ids[2], age=timedelta(days=2))
    request = request_replay(log, *ids[:2])
    spec = JobSpec((log.spec,))

    def record() -> tuple[str, str, int]:
        [row] = log.rows(
            "SELECT state, run_by, rows FROM django_txmsg_pipelinerun WHERE id = %s",
            uuid.UUID(request).hex if log.vendor == "sqlite" else request,
        )
        return tuple(row)

    with log.connected() as connection:
        assert next_request(connection, log.spec) == request
        assert run(spec, "replay", "--request", request, "--dry-run")["chosen"] == 2
        assert record() == ("requested", "ann", 0)
        # A run that was killed is repeated under the same name.
        log.execute(
            "UPDATE django_txmsg_pipelinerun SET state = 'running' WHERE run_by = 'ann'"
        )
        assert next_request(connection, log.spec) == request
        done = run(spec, "replay", "--request", request)
        assert next_request(connection, log.spec) == ""

    assert (done["run"], done["name"]) == (request, f"replay-{request}")
    assert record() == ("clean", "ann", 2)
    again = log.rows(
        "SELECT message_id FROM django_txmsg_outboxmessage WHERE replay_id <> ''"
    )
    assert {uuid.UUID(str(row[0])) for row in again} == set(ids[:2])
    with pytest.raises(UsageError, match="no open request"):
        run(spec, "replay", "--request", request)
    with pytest.raises(UsageError, match="no open request"):
        run(spec, "replay", "--request", str(uuid.uuid4()))
    assert run(spec, "replay", "--request", expired)["rows"] == 1
    assert log.count() == 6


@everywhere
def test_request_replays_what_a_replay_has_stored_before(spark, log: Log) -> None:
    sent, twice = uuid.uuid4(), uuid.uuid4()
    log.send(
        [
            {"message_id": sent, "replay_id": "campaign"},
            {"message_id": twice},
            {"message_id": twice, "replay_id": "replay-1"},
        ]
    )
    request = request_replay(log, sent, twice)

    done = run(JobSpec((log.spec,)), "replay", "--request", request)

    assert (done["chosen"], done["rows"]) == (2, 2)


def test_replay_sends_the_body_that_an_operator_has_corrected(
    spark, log: Log, lake: LakeSpec
) -> None:
    """The relay had given up one message. A second message is of `send`. The correction
    of a third message has not been sent yet."""
    corrected, sent, waiting = (uuid.UUID(int=number) for number in (1, 2, 3))
    died = {"dead_at": LONG_AGO, "body": b"wrong"}
    later = {"created_at": LONG_AGO + timedelta(hours=1), "body": b"right"}
    log.send(
        [
            {"message_id": corrected, **died},
            {"message_id": waiting, **died},
            {"message_id": corrected, "replay_id": "dead-letter-1-1", **later},
            {"message_id": sent, "replay_id": "march", **later},
        ]
    )
    archive(None, log, lake)
    log.send(
        [{"message_id": waiting, "replay_id": "dead-letter-2-1", **later,
          "dispatched_at": None}]
    )  # fmt: skip
    spec = JobSpec((log.spec,), lake)
    run(spec, "reconcile", "--grace", "0s", "--fail-on", "never")

    by_verdict = run(spec, "replay", "--verdict", "never_received")
    assert (by_verdict["chosen"], by_verdict["rows"]) == (2, 2)
    request = request_replay(log, corrected, sent, waiting)
    assert run(spec, "replay", "--request", request)["rows"] == 3
    everything = ("replay", "--where", "true", "--replayed", "--limit", "2")
    for stored in (2, 0):
        assert run(spec, *everything)["rows"] == stored
        log.execute("UPDATE django_txmsg_outboxmessage SET dispatched_at = created_at")

    rows = log.rows(
        "SELECT message_id, body FROM django_txmsg_outboxmessage WHERE replay_id"
        " LIKE 'replay-%' ORDER BY id"
    )
    order = [uuid.UUID(str(one)).int for one, _ in rows]
    assert order == [1, 2, 1, 3, 2, 1, 3]
    assert {bytes(body) for _, body in rows} == {b"right"}


@everywhere
def test_request_for_a_message_that_is_nowhere_fails_and_counts_it(
    spark, log: Log
) -> None:
    here = uuid.uuid4()
    log.send([{"message_id": here}])
    request = request_replay(log, here, uuid.uuid4())
    spec = JobSpec((log.spec,))

    for _ in range(2):
        with pytest.raises(UsageError, match="1 of 2 requested messages were not"):
            run(spec, "replay", "--request", request)
        [row] = log.rows("SELECT state, rows FROM django_txmsg_pipelinerun")
        assert row[0] == "failed"
        assert log.count() == 2


def test_rest_of_a_partly_stored_request_is_requested_again(spark, log: Log) -> None:
    sent, waiting = uuid.uuid4(), uuid.uuid4()
    log.send([{"message_id": sent}, {"message_id": waiting, "dispatched_at": None}])
    spec, request = JobSpec((log.spec,)), request_replay(log, sent, waiting)
    with pytest.raises(UsageError, match=r"1 of 2 .* later, request them again"):
        run(spec, "replay", "--request", request)
    log.execute("UPDATE django_txmsg_outboxmessage SET dispatched_at = created_at")

    with pytest.raises(UsageError, match="request the missing messages again"):
        run(spec, "replay", "--request", request)
    rest = request_replay(log, waiting)

    assert run(spec, "replay", "--request", rest)["rows"] == 1
    assert log.count() == 4


@everywhere
@pytest.mark.parametrize("more", [("--limit", "1"), ("--from", "dead_letters")])
def test_request_is_replayed_as_it_was_made(spark, log: Log, more) -> None:
    ids = [uuid.uuid4() for _ in range(2)]
    log.send([{"message_id": one} for one in ids])
    request = request_replay(log, *ids)
    spec = JobSpec((log.spec,))

    with pytest.raises(UsageError, match="only --rate and --dry-run"):
        run(spec, "replay", "--request", request, *more)

    with log.connected() as connection:
        assert next_request(connection, log.spec) == request
    assert run(spec, "replay", "--request", request)["rows"] == 2
