"""Journeys that are extended batch by batch equal journeys computed from the whole
lake."""

from __future__ import annotations

import datetime as dt
import random
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyspark.sql.functions as sf
import pytest
from deltalake import DeltaTable

from django_txmsg.rules.dead_letters import TAKEN_IN
from django_txmsg.spark.cli import parsed
from django_txmsg.spark.errors import EnvironmentFault
from django_txmsg.spark.jobs import journeys as keeping
from django_txmsg.spark.jobs.journeys import Journeys
from django_txmsg.spark.jobs.reading import WholeLog
from django_txmsg.spark.jobs.reconcile import run_reconcile
from django_txmsg.spark.jobs.sweep import sweep_command
from django_txmsg.spark.runs import Run
from django_txmsg.spark.schemas import DEAD_LETTERS, INBOX, OUTBOX
from django_txmsg.spark.spec import JobSpec, LakeSpec
from django_txmsg.spark.transforms.journeys import (
    JOURNEY,
    LETTERS,
    RECEIVED,
    RESOLUTIONS,
    SENT,
    merged,
    steps,
)
from tests.spark.archives import archive
from tests.spark.log import LONG_AGO, Log
from tests.spark.running import but, run

DAY = dt.timedelta(days=1)
NAMES = sorted(JOURNEY.fieldNames())
JUDGE = ("reconcile", "--grace", "0s", "--fail-on", "never")


def content(journeys: Any) -> list[tuple[Any, ...]]:
    return sorted((tuple(row) for row in journeys.select(*NAMES).collect()), key=str)


def at_once(spark: Any, spec: JobSpec) -> list[tuple[Any, ...]]:
    """Return the journeys as computed from all archived rows in a single step."""
    with WholeLog(spark, spec) as log:
        assert log.lake is not None
        sent, received = (
            log.lake.table(table.name, table.lake_struct()).read(spark)
            for table in (OUTBOX, INBOX)
        )
        # Nothing that is archived waits for anything.
        received = received.withColumns(
            {
                "due_at": sf.lit(None).cast("timestamp"),
                "waits_for": sf.lit(None).cast("string"),
            }
        )
        return content(
            merged(
                steps(
                    sent.select(*SENT.fieldNames()),
                    received.select(*RECEIVED.fieldNames()),
                    spark.createDataFrame([], LETTERS),
                )
            )
        )


@contextmanager
def many() -> Iterator[None]:
    """Treat any number of journeys as many: files that need no merging are left."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(keeping, "MANY", 0)
        yield


def catch_up(spark: Any, spec: JobSpec, **more: Any) -> list[tuple[Any, ...]]:
    with (
        many(),
        WholeLog(spark, spec) as log,
        Journeys(log, Run("reconcile", {}), **more) as journeys,
    ):
        journeys.catch_up()
        rows = journeys.read()
        return [] if rows is None else content(rows)


def archive_all(spark: Any, log: Log, lake: LakeSpec) -> None:
    for table in (OUTBOX, INBOX):
        archive(spark, log, lake, table=table)


def traffic(log: Log, rng: random.Random, known: list[uuid.UUID]) -> None:
    """Store random messages: in any order, repeated, late, or from unknown senders."""
    known += [uuid.UUID(int=rng.getrandbits(128)) for _ in range(12)]

    def place() -> str:
        return rng.choice(["orders.place", "topic:orders.placed"])

    def when() -> dt.datetime:
        return LONG_AGO + rng.randrange(20) * DAY

    log.send(
        [
            {"message_id": one, "destination": place(), "created_at": when(),
             "replay_id": uuid.UUID(int=rng.getrandbits(128)).hex}
            | ({"dead_at": when()} if rng.random() < 0.2 else {})
            for one in rng.sample(known, 10)
        ]
    )  # fmt: skip
    there = log.rows("SELECT stage, message_id FROM django_txmsg_inboxmessage")
    log.receive(
        [
            {"message_id": one, "stage": stage, "destination": place(),
             "created_at": when(), "first_received_at": when(),
             "deliveries": rng.randrange(1, 4), "attempts": rng.randrange(1, 3)}
            for one in rng.sample(known, 8)
            if ((stage := rng.choice("st")), one.hex) not in there
        ]
    )  # fmt: skip


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.matrix) for n in range(1, 5))]
)
def test_steps_merge_to_the_same_journeys_in_any_order(spark, seed: int) -> None:
    rng = random.Random(seed)
    # Logs of which each has a few messages, side by side: a Spark job costs a second.
    names = [f"{one}{case}" for case in range(5) for one in "xyz"]
    batches = 4

    def moment() -> dt.datetime | None:
        return rng.choice([None, LONG_AGO + dt.timedelta(seconds=rng.randrange(10**6))])

    def always() -> dt.datetime:
        return moment() or LONG_AGO

    def place() -> str:
        return rng.choice(["q", "topic:t"])

    sent = [
        (rng.choice("ab"), rng.choice(names), place(), rng.choice("cd"), always(),
         moment(), rng.randrange(4), moment(), moment(), moment(), moment())
        for _ in range(150)
    ]  # fmt: skip
    received = [
        (rng.choice("ab"), rng.choice("st"), rng.choice(names), place(),
         rng.choice("ab"), moment(), always(), moment(), rng.choice(["w", None]),
         moment(), moment(), moment(),
         rng.randrange(4), rng.randrange(4))
        for _ in range(150)
    ]  # fmt: skip
    letters = [
        (rng.choice("ab"), rng.choice(["", "s"]), rng.choice(names), place(), moment(),
         always(), rng.choice([*RESOLUTIONS, "open"]), moment(),
         rng.choice(["w", None]), rng.choice([*sorted(TAKEN_IN), None]))
        for _ in range(150)
    ]  # fmt: skip

    def part(number: int) -> Any:
        return steps(
            spark.createDataFrame(sent[number::batches], SENT),
            spark.createDataFrame(received[number::batches], RECEIVED),
            spark.createDataFrame(letters[number::batches], LETTERS),
        )

    kept = merged(part(0))
    for number in range(1, batches):
        kept = merged(kept.unionByName(part(number)))

    everything = steps(
        spark.createDataFrame(sent, SENT),
        spark.createDataFrame(received, RECEIVED),
        spark.createDataFrame(letters, LETTERS),
    )
    assert content(kept) == content(merged(everything))


@pytest.mark.matrix
def test_incremental_journeys_equal_those_computed_at_once(
    spark, make_log, lake: LakeSpec
) -> None:
    log: Log = make_log("sqlite")
    spec, rng, known = JobSpec((log.spec,), lake), random.Random(20), []
    for _ in range(3):
        traffic(log, rng, known)
        archive_all(spark, log, lake)
        kept = catch_up(spark, spec)
        # Files are joined, those of the archive and those of the journeys.
        sweep_command(spec, parsed(["sweep"]), Run("sweep", {}))

    assert kept == at_once(spark, spec)
    assert len(kept) > 30
    # With nothing new there is nothing to do; and what is erased is in no journey.
    entries = log_of(lake)
    assert catch_up(spark, spec) == kept
    assert log_of(lake) == entries
    run(spec, "erase", "--message-id", str(known[0]))
    left = catch_up(spark, spec)
    assert left == [row for row in kept if str(known[0]) not in row]


@pytest.mark.matrix
def test_a_database_from_a_backup_counts_nothing_twice(
    spark, make_log, lake: LakeSpec, tmp_path: Path
) -> None:
    log: Log = make_log("sqlite")
    spec, ids = JobSpec((log.spec,), lake), [uuid.uuid4() for _ in range(4)]
    path, backup = log.spec.path, tmp_path / "backup"

    def process(one: uuid.UUID) -> None:
        log.execute(
            "UPDATE django_txmsg_inboxmessage SET processed_at = first_received_at"
            " WHERE message_id = %s",
            one.hex,
        )

    log.send([{"message_id": one} for one in ids])
    log.receive([{"message_id": one, "processed_at": None} for one in ids])
    process(ids[0])
    archive_all(spark, log, lake)
    assert run(spec, *JUDGE)["counts"] == {"ok": 1, "not_processed": 3}
    process(ids[1])
    shutil.copy(path, backup)
    process(ids[2])
    archive_all(spark, log, lake)
    assert run(spec, *JUDGE)["counts"] == {"ok": 3, "not_processed": 1}

    shutil.copy(backup, path)
    entries = log_of(lake)
    # The journeys know more than the database, which has their rows again.
    assert run(spec, *JUDGE)["counts"].keys() == {"ok", "not_processed"}
    assert log_of(lake) == entries
    # One row is as it was archived; the other has left the lake, and comes again.
    archive_all(spark, log, lake)
    process(ids[2])
    archive_all(spark, log, lake)
    assert run(spec, *JUDGE)["counts"] == {"ok": 3, "not_processed": 1}
    assert catch_up(spark, spec) == at_once(spark, spec)


def log_of(lake: LakeSpec) -> int:
    """Return the number of commits in the Delta log of the journeys."""
    return DeltaTable(lake.uri.removeprefix("file://") + "/journeys").version()


class Killed(Exception):
    """An error that stops a run at the step where a real run would be killed."""


@pytest.mark.parametrize(
    "step", ["committed", pytest.param("written", marks=pytest.mark.matrix)]
)
def test_a_run_that_is_killed_has_brought_its_batches_or_not(
    spark, make_log, lake: LakeSpec, step: str
) -> None:
    log: Log = make_log("sqlite")
    spec, rng, known = JobSpec((log.spec,), lake), random.Random(21), []
    traffic(log, rng, known)
    archive_all(spark, log, lake)
    catch_up(spark, spec)
    traffic(log, rng, known)
    archive_all(spark, log, lake)

    def kill(reached: str) -> None:
        if reached == step:
            raise Killed

    with pytest.raises(Killed):
        catch_up(spark, spec, on_step=kill)

    assert catch_up(spark, spec) == at_once(spark, spec)


@pytest.mark.matrix
def test_two_runs_bring_the_same_batches_once(spark, make_log, lake: LakeSpec) -> None:
    log: Log = make_log("sqlite")
    spec = JobSpec((log.spec,), lake)
    lock = Path(f"{log.spec.path}.journeys.lock")
    log.send_many(5)
    archive_all(spark, log, lake)
    seen: list[Any] = []

    def beside(step: str) -> None:
        if step == "written":
            seen.append(catch_up(spark, spec))
            # Nobody erases or joins meanwhile, either.
            sweep_command(spec, parsed(["sweep"]), swept := Run("sweep", {}))
            assert "journeys" not in swept.counts
            with pytest.raises(EnvironmentFault, match="An update of the journeys"):
                run(spec, "erase", "--message-id", str(uuid.uuid4()))

    first = catch_up(spark, spec, on_step=beside)

    assert seen == [[]]
    assert first == at_once(spark, spec)
    log.send_many(5)
    archive_all(spark, log, lake)

    def overtake(step: str) -> None:
        if step == "written":
            lock.unlink()  # as when a proxy has broken it
            seen.append(catch_up(spark, spec))

    with pytest.raises(EnvironmentFault, match="journeys was changed by another"):
        catch_up(spark, spec, on_step=overtake)

    assert seen[1:] == [at_once(spark, spec)]
    assert catch_up(spark, spec) == seen[1]


@pytest.mark.matrix
def test_two_services_keep_their_journeys_side_by_side(
    spark, make_log, lake: LakeSpec
) -> None:
    logs = [make_log("sqlite", name) for name in ("shop", "payments")]
    first = JobSpec(tuple(log.spec for log in logs), lake)
    second = JobSpec((logs[1].spec, logs[0].spec), lake)
    for _ in range(2):
        for log in logs:
            log.send_many(5)
            archive_all(spark, log, lake)
        theirs: list[Any] = []

        def beside(step: str, theirs: list[Any] = theirs) -> None:
            if step == "written":
                theirs.append(catch_up(spark, second))

        ours = catch_up(spark, first, on_step=beside)

        assert theirs == [ours] == [at_once(spark, first)]


@pytest.mark.matrix
def test_a_run_reads_one_version_of_the_journeys(
    spark, make_log, lake: LakeSpec
) -> None:
    log, other = make_log("sqlite"), make_log("sqlite", "payments")
    both, alone = JobSpec((log.spec, other.spec), lake), JobSpec((log.spec,), lake)
    log.send_many(5)
    archive_all(spark, log, lake)
    catch_up(spark, both)
    log.send_many(5)
    archive_all(spark, log, lake)

    with (
        WholeLog(spark, both) as logs,
        Journeys(logs, Run("reconcile", {}), keep=False) as pinned,
    ):
        kept = catch_up(spark, both)
        rows = pinned.read()
        assert rows is not None
        assert rows.count() == 5
        assert content(merged(rows.unionByName(pinned.rest()))) == kept

    # A run with fewer services leaves the journeys alone. A run with an additional
    # service makes them again.
    entries = log_of(lake)
    assert catch_up(spark, alone) == []
    assert log_of(lake) == entries
    third = make_log("sqlite", "erp")
    assert catch_up(spark, JobSpec((*both.services, third.spec), lake)) == kept
    assert log_of(lake) == entries + 1


@pytest.mark.matrix
def test_archived_and_live_rows_of_a_message_are_judged_together(
    spark, make_log, lake: LakeSpec
) -> None:
    log: Log = make_log("sqlite")
    spec, topic = JobSpec((log.spec,), lake), "topic:orders.placed"
    ids = [uuid.UUID(int=number) for number in range(1, 7)]
    log.send([{"message_id": one} for one in ids])
    told = [uuid.UUID(int=number) for number in range(101, 107)]
    log.send([{"message_id": one, "destination": topic} for one in told])
    log.receive([{"message_id": one} for one in ids[:2]])
    log.receive(
        [{"message_id": one, "stage": "t", "destination": topic} for one in told[:5]]
    )
    archive_all(spark, log, lake)
    # Of one that is archived, the receipt is live; another is processed again; a third
    # is sent again, and on its way; others are new.
    log.receive([{"message_id": ids[2]}, {"message_id": ids[1]}])
    now = dt.datetime.now(dt.timezone.utc) + DAY
    log.send([{"message_id": ids[3], "created_at": now, "replay_id": "r"}])
    log.send([{}])

    judged = run(spec, *JUDGE)
    options = parsed(["reconcile", "--grace", "0s"])
    with many():
        apart = run_reconcile(spark, spec, options, Run("reconcile", {}))

    assert judged["destinations"] == apart.destinations == {
        "orders.place": {"ok": 2, "processed_twice": 1, "in_flight": 1,
                         "never_received": 3},
        topic: {"ok": 5, "never_received": 1},
    }  # fmt: skip
    day = dt.datetime(2026, 3, 2, tzinfo=dt.timezone.utc)
    late = but(options, since=day, dry_run=True)
    with many():
        later = run_reconcile(spark, spec, late, Run("reconcile", {}))
    # Without what is kept it is the same.
    shutil.rmtree(lake.uri.removeprefix("file://") + "/journeys")
    assert run(spec, *JUDGE, "--dry-run")["destinations"] == judged["destinations"]
    since = run(spec, *JUDGE, "--dry-run", "--since", "2026-03-02")
    assert since["destinations"] == later.destinations
    # Older messages are judged where there is a finding about them.
    assert later.destinations == {
        "orders.place": {"processed_twice": 1, "in_flight": 1, "never_received": 3},
        topic: {"never_received": 1},
    }  # fmt: skip


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in range(1, 6))]
)
@pytest.mark.matrix
def test_with_journeys_and_without_all_is_judged_alike(
    spark, make_log, lake: LakeSpec, tmp_path: Path, seed: int
) -> None:
    """Some messages are archived, some are live, and some are in a batch whose archive
    run was killed. Runs with and without journeys give the same verdicts."""
    log: Log = make_log("sqlite")
    spec, rng, known = JobSpec((log.spec,), lake), random.Random(seed), []
    options = parsed(["reconcile", "--grace", "0s"])

    def kill(step: str) -> None:
        if step == "committed":
            raise Killed

    for number in range(3):
        traffic(log, rng, known)
        for table in rng.sample([OUTBOX, INBOX], number):
            archive(spark, log, lake, table=table)
        if number:
            traffic(log, rng, known)
            with pytest.raises(Killed):
                archive(spark, log, lake, table=INBOX, on_step=kill)
        if not number:
            continue
        with many():
            judged = run_reconcile(spark, spec, options, Run("reconcile", {}))
        plain = tmp_path / f"plain-{number}"
        shutil.copytree(lake.uri.removeprefix("file://"), plain)
        shutil.rmtree(plain / "journeys")
        again = JobSpec((log.spec,), LakeSpec(f"file://{plain}"))
        facts = run(again, *JUDGE, "--dry-run")
        assert judged.destinations == facts["destinations"]
    assert log_of(lake) > 1


def test_a_message_that_left_twice_is_found_where_it_was_received_first(
    spark, log: Log, lake: LakeSpec
) -> None:
    """Its relay was killed before it had marked the message as dispatched, and sent the
    message again when it came back days later."""
    spec, now = JobSpec((log.spec,), lake), dt.datetime.now(dt.timezone.utc)
    message, hour = uuid.uuid4(), dt.timedelta(hours=1)
    stored, again = now - 72 * hour, now - 3 * hour
    log.send([{"message_id": message, "created_at": stored, "dispatched_at": again}])
    log.receive(
        [{"message_id": message, "first_received_at": stored,
          "last_received_at": again, "deliveries": 2}]
    )  # fmt: skip

    for _ in range(3):
        counts = run(spec, *JUDGE, "--since", "24h")["counts"]
        assert counts == {"redelivered_deduplicated": 1}


def test_of_old_receipts_only_those_of_replayed_messages_are_read(
    spark, log: Log, lake: LakeSpec
) -> None:
    spec, now = JobSpec((log.spec,), lake), dt.datetime.now(dt.timezone.utc)
    old, replayed, new = (uuid.uuid4() for _ in range(3))
    log.send([{"message_id": replayed, "created_at": now, "replay_id": "r"}])
    log.receive([{"message_id": old}, {"message_id": replayed}])
    log.receive([{"message_id": new, "first_received_at": now}])

    with WholeLog(spark, spec) as logs, Journeys(logs, Run("reconcile", {})) as kept:
        rest = kept.rest(now - DAY).where("received_at IS NOT NULL").collect()

    assert sorted(row.message_id for row in rest) == sorted(map(str, (replayed, new)))


def test_of_the_archived_outbox_only_recent_and_named_messages_are_read(
    spark, log: Log, lake: LakeSpec
) -> None:
    """Without journeys, as in a first dry run."""
    spec, now = JobSpec((log.spec,), lake), dt.datetime.now(dt.timezone.utc)
    old, named, due, left = (uuid.uuid4() for _ in range(4))
    ago, recent = now - 10 * DAY, now - 1.1 * DAY
    log.send([{"message_id": one, "created_at": ago} for one in (old, named)])
    log.send([{"message_id": due, "created_at": ago, "due_at": recent}])
    log.send([{"message_id": left, "created_at": ago, "dispatched_at": recent}])
    archive(spark, log, lake)
    assert log.count() == 0

    with (
        WholeLog(spark, spec) as logs,
        Journeys(logs, Run("reconcile", {}), keep=False) as kept,
    ):
        found = [kept.rest(recent, names) for names in ((), (str(named),))]
        ids = [{row.message_id for row in one.collect()} for one in found]

    assert ids == [{str(due), str(left)}, {str(due), str(left), str(named)}]


def test_since_finds_an_archived_message_by_the_time_it_was_due(
    spark, log: Log, lake: LakeSpec
) -> None:
    """Without journeys, as in a first dry run."""
    spec, now = JobSpec((log.spec,), lake), dt.datetime.now(dt.timezone.utc)
    due = now - dt.timedelta(hours=26)
    log.send([{"created_at": now - 10 * DAY, "due_at": due, "dispatched_at": due}])
    judge = (*JUDGE, "--since", "27h")
    live = run(spec, *judge, "--dry-run")["counts"]
    archive(spark, log, lake)

    archived = run(spec, *judge, "--dry-run")["counts"]

    assert live == archived == run(spec, *judge)["counts"] == {"never_received": 1}


def test_the_letters_of_a_replayed_message_are_read_however_old(
    spark, make_log, lake: LakeSpec
) -> None:
    """A message died days ago, and was discarded. Then it was replayed."""
    log: Log = make_log("sqlite")
    spec, now = JobSpec((log.spec,), lake), dt.datetime.now(dt.timezone.utc)
    message, stored, again = uuid.uuid4(), now - 10 * DAY, now - DAY / 12
    log.send(
        [
            {"message_id": message, "created_at": stored},
            {"message_id": message, "created_at": again, "replay_id": "r"},
        ]
    )
    log.receive(
        [{"message_id": message, "first_received_at": stored, "deliveries": 2,
          "last_received_at": again, "dead_at": now - 9 * DAY}]
    )  # fmt: skip
    log.bury(
        [{"message_id": message, "message_created_at": stored,
          "created_at": now - 9 * DAY, "resolution": "discarded",
          "resolved_at": now - 8 * DAY}]
    )  # fmt: skip

    for archived in (False, True):
        if archived:
            archive(spark, log, lake, table=DEAD_LETTERS)
        for since in ((), ("--since", "24h")):
            assert run(spec, *JUDGE, *since)["counts"] == {"discarded": 1}


def test_the_first_sending_of_a_replayed_message_is_read_however_old(
    spark, make_log, lake: LakeSpec
) -> None:
    """A message was cancelled days ago. Then it was replayed, and processed."""
    log: Log = make_log("sqlite")
    spec, now = JobSpec((log.spec,), lake), dt.datetime.now(dt.timezone.utc)
    message, stored, again = uuid.uuid4(), now - 10 * DAY, now - DAY / 12
    log.send(
        [
            {"message_id": message, "created_at": stored},
            {"message_id": message, "created_at": stored + DAY, "replay_id": "r",
             "due_at": again, "dispatched_at": again},
        ]
    )  # fmt: skip
    log.receive([{"message_id": message, "first_received_at": again}])
    counts = []

    for archived in (False, True):
        if archived:
            archive(spark, log, lake)
        for since in ((), ("--since", "24h")):
            counts.append(run(spec, *JUDGE, "--dry-run", *since)["counts"])

    assert counts == [{"late": 1}] * 4
