"""`reconcile` counts finished journeys from the footers of their files. The verdicts
are the same as the verdicts from the rows."""

from __future__ import annotations

import datetime as dt
import json
import shutil
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from django_txmsg.spark import tally
from django_txmsg.spark.cli import parsed
from django_txmsg.spark.errors import EnvironmentFault
from django_txmsg.spark.jobs import counted as by_footers
from django_txmsg.spark.jobs import journeys
from django_txmsg.spark.jobs.reconcile import run_reconcile
from django_txmsg.spark.jobs.sweep import sweep_command
from django_txmsg.spark.runs import Run
from django_txmsg.spark.schemas import INBOX, OUTBOX
from django_txmsg.spark.spec import JobSpec, LakeSpec, Subscription
from tests.spark.archives import archive
from tests.spark.log import LONG_AGO, Log
from tests.spark.running import but, run

SECOND, HOUR, DAY = (dt.timedelta(seconds=n) for n in (1, 3_600, 86_400))
#: Journeys are looked at file by file, however few there are.
LARGE = parsed(["reconcile", "--grace", "0s"])
Counts = dict[str, dict[str, int]]


def processed(log: Log, start: dt.datetime, count: int = 4) -> list[uuid.UUID]:
    """Store messages to a queue, one each second, and return their ids. The first
    message is processed two seconds after it was stored, the second message three
    seconds after it was stored, and so on."""
    ids = [uuid.uuid4() for _ in range(count)]
    log.send(
        [
            {"message_id": one, "created_at": start + number * SECOND}
            for number, one in enumerate(ids)
        ]
    )
    log.receive(
        [
            {"message_id": one, "created_at": start + number * SECOND,
             "first_received_at": start + (2 * number + 1) * SECOND,
             "deliveries": 1 + number % 2}
            for number, one in enumerate(ids)
        ]
    )  # fmt: skip
    return ids


def archive_all(spark: Any, log: Log, lake: LakeSpec) -> None:
    for table in (OUTBOX, INBOX):
        archive(spark, log, lake, table=table)


def judged(spark: Any, spec: JobSpec, many: int = 0, **options: Any) -> Counts:
    """Run `reconcile`. It leaves journeys unread if there are at least `many`."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(journeys, "MANY", many)
        found = run_reconcile(spark, spec, but(LARGE, **options), Run("reconcile", {}))
    return found.destinations


def without_journeys(spark: Any, spec: JobSpec, at: Path, **options: Any) -> Counts:
    """Copy the lake without its journeys, so that `reconcile` must read every row, and
    return the counts of a run on the copy."""
    assert spec.lake is not None
    shutil.rmtree(at, ignore_errors=True)
    shutil.copytree(spec.lake.uri.removeprefix("file://"), at)
    shutil.rmtree(at / "journeys", ignore_errors=True)
    plain = replace(spec, lake=LakeSpec(f"file://{at}"))
    return judged(spark, plain, dry_run=True, **options)


def files_of(lake: LakeSpec) -> dict[Path, int]:
    """Return the path of each file of journeys, and how many journeys the counts in the
    file's footer cover. This number is 0 if the footer has no valid counts."""
    root = Path(lake.uri.removeprefix("file://")) / "journeys"
    table = DeltaTable(root)
    found = {}
    for path in map(root.joinpath, table.get_add_actions().column("path").to_pylist()):
        told = tally.tally_in(pq.read_metadata(path))
        found[path] = told.rows if told else 0
    return found


def spoil(path: Path) -> None:
    """Overwrite a Parquet file except its footer, so that its rows cannot be read."""
    content = path.read_bytes()
    footer = 8 + int.from_bytes(content[-8:-4], "little")
    path.write_bytes(b"PAR1" + bytes(len(content) - 4 - footer) + content[-footer:])


@pytest.mark.matrix
def test_finished_journeys_are_counted_without_reading(
    spark, make_log, lake: LakeSpec
) -> None:
    log: Log = make_log("sqlite")
    spec = JobSpec((log.spec,), lake)
    processed(log, LONG_AGO)
    ids = processed(log, LONG_AGO + DAY)
    log.send([{"created_at": LONG_AGO}])
    archive_all(spark, log, lake)
    expected = {"orders.place": {"ok": 4, "redelivered_deduplicated": 4,
                                 "never_received": 1}}  # fmt: skip
    assert judged(spark, spec) == expected

    files = files_of(lake)
    assert sorted(files.values()) == [0, 4, 4]
    for path, told in files.items():
        if told:
            spoil(path)

    assert judged(spark, spec) == expected
    # What goes on with one of them reads that day's.
    log.receive([{"message_id": ids[0]}])
    with pytest.raises(Exception, match="journeys"):
        judged(spark, spec)


@pytest.mark.matrix
def test_finished_journeys_are_read_where_their_counts_do_not_suffice(
    spark, make_log, lake: LakeSpec
) -> None:
    log: Log = make_log("sqlite")
    spec = JobSpec((log.spec,), lake)
    processed(log, LONG_AGO)
    processed(log, LONG_AGO + DAY)
    archive_all(spark, log, lake)
    judged(spark, spec)
    for path in files_of(lake):
        spoil(path)

    # To judge by a shorter time they must be read, and so must a part of a file.
    middle = LONG_AGO + 2 * SECOND
    for more in ({"late_after": SECOND}, {"since": middle}):
        with pytest.raises(Exception, match="journeys"):
            judged(spark, spec, **more)
    # Days that are left out are not counted.
    late = judged(spark, spec, since=LONG_AGO + DAY)
    assert late == {"orders.place": {"ok": 2, "redelivered_deduplicated": 2}}


# A dozen judgements, of which half read everything.
@pytest.mark.timeout(900)
@pytest.mark.matrix
def test_counted_files_give_the_same_verdicts_as_read_ones(
    spark, make_log, lake: LakeSpec, tmp_path: Path
) -> None:
    log: Log = make_log("sqlite")
    spec, topic = JobSpec((log.spec,), lake), "topic:orders.placed"
    ids = [processed(log, LONG_AGO + number * DAY) for number in range(3)]
    told = uuid.uuid4()
    log.send([{"message_id": told, "destination": topic}])
    log.receive([{"message_id": told, "destination": topic}])
    # Processed after more than an hour; dead; stored twice; by a clock that is behind.
    slow, dead, twice, behind = (uuid.uuid4() for _ in range(4))
    log.send(
        [
            {"message_id": slow}, {"message_id": dead, "dead_at": LONG_AGO},
            {"message_id": twice}, {"message_id": twice, "replay_id": "r"},
            {"message_id": behind},
        ]
    )  # fmt: skip
    log.receive(
        [
            {"message_id": slow, "first_received_at": LONG_AGO + DAY / 2},
            {"message_id": dead, "dead_at": LONG_AGO},
            {"message_id": twice},
            {"message_id": behind, "first_received_at": LONG_AGO - DAY},
        ]
    )
    archive_all(spark, log, lake)
    assert judged(spark, spec) == without_journeys(spark, spec, tmp_path / "plain")
    assert sum(files_of(lake).values()) == 14
    # Others have happened since: processed again, sent again, erased.
    log.receive([{"message_id": ids[0][0]}])
    log.send([{"message_id": ids[1][0], "replay_id": "r"}])
    archive_all(spark, log, lake)
    judged(spark, spec)
    log.receive([{"message_id": ids[0][1]}])
    run(spec, "erase", "--message-id", str(ids[2][0]))
    processed(log, LONG_AGO + DAY / 4)

    for more in (
        {},
        {"late_after": 2 * SECOND},
        {"since": LONG_AGO + SECOND},
        {"since": LONG_AGO + DAY + SECOND / 1000},
    ):
        read = judged(spark, spec, many=journeys.MANY, dry_run=True, **more)
        assert judged(spark, spec, dry_run=True, **more) == read, more
    found = judged(spark, spec, dry_run=True)
    assert found == without_journeys(spark, spec, tmp_path / "plain")
    assert found["orders.place"]["processed_twice"] == 2


TOPIC = "topic:orders.placed"


def told(
    log: Log, start: dt.datetime, *stages: str, count: int = 3, lost: str = ""
) -> list[uuid.UUID]:
    """Store messages that are addressed to a topic, one each second. Let every stage
    process every message, except that the stage `lost` does not receive the second
    message."""
    ids = [uuid.uuid4() for _ in range(count)]
    sent = [
        {"message_id": one, "destination": TOPIC, "created_at": start + number * SECOND}
        for number, one in enumerate(ids)
    ]
    log.send(sent)
    log.receive(
        [
            one | {"stage": stage, "first_received_at": one["created_at"] + SECOND}
            for number, one in enumerate(sent)
            for stage in stages
            if (number, stage) != (1, lost)
        ]
    )
    return ids


def restored(lake: LakeSpec, backup: Path) -> None:
    """Restore a lake from a backup."""
    shutil.rmtree(lake.uri.removeprefix("file://"))
    shutil.copytree(backup, lake.uri.removeprefix("file://"))


def spoil_counted(lake: LakeSpec) -> int:
    """Overwrite the rows of the files whose footers are counted, and return the number
    of these rows."""
    found = files_of(lake)
    for path, rows in found.items():
        if rows:
            spoil(path)
    return sum(found.values())


@pytest.mark.matrix
def test_topics_messages_are_counted_where_all_listeners_have_them(
    spark, make_log, lake: LakeSpec, tmp_path: Path
) -> None:
    log: Log = make_log("sqlite")
    spec = JobSpec((log.spec,), lake)
    first = told(log, LONG_AGO, "a", "b", lost="b")
    told(log, LONG_AGO + DAY, "a", "b")
    log.send([{"destination": "topic:nobody.listens"}])
    archive_all(spark, log, lake)

    assert judged(spark, spec) == {TOPIC: {"ok": 11, "never_received": 1}}
    # Days later it receives nothing any more, and another one does.
    told(log, LONG_AGO + 3 * DAY, "a", "c")
    archive_all(spark, log, lake)
    expected = {TOPIC: {"ok": 17, "never_received": 4}}
    assert judged(spark, spec) == expected
    backup = tmp_path / "backup"
    shutil.copytree(lake.uri.removeprefix("file://"), backup)
    # Two messages of the first day, three of the second, and one to no listener; of the
    # third day, `b` has none.
    assert spoil_counted(lake) == 2 * 3 + 3 * 3 + 1
    assert judged(spark, spec) == expected

    restored(lake, backup)
    # The lost one arrives, another is processed again, and a listener is retired.
    arrived = {"destination": TOPIC, "first_received_at": LONG_AGO + 4 * DAY}
    log.receive(
        [
            {"message_id": one, "stage": stage, "created_at": sent_at, **arrived}
            for one, stage, sent_at in (
                (first[1], "b", LONG_AGO + SECOND), (first[0], "a", LONG_AGO),
            )
        ]
    )  # fmt: skip
    late = {TOPIC: {"ok": 16, "never_received": 3, "late": 1, "processed_twice": 1}}
    assert judged(spark, spec) == late
    archive_all(spark, log, lake)
    assert judged(spark, spec) == late
    run(spec, "listeners", "--retire", TOPIC, "shop/b", "--at", "2026-03-02T18:00")
    del late[TOPIC]["never_received"]
    assert judged(spark, spec) == late


@pytest.mark.matrix
def test_topics_messages_are_read_where_their_counts_do_not_suffice(
    spark, make_log, lake: LakeSpec, tmp_path: Path
) -> None:
    log: Log = make_log("sqlite")
    spec = JobSpec((log.spec,), lake)
    told(log, LONG_AGO, "a", "b", lost="b")
    told(log, LONG_AGO + DAY, "a", "b", "c")
    archive_all(spark, log, lake)
    judged(spark, spec)
    told(log, LONG_AGO + DAY + 60 * SECOND, "a", lost="a")

    # A listener of which no run has heard is expected to have received everything.
    declared = [Subscription(TOPIC, "shop", one) for one in "abcd"]
    for stages in ([], declared, declared[:2]):
        one = replace(spec, subscriptions=tuple(stages))
        for more in ({}, {"since": LONG_AGO + DAY + SECOND}):
            found = judged(spark, one, dry_run=True, **more)
            assert found == without_journeys(spark, one, tmp_path / "plain", **more)
            assert bool(found[TOPIC]["never_received"] >= 3)


@pytest.mark.matrix
def test_files_of_a_day_are_joined_when_they_are_a_crowd(
    spark, make_log, lake: LakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journeys, "CROWD", 3)
    log: Log = make_log("sqlite")
    spec = JobSpec((log.spec,), lake)
    for number in range(4):
        processed(log, LONG_AGO + number * 60 * SECOND)
        archive_all(spark, log, lake)
        judged(spark, spec)
        sweep_command(spec, parsed(["sweep"]), Run("sweep", {}))
        # A sweep does not compact the files of `journeys`.
        assert sum(files_of(lake).values()) == 4 * (number + 1)

    assert sorted(files_of(lake).values()) == [16]


@pytest.mark.matrix
def test_files_that_others_have_joined_are_read(
    spark, make_log, lake: LakeSpec
) -> None:
    log: Log = make_log("sqlite")
    spec = JobSpec((log.spec,), lake)
    for number in range(2):
        processed(log, LONG_AGO + number * 60 * SECOND)
        archive_all(spark, log, lake)
        first = judged(spark, spec)
    root = lake.uri.removeprefix("file://") + "/journeys"
    DeltaTable(root).optimize.compact()

    assert list(files_of(lake).values()) == [0]
    assert judged(spark, spec) == first


def to(*destinations: str) -> pa.Table:
    """Return rows of finished journeys, one to each destination."""
    count = len(destinations)
    instants = pa.array([LONG_AGO] * count, pa.timestamp("us", "UTC"))
    columns = {
        "destination": destinations, "deliveries": [1] * count,
        "told_by": ["shop"] * count, "consumer": ["shop/orders.place"] * count,
        "stored_at": instants, "told_at": instants, "due_at": instants,
        "took_us": pa.array([0] * count, pa.int64()),
        "receivers": pa.nulls(count, pa.string()),
    }  # fmt: skip
    return pa.table(columns)


def test_a_footer_of_too_many_lines_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = tally.Tallying()
    counted.add(to("orders.place", "orders.cancel"))

    assert counted.footer()
    monkeypatch.setattr(tally, "MOST", 1)
    assert counted.footer() == {}


def test_lines_are_summed_up_while_a_file_is_written() -> None:
    """A file has journeys to 20,000 destinations, because each answer has a destination
    of its own. While the file is written, the counts take little memory. The file's
    footer does not contain these counts. Another file has journeys to two destinations.
    Its footer contains one line for each destination."""
    counted, before = tally.Tallying(), pa.total_allocated_bytes()
    for number in range(20):
        counted.add(to(*(f"answers.{number}.{line}" for line in range(1_000))))

    # Half of what is counted is held, and not all of it.
    assert pa.total_allocated_bytes() - before < 20 * 25_000
    assert counted.footer() == {}
    few = tally.Tallying()
    for _ in range(3):
        few.add(to("orders.place", "orders.cancel"))
    said = json.loads(few.footer()[tally.KEY])
    assert sorted((line[1], line[6]) for line in said["lines"]) == [
        ("orders.cancel", 3), ("orders.place", 3)
    ]  # fmt: skip


@pytest.mark.matrix
def test_more_lines_than_are_held_at_once_are_read(
    spark, make_log, lake: LakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_footers, "LINES", 3)
    log: Log = make_log("sqlite")
    spec = JobSpec((log.spec,), lake)
    for number in range(2):
        processed(log, LONG_AGO + number * DAY, 4 + number)
    archive_all(spark, log, lake)
    expected = {"orders.place": {"ok": 5, "redelivered_deduplicated": 4}}
    assert judged(spark, spec) == expected

    larger, smaller = sorted(files_of(lake), key=lambda path: path.parent, reverse=True)
    spoil(larger)
    assert judged(spark, spec) == expected
    spoil(smaller)
    with pytest.raises(Exception, match="journeys"):
        judged(spark, spec)


def test_messages_of_one_sender_do_not_hide_the_clock_of_another(
    spark, make_log, lake: LakeSpec
) -> None:
    """Two services send to the same queue on the same day. The clock of one of them is
    two hours behind, and the clock of the other is right."""
    shop, erp, payments = (make_log("sqlite", n) for n in ("shop", "erp", "payments"))
    spec = JobSpec((shop.spec, erp.spec, payments.spec), lake)
    for log, ahead in ((shop, 2 * HOUR), (erp, 0 * HOUR)):
        times = [LONG_AGO + number * HOUR for number in range(4)]
        sent = [{"message_id": uuid.uuid4(), "created_at": one} for one in times]
        log.send(sent)
        payments.receive(
            [
                {**one, "first_received_at": one["created_at"] + ahead + SECOND,
                 "service": log.spec.service}
                for one in sent
            ]
        )  # fmt: skip
    for log in (shop, erp, payments):
        run(JobSpec((log.spec,), lake), "archive", "--older-than", "1d", "--no-vacuum")
    expected = {"orders.place": {"ok": 8}}

    assert judged(spark, spec, many=1_000) == expected
    assert judged(spark, spec) == expected


def test_a_message_processed_before_it_was_due_is_not_counted_unread(
    spark, make_log, lake: LakeSpec
) -> None:
    """The receiver's clock is two hours behind. It needs 90 minutes for one of the
    messages."""
    shop, payments = make_log("sqlite"), make_log("sqlite", "payments")
    spec = JobSpec((shop.spec, payments.spec), lake)
    sent = [
        {"message_id": uuid.uuid4(), "created_at": LONG_AGO + number * HOUR}
        for number in range(4)
    ]
    shop.send(sent)
    receipts = [
        {**one, "first_received_at": one["created_at"] - 2 * HOUR} for one in sent
    ]
    receipts[0]["processed_at"] = LONG_AGO - HOUR / 2
    payments.receive(receipts)
    for log in (shop, payments):
        run(JobSpec((log.spec,), lake), "archive", "--older-than", "1d", "--no-vacuum")
    expected = {"orders.place": {"ok": 3, "late": 1}}

    assert judged(spark, spec, many=1_000) == expected
    assert judged(spark, spec) == expected


def heard(log: Log, stage: str, sent: dict[str, Any], after: dt.timedelta) -> None:
    """Let a stage receive a message of a topic some time after it was stored."""
    log.receive(
        [{"message_id": sent["message_id"], "destination": sent["destination"],
          "stage": stage, "created_at": sent["created_at"],
          "first_received_at": sent["created_at"] + after}]
    )  # fmt: skip


def alike(spark: Any, spec: JobSpec, *logs: Log, **options: Any) -> list[Counts]:
    """Return the counts of four runs: when all rows are live, when those of the first
    of these logs are archived, when all of them are, and from the journeys."""
    assert spec.lake is not None
    found = [judged(spark, spec, dry_run=True, **options)]
    archive(spark, logs[0], spec.lake)
    found.append(judged(spark, spec, dry_run=True, **options))
    for log in logs:
        archive_all(spark, log, spec.lake)
    return found + [judged(spark, spec, **options) for _ in range(2)]


def test_a_stages_first_message_may_have_waited(
    spark, make_log, lake: LakeSpec
) -> None:
    """The relay was away for two hours before a stage received its first message. The
    first message of another topic was delayed."""
    log: Log = make_log("sqlite")
    away, prompt, delayed = (
        {"message_id": uuid.uuid4(), "destination": topic, "created_at": stored}
        for topic, stored in (
            (TOPIC, LONG_AGO), (TOPIC, LONG_AGO + 3 * HOUR), ("topic:later", LONG_AGO),
        )
    )  # fmt: skip
    due = {"due_at": LONG_AGO + 5 * HOUR, "dispatched_at": LONG_AGO + 5 * HOUR}
    log.send([{**away, "dispatched_at": LONG_AGO + 2 * HOUR}, prompt])
    log.send([{**delayed, **due}])
    for sent, after in (
        (away, 2 * HOUR),
        (prompt, SECOND),
        (delayed, 5 * HOUR + SECOND),
    ):
        heard(log, "s", sent, after)

    found = alike(spark, JobSpec((log.spec,), lake), log)

    assert found == 4 * [{TOPIC: {"late": 1, "ok": 1}, "topic:later": {"ok": 1}}]


def test_a_delayed_message_does_not_show_in_a_footer_that_its_stage_listened(
    spark, make_log, lake: LakeSpec
) -> None:
    """A stage began to listen while a message was delayed, and received it. It has not
    received what had left before."""
    log: Log = make_log("sqlite")
    delayed, before, first, last = (
        {"message_id": uuid.uuid4(), "destination": TOPIC,
         "created_at": LONG_AGO + hours * HOUR}
        for hours in (0, 1, 4, 6)
    )  # fmt: skip
    due = {"due_at": LONG_AGO + 5 * HOUR, "dispatched_at": LONG_AGO + 5 * HOUR}
    log.send([delayed | due, before, first, last])
    for stage in ("old", "new"):
        heard(log, stage, delayed, 5 * HOUR + SECOND)
        for one in (before, first, last)[stage == "new" :]:
            heard(log, stage, one, SECOND)

    assert alike(spark, JobSpec((log.spec,), lake), log) == 4 * [{TOPIC: {"ok": 7}}]


def test_a_footer_shows_who_consumes_a_queue(spark, make_log, lake: LakeSpec) -> None:
    """The inbox of a third service is complete for some hours only."""
    shop, payments, erp = (make_log("sqlite", n) for n in ("shop", "payments", "erp"))
    kept = {"outbox": 10_000, "inbox": 10_000}
    spec = JobSpec((shop.spec, payments.spec, erp.spec), lake, kept)
    got, recent = uuid.uuid4(), dt.datetime.now(dt.timezone.utc) - 5 * HOUR
    shop.send(
        [
            {"message_id": got}, {"created_at": LONG_AGO + DAY},
            {"message_id": (mail := uuid.uuid4()), "destination": "mails",
             "created_at": recent},
        ]
    )  # fmt: skip
    payments.receive([{"message_id": got}])
    erp.receive(
        [{"id": 77, "message_id": mail, "destination": "mails",
          "first_received_at": recent}]
    )  # fmt: skip

    found = alike(spark, spec, shop, payments)

    expected = {"orders.place": {"ok": 1, "never_received": 1}, "mails": {"ok": 1}}
    assert found == 4 * [expected]


def test_what_was_stored_before_since_may_have_left_later(
    spark, make_log, lake: LakeSpec
) -> None:
    """A message was delayed for a day, and another one for 40 minutes."""
    log: Log = make_log("sqlite")
    since = LONG_AGO + 10 * HOUR
    for stored, due in (
        (LONG_AGO, LONG_AGO + DAY), (since - HOUR / 2, since + HOUR / 6),
    ):  # fmt: skip
        one = {"message_id": uuid.uuid4(), "created_at": stored}
        log.send([{**one, "due_at": due, "dispatched_at": due}])
        log.receive([{**one, "first_received_at": due}])

    found = alike(spark, JobSpec((log.spec,), lake), log, since=since)

    assert found == 4 * [{"orders.place": {"ok": 2}}]


@pytest.mark.matrix
def test_a_lakes_path_may_contain_a_day(spark, make_log, tmp_path: Path) -> None:
    log: Log = make_log("sqlite")
    lake = LakeSpec(f"file://{tmp_path}/day=2020-01-01/lake")
    spec = JobSpec((log.spec,), lake)
    ids = processed(log, LONG_AGO)
    archive_all(spark, log, lake)
    judged(spark, spec)
    log.receive([{"message_id": ids[0]}])
    expected = {"orders.place": {"ok": 1, "redelivered_deduplicated": 2,
                                 "processed_twice": 1}}  # fmt: skip

    assert judged(spark, spec) == expected
    archive_all(spark, log, lake)
    assert judged(spark, spec) == expected


@pytest.mark.matrix
def test_nothing_of_what_is_erased_is_in_a_footer(
    spark, make_log, lake: LakeSpec
) -> None:
    log: Log = make_log("sqlite")
    spec = JobSpec((log.spec,), lake)
    ids = processed(log, LONG_AGO)
    archive_all(spark, log, lake)
    judged(spark, spec)
    run(spec, "erase", "--message-id", str(ids[0]))

    [path] = files_of(lake)
    assert tally.KEY not in pq.read_metadata(path).metadata
    assert judged(spark, spec)["orders.place"]["ok"] == 1


@pytest.mark.parametrize(
    "how", [pytest.param("lost", marks=pytest.mark.matrix), "damaged"]
)
@pytest.mark.matrix
def test_a_file_without_its_footer_is_named(
    spark, make_log, lake: LakeSpec, how: str
) -> None:
    log: Log = make_log("sqlite")
    spec = JobSpec((log.spec,), lake)
    processed(log, LONG_AGO)
    archive_all(spark, log, lake)
    expected = judged(spark, spec)
    [path] = files_of(lake)
    if how == "lost":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:100])

    with pytest.raises(EnvironmentFault, match=f"{path.name} cannot be read"):
        judged(spark, spec)
    shutil.rmtree(path.parents[2])
    assert judged(spark, spec) == expected


@pytest.mark.matrix
def test_rows_of_messages_before_since_are_not_read(
    spark, make_log, lake: LakeSpec
) -> None:
    log: Log = make_log("sqlite")
    spec, since = JobSpec((log.spec,), lake), LONG_AGO + 10 * DAY
    told(log, LONG_AGO, "a")
    again = told(log, LONG_AGO + DAY, "a")[0]
    replayed = {"created_at": since + DAY, "replay_id": "r", "message_id": again}
    log.send([{**replayed, "destination": TOPIC}])
    archive(spark, log, lake)
    judged(spark, spec)
    # All receipts are live, the older ones too: they show who listens, and what came
    # of a message that was sent again since.
    told(log, since + DAY + 60 * SECOND, "b")
    found = judged(spark, spec, since=since)
    assert found == {TOPIC: {"ok": 4, "never_received": 3}}

    archive(spark, log, lake)
    told(log, since + 3 * DAY, "b")
    log.execute("UPDATE django_txmsg_inboxmessage SET processed_at = 'x' WHERE id = 2")
    with pytest.raises(Exception, match="'x'"):
        judged(spark, spec, dry_run=True)
    # There are findings about three of the older messages.
    found = judged(spark, spec, since=since + 2 * DAY)
    assert found == {TOPIC: {"ok": 6, "never_received": 6}}
