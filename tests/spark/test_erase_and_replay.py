"""`erase` runs at the same time as `replay` and `reconcile`. A replay must not store an
erased message again, and `reconcile` no finding about one."""

from __future__ import annotations

import os
import sys
import threading
import uuid
from contextlib import closing, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from django_txmsg.spark.connection import connect_plain
from django_txmsg.spark.errors import EnvironmentFault
from django_txmsg.spark.jobs.follow import Follower
from django_txmsg.spark.lock import Taken, alive, archiving, erasure, storing
from django_txmsg.spark.runs import next_request, recorded
from django_txmsg.spark.schemas import INBOX
from django_txmsg.spark.spec import JobSpec, LakeSpec
from tests.faults import wait_until
from tests.spark.archives import archive
from tests.spark.conftest import everywhere
from tests.spark.kill_follow import OPTIONS
from tests.spark.log import Log
from tests.spark.running import but, end, run, start
from tests.spark.test_outgoing import request_replay


@pytest.mark.matrix
def test_a_message_is_not_erased_while_a_replay_is_about_to_store_it(
    spark: object, pg_log: Log, lake: LakeSpec
) -> None:
    message = uuid.uuid4()
    pg_log.send([{"message_id": message}])
    archive(None, pg_log, lake)
    spec = JobSpec((pg_log.spec,), lake)
    # The replay has read the message, and waits before it stages the message.
    for sql in (
        "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM pg_advisory_xact_lock(42); RETURN NEW; END $$",
        "CREATE TRIGGER waits BEFORE INSERT ON django_txmsg_stagedmessage"
        " FOR EACH ROW EXECUTE FUNCTION wait()",
    ):
        pg_log.execute(sql)
    with pg_log.connected() as connection:
        connection.rows("SELECT pg_advisory_lock(42)")
        replay = start(spec, "replay", "--where", "key = ''")
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            " AND wait_event = 'advisory'"
        )
        wait_until(lambda: connection.value(waiting) or replay.poll(), deadline=120)

        with pytest.raises(Taken, match="'shop' is running: wait for its end"):
            run(spec, "erase", "--message-id", str(message))
    end(replay)
    run(spec, "erase", "--message-id", str(message))

    assert pg_log.count() == 0
    assert pg_log.count("django_txmsg_stagedmessage") == 0


def test_verify_reads_again_what_an_erasure_has_replaced(
    spark: object, pg_log: Log, lake: LakeSpec
) -> None:
    message, relation = uuid.uuid4(), "django_txmsg_inboxmessage"
    pg_log.receive([{"message_id": one} for one in (message, uuid.uuid4())])
    archive(None, pg_log, lake, table=INBOX)
    spec = JobSpec((pg_log.spec,), lake)
    waiting = f"pg_locks WHERE NOT granted AND relation = '{relation}'::regclass"
    with pg_log.connected() as connection, connection.transaction():
        connection.execute(f"LOCK TABLE {relation}")
        # It has read the file once, and compares its rows with those of the database.
        verify = start(spec, "verify")
        wait_until(lambda: pg_log.count(waiting) or verify.poll(), deadline=120)
        # It has replaced and deleted the file, and goes on with the database.
        erase = start(spec, "erase", "--message-id", str(message))
        wait_until(lambda: pg_log.count(waiting) > 1 or erase.poll(), deadline=120)
    end(erase)
    end(verify)


@everywhere
def test_no_replay_or_reconcile_runs_beside_an_erasure(
    spark: object, log: Log, lake: LakeSpec
) -> None:
    log.send_many(3)
    spec = JobSpec((log.spec,), lake)
    replay = ("replay", "--where", "key = ''", "--as", "copy", "--name", "n")
    with closing(connect_plain(log.spec)) as connection:
        with erasure(connection, log.spec), pytest.raises(Taken, match="erasure"):
            run(spec, *replay)
        with erasure(connection, log.spec), pytest.raises(Taken, match="erasure"):
            run(spec, "reconcile")
        with storing(connection, log.spec):
            # These jobs run beside each other, and no erasure beside them.
            assert run(spec, *replay)["chosen"] == 3
            assert run(spec, "reconcile", "--fail-on", "never")["exit_code"] == 0
            with pytest.raises(Taken, match="replay"):
                run(spec, "erase", "--key", "a")
    assert run(spec, "erase", "--key", "a")["messages"] == 0


@everywhere
def test_a_requested_replay_waits_for_the_end_of_an_erasure(
    spark: object, log: Log, lake: LakeSpec
) -> None:
    message = uuid.uuid4()
    log.send([{"message_id": message}])
    request = request_replay(log, message)
    spec = JobSpec((log.spec,), lake)
    with closing(connect_plain(log.spec)) as connection:

        def record() -> tuple[str, str]:
            [row] = connection.rows(
                "SELECT state, error FROM django_txmsg_pipelinerun WHERE id = %s",
                uuid.UUID(request),
            )
            return row

        with erasure(connection, log.spec):
            with pytest.raises(Taken, match="erasure"):
                run(spec, "replay", "--request", request)
            state, error = record()
            assert state == "requested"
            assert "An erasure of messages of 'shop' is running" in error
            stop = threading.Event()
            follower = Follower(spec, OPTIONS, None, stop, say=print)

            def went_on() -> bool:
                return bool(follower.run) and follower.run.counts.get("rounds", 0) > 1

            rounds = threading.Thread(target=follower.work)
            rounds.start()
            try:
                wait_until(went_on)
                assert not follower.beside.job
            finally:
                stop.set()
                rounds.join()
        assert next_request(connection, log.spec) == request
        assert run(spec, "replay", "--request", request)["chosen"] == 1
        assert record() == ("clean", "")


def test_follow_runs_a_due_reconcile_after_the_end_of_an_erasure(
    make_log, lake: LakeSpec
) -> None:
    log: Log = make_log("sqlite")
    stop = threading.Event()
    options = but(OPTIONS, reconcile_every=timedelta(hours=1))
    spec = JobSpec((log.spec,), lake)
    follower = Follower(spec, options, None, stop, say=print)

    def went_on() -> bool:
        return bool(follower.run) and follower.run.counts.get("rounds", 0) > 1

    rounds = threading.Thread(target=follower.work)
    with closing(connect_plain(log.spec)) as connection:
        try:
            with erasure(connection, log.spec):
                rounds.start()
                wait_until(went_on)
                assert not follower.beside.job
            wait_until(lambda: follower.beside.job == "reconcile")
        finally:
            stop.set()
            rounds.join()


@everywhere
def test_no_erasure_begins_until_a_job_of_follow_has_ended(
    log: Log, lake: LakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job takes its own lock only after Spark has started. Here, Spark does not
    start, and the job fails."""
    over, python = tmp_path / "over", tmp_path / "python"
    python.write_text(f"#!/bin/sh\nuntil [ -e '{over}' ]; do sleep 0.1; done\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    stop = threading.Event()
    options = but(OPTIONS, reconcile_every=timedelta(hours=1))
    follower = Follower(JobSpec((log.spec,), lake), options, None, stop, say=print)

    def rounds() -> int:
        return follower.run.counts.get("rounds", 0) if follower.run else 0

    working = threading.Thread(target=follower.work)
    working.start()
    with closing(connect_plain(log.spec)) as connection:

        def erasable() -> bool:
            with suppress(Taken), erasure(connection, log.spec):
                return True
            return False

        try:
            wait_until(lambda: follower.beside.job == "reconcile")
            before = rounds()
            wait_until(lambda: rounds() > before + 1)
            assert not erasable()
            with recorded(follower.spec, "reconcile", {}):
                over.touch()  # and it is not due again
            wait_until(erasable)
        finally:
            stop.set()
            working.join()


@everywhere
def test_a_replay_that_waits_for_another_of_its_request_says_so(
    log: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    request = request_replay(log, uuid.uuid4())
    said: list[str] = []

    def wait() -> None:
        with alive(log.spec, request):
            said.append("over")

    def told() -> bool:
        said.append(capsys.readouterr().err)
        return bool(said[-1])

    waiting = threading.Thread(target=wait)
    with alive(log.spec, request):
        waiting.start()
        wait_until(told)
        assert "over" not in said
    waiting.join()

    assert f"lock of run {request}: another process holds it" in said[-2]
    assert said[-1] == "over"


def test_services_in_two_schemas_of_a_database_do_not_exclude_each_other(
    pg_log: Log,
) -> None:
    pg_log.execute("CREATE SCHEMA billing")
    pg_log.execute(
        "CREATE TABLE billing.django_txmsg_outboxmessage"
        " (LIKE django_txmsg_outboxmessage)"
    )
    other = replace(
        pg_log.spec, url=f"{pg_log.spec.url}?options=-csearch_path%3Dbilling"
    )
    same = replace(pg_log.spec, url=f"{pg_log.spec.url}?options=-csearch_path%3Dpublic")
    with (
        closing(connect_plain(pg_log.spec)) as connection,
        closing(connect_plain(other)) as billing,
        closing(connect_plain(same)) as again,
        erasure(connection, pg_log.spec),
    ):
        with erasure(billing, other):
            pass
        with pytest.raises(Taken), erasure(again, same):
            pass


def test_an_sqlite_database_has_one_lock_whatever_its_address(make_log) -> None:
    log: Log = make_log("sqlite")
    link = Path(f"{log.spec.path}-link")
    link.symlink_to(log.spec.path)
    linked = replace(log.spec, url=f"sqlite:///{link}")
    with closing(connect_plain(log.spec)) as connection:
        with (
            erasure(connection, log.spec),
            pytest.raises(Taken),
            storing(connection, linked),
        ):
            pass
        # The lock is free, although its file is left.
        with storing(connection, linked), storing(connection, log.spec):
            pass


def test_a_lock_file_that_cannot_be_opened_is_named(make_log) -> None:
    log: Log = make_log("sqlite")
    file = Path(f"{log.spec.path}.outbox-archive.lock")
    os.symlink("nowhere/lock", file)
    with (
        closing(connect_plain(log.spec)) as connection,
        pytest.raises(EnvironmentFault, match=rf"lock file .*{file.name} cannot"),
        archiving(connection, log.spec, "outbox"),
    ):
        pass
