"""`erase` deletes messages everywhere. `verify` reports whether the lake is
complete."""

from __future__ import annotations

import json
import uuid
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from django_txmsg import wire
from django_txmsg.spark.connection import connect_plain
from django_txmsg.spark.errors import EnvironmentFault, UsageError
from django_txmsg.spark.jobs.erase import (
    RELATIONS,
    erase_rows,
    erase_tails,
    messages_named,
)
from django_txmsg.spark.schemas import ATTEMPTS, DEAD_LETTERS, INBOX, OUTBOX
from django_txmsg.spark.spec import JobSpec, LakeSpec
from tests.sampling import sample
from tests.spark.archives import LOCKS, archive, delta_rows, path_of
from tests.spark.log import LONG_AGO, Log
from tests.spark.running import end, outcome, run, start

PERSON = "ann@example.org"
SECRET = "a-secret-of-anns"


def log_of_a_person(log: Log) -> uuid.UUID:
    """Store three messages in every table that can contain messages. Return the id of
    the message that is about a person. (Tests erase that message.)"""
    log.send_many(2)
    ann, session = uuid.uuid4(), uuid.uuid4()
    log.send(
        [{"message_id": ann, "key": PERSON, "body": SECRET.encode(),
          "headers": {"from": SECRET}, "last_error": SECRET, "session_id": session}]
    )  # fmt: skip
    # Two requests with their responses. The second is another person's.
    log.insert(
        "django_txmsg_idempotencykey",
        [{"caller": "user:1", "key": str(one), "fingerprint": "", "status_code": 201,
          "headers": json.dumps([["Location", SECRET]]), "body": SECRET.encode(),
          "session_id": one, "created_at": LONG_AGO}
         for one in (session, uuid.uuid4())],
    )  # fmt: skip
    log.receive([{"message_id": ann, "last_error": SECRET}])
    log.receive([{"message_id": uuid.uuid4()}])
    log.bury(
        [{"message_id": ann, "headers": {wire.KEY: PERSON}, "body": SECRET.encode(),
          "resolution": "discarded", "resolved_at": LONG_AGO}]
    )  # fmt: skip
    log.insert(
        "django_txmsg_attempt",
        [{"message_id": ann, "stage": "s", "number": 1, "worker": "", "duration": 1.0,
          "failed_at": LONG_AGO, "exception": SECRET, "traceback": SECRET,
          "fingerprint": ""}],
    )  # fmt: skip
    return ann


def test_archiver_that_has_lost_its_lock_brings_no_erased_message_back(
    spark, pg_log: Log, lake: LakeSpec
) -> None:
    pg_log.send_many(5)
    archive(None, pg_log, lake)
    erased = uuid.uuid4()
    pg_log.send([{"message_id": erased}])

    def erase(step: str) -> None:
        if step == "committing":
            pg_log.execute(f"SELECT pg_terminate_backend(pid) {LOCKS}")
            words = ["erase", "--message-id", str(erased)]
            assert run(JobSpec((pg_log.spec,), lake), *words)["messages"] == 1

    with pytest.raises(EnvironmentFault, match="has changed the lake meanwhile"):
        archive(None, pg_log, lake, on_step=erase)

    assert str(erased) not in delta_rows(lake)["message_id"].to_pylist()
    assert pg_log.count() == 0
    pg_log.send_many(5)
    archive(None, pg_log, lake)
    assert delta_rows(lake).num_rows == 10


@pytest.mark.parametrize("erased", ["before", "last"])
def test_erasing_a_predecessor_releases_its_followers(erased: str, log: Log) -> None:
    before, last = uuid.uuid4(), uuid.uuid4()
    log.receive(
        [{"message_id": last, "processed_at": None, "waits_for": before,
          "due_at": LONG_AGO.replace(year=9000), "waits_since": LONG_AGO,
          "after_at": LONG_AGO, "key": PERSON, "body": b"1",
          # A worker has claimed the row, and is about to release it.
          "lease_until": LONG_AGO.replace(year=9000), "lease_token": uuid.uuid4(),
          "headers": {wire.KEY: PERSON, wire.AFTER: f"{before};at=x", "a": "b"}}]
    )  # fmt: skip
    log.insert(
        "django_txmsg_keytail",
        [{"broker": "default", "destination": "d", "key": PERSON, "last_id": last,
          "last_at": 1}],
    )  # fmt: skip
    connection = connect_plain(log.spec)
    assert messages_named(connection, [PERSON], []) == {str(last)}
    one = str({"before": before, "last": last}[erased])
    erase_rows(connection, RELATIONS["inbox"], [one], dry_run=False)
    found = log.rows(
        "SELECT waits_for, lease_token, due_at, headers FROM django_txmsg_inboxmessage"
    )
    if erased == "last":
        assert found == []
    else:
        [(waits_for, token, due_at, headers)] = found
        assert (waits_for, token, str(due_at)[:4] < "9000") == (None, None, True)
        headers = json.loads(headers) if isinstance(headers, str) else headers
        assert headers == {wire.KEY: PERSON, "a": "b"}
    found = [erase_tails(connection, [PERSON], dry_run=dry) for dry in (True, False)]
    assert found == [1, 1]
    connection.close()
    assert log.count("django_txmsg_keytail") == 0


def add_undo(log: Log, request: uuid.UUID) -> None:
    """Store an open run that may undo a request."""
    log.insert(
        "django_txmsg_run",
        [{"id": 1, "run_id": uuid.uuid4(), "service": "shop", "flow": "f", "key": "",
          "version": 1, "state": "{}", "step": "s", "reads": "", "otherwise": "",
          "turn": uuid.uuid4(), "waits_for": "resume", "asked": "", "failing": False,
          "undos": 1, "answer": "", "answer_type": "", "outcome": "", "caller": {},
          "first_run": uuid.uuid4(), "hop": 0, "baggage": {}, "correlation_id": ""}],
    )  # fmt: skip
    log.insert(
        "django_txmsg_flowundo",
        [{"run_id": 1, "number": 1, "destination": "d", "body_type": "", "body": b"1",
          "cancels": False, "answered": False, "request_id": request}],
    )  # fmt: skip


def test_erase_waits_for_a_relay_that_may_be_sending_an_erased_message(
    log: Log,
) -> None:
    """Each of the messages has a state in which a relay may leave it."""
    later, token = LONG_AGO.replace(year=9000), uuid.uuid4()
    claimed, released, abandoned, waiting = ids = [uuid.uuid4() for _ in range(4)]
    lease = {"dispatched_at": None, "lease_token": token}
    log.send(
        [{"message_id": claimed, **lease, "lease_until": later},
         {"message_id": released, **lease, "lease_until": later},
         {"message_id": abandoned, **lease, "lease_until": LONG_AGO},
         {"message_id": waiting, "dispatched_at": None}]
    )  # fmt: skip
    words = [word for one in ids for word in ("--message-id", str(one))]
    erase = start(JobSpec((log.spec,)), "erase", *words)
    assert erase.stderr is not None
    assert any(b"Waiting for a relay" in line for line in erase.stderr)
    assert log.count() == 2
    log.insert(
        "django_txmsg_queuemessage",
        [{"queue": "d", "headers": {wire.MESSAGE_ID: str(claimed)}, "deliveries": 0,
          "body": SECRET.encode(), "enqueued_at": LONG_AGO, "available_at": LONG_AGO}],
    )  # fmt: skip
    for assign, one in (("dispatched_at = created_at, ", claimed), ("", released)):
        log.execute(
            f"UPDATE django_txmsg_outboxmessage SET {assign} lease_until = NULL,"
            " lease_token = NULL WHERE message_id = %s",
            one,
        )
    end(erase)
    assert [log.count(), log.count("django_txmsg_queuemessage")] == [0, 0]


def test_erase_leaves_a_sent_request_until_its_undo_need_not_wait(log: Log) -> None:
    """The undo of a foreign request is sent when the request has expired."""
    request, later = uuid.uuid4(), LONG_AGO.replace(year=9000)
    log.send([{"message_id": request, "expires_at": later}])
    add_undo(log, request)
    with closing(connect_plain(log.spec)) as connection:
        erase = partial(erase_rows, connection, RELATIONS["outbox"], [str(request)])

        assert not any(erase(dry_run=True).values())
        assert not any(erase(dry_run=False).values())
        log.execute("UPDATE django_txmsg_outboxmessage SET expires_at = created_at")
        assert sum(erase(dry_run=False).values()) == 1
        log.send([{"message_id": request, "expires_at": later, "dispatched_at": None}])
        assert sum(erase(dry_run=False).values()) == 1, "it must not be sent"


def test_erase_leaves_the_record_of_work_that_an_open_run_may_undo(log: Log) -> None:
    request, edited = uuid.uuid4(), uuid.uuid4()
    log.receive(
        [{"message_id": one, "correlation_id": PERSON} for one in (request, edited)]
    )
    log.bury(
        [{"message_id": request, "resolution": "replaced", "replaced_by": edited,
          "resolved_at": LONG_AGO}]
    )  # fmt: skip
    add_undo(log, request)
    with closing(connect_plain(log.spec)) as connection:
        ids = sorted(messages_named(connection, [], [PERSON]))
        assert ids == sorted([str(request), str(edited)])
        tables = [*RELATIONS["inbox"], *RELATIONS["dead_letters"]]
        erase = partial(erase_rows, connection, tables, ids)

        assert not any(erase(dry_run=True).values())
        assert not any(erase(dry_run=False).values())
        assert log.count("django_txmsg_inboxmessage") == 2
        log.execute("UPDATE django_txmsg_flowundo SET confirmed_at = created_at")
        assert sum(erase(dry_run=False).values()) == 3


def test_erase_reports_the_rows_that_it_leaves_for_an_open_run(
    spark: Any, log: Log
) -> None:
    request, other = uuid.uuid4(), uuid.uuid4()
    for one in (request, other):
        log.receive([{"message_id": one}])
    add_undo(log, request)
    words = ["erase", "--message-id", str(request), "--message-id", str(other)]
    spec = JobSpec((log.spec,))
    kept = {"django_txmsg_inboxmessage": 1}
    [line] = [
        f"  database: 1 rows of {name} stay, since an open run of a flow may need them:"
        " erase again when it has ended."
        for name in kept
    ]

    dry, done = outcome(spec, *words, "--dry-run"), outcome(spec, *words)
    log.execute("UPDATE django_txmsg_flowundo SET confirmed_at = created_at")
    again = outcome(spec, *words)

    assert [one.facts["kept"] for one in (dry, done, again)] == [kept, kept, {}]
    assert [line in one.lines for one in (dry, done, again)] == [True, True, False]


def test_erasing_a_person_includes_the_files(
    spark: Any, log: Log, lake: LakeSpec, tmp_path: Path
) -> None:
    ann = log_of_a_person(log)
    spec = JobSpec((log.spec,), lake)
    for table in (OUTBOX, INBOX, DEAD_LETTERS, ATTEMPTS):
        archive(spark, log, lake, table=table)
    run(spec, "sweep")
    # What came after the archive is in the database alone.
    log_of_a_person(log)
    log.insert(
        "django_txmsg_queuemessage",
        [{"queue": "d", "headers": {wire.MESSAGE_ID: str(ann)}, "deliveries": 0,
          "body": SECRET.encode(), "enqueued_at": LONG_AGO, "available_at": LONG_AGO}],
    )  # fmt: skip

    told = run(spec, "erase", "--key", PERSON, "--dry-run")
    done = run(spec, "erase", "--key", PERSON)

    assert told["counts"] == done["counts"]
    assert done["lake"] == {"outbox": 1, "inbox": 1, "attempts": 1, "dead_letters": 1}
    assert done["counts"]["messages"] == 2
    assert done["database"].pop("django_txmsg_idempotencykey") == 2
    assert set(done["database"].values()) == {1, 0}
    assert [delta_rows(lake, one).num_rows for one in (OUTBOX, INBOX)] == [2, 1]
    assert log.count() == 2
    # Keys stay, without the answers to ann's requests: one archived, one still here.
    answers = log.rows("SELECT body, headers FROM django_txmsg_idempotencykey")
    assert sorted(row[0] is None for row in answers) == [False, False, True, True]
    assert sorted(SECRET in str(row[1]) for row in answers) == [
        False, False, True, True,
    ]  # fmt: skip
    for name in ("inboxmessage", "deadletter", "attempt", "queuemessage"):
        left = {"inboxmessage": 1}.get(name, 0)
        assert log.count(f"django_txmsg_{name}") == left
    written = [path for path in tmp_path.glob("lake/**/*") if path.is_file()]
    hidden = (SECRET.encode(), PERSON.encode())
    assert not [p for p in written if any(one in p.read_bytes() for one in hidden)]
    # There is a record of it, which does not name the person.
    [options] = log.rows(
        "SELECT options FROM django_txmsg_pipelinerun WHERE job = 'erase'"
        " ORDER BY started_at DESC LIMIT 1"
    )
    assert "sha256:" in str(options[0])
    assert PERSON not in str(options[0])
    # Once more finds nothing, and what is left is whole and moves on.
    assert run(spec, "erase", "--key", PERSON)["rows"] == 0
    assert run(spec, "verify")["problems"] == []
    assert run(spec, "archive", "--older-than", "1d", "--no-vacuum")["rows"] == 3


@pytest.mark.parametrize(
    "services", [["shop"], pytest.param(["shop", "billing"], marks=pytest.mark.matrix)]
)
def test_a_failed_erasure_by_key_is_completed_by_the_next(
    spark: Any, log: Log, make_log, lake: LakeSpec, services: list[str], tmp_path: Path
) -> None:
    """The stored message has no key, since it came from another service: only a queued
    copy has one. The first erasure by this key deletes the copy, and then fails. A
    second erasure by the same key still finds the message, and erases it."""
    logs = [log, *(make_log(log.vendor, one) for one in services[1:])]
    foreign = uuid.uuid4()
    last = logs[-1]
    last.receive([{"message_id": foreign, "last_error": SECRET}])
    archive(spark, last, lake, table=INBOX)
    last.insert(
        "django_txmsg_attempt",
        [{"message_id": foreign, "stage": "s", "number": 1, "worker": "",
          "duration": 1.0, "failed_at": LONG_AGO, "exception": SECRET,
          "traceback": SECRET, "fingerprint": ""}],
    )  # fmt: skip
    last.insert(
        "django_txmsg_taskrun",
        [{"message_id": foreign, "workers": "[]", "result": json.dumps(SECRET),
          "created_at": LONG_AGO}],
    )  # fmt: skip
    log.insert(
        "django_txmsg_queuemessage",
        [{"queue": "d", "deliveries": 0, "body": SECRET.encode(),
          "headers": {wire.MESSAGE_ID: str(foreign), wire.KEY: PERSON},
          "enqueued_at": LONG_AGO, "available_at": LONG_AGO}],
    )  # fmt: skip
    spec = JobSpec(tuple(one.spec for one in logs), lake)
    forbid_deletion(last, "django_txmsg_taskrun")
    with pytest.raises(EnvironmentFault, match="not yet"):
        run(spec, "erase", "--key", PERSON)
    assert log.count("django_txmsg_queuemessage") == 0
    forbid_deletion(last, "django_txmsg_taskrun", no_more=True)

    told = run(spec, "erase", "--key", PERSON, "--dry-run")
    other = run(spec, "erase", "--key", "another")
    done = run(spec, "erase", "--key", PERSON)

    assert (told["messages"], other["messages"], done["messages"]) == (1, 0, 1)
    for name in ("attempt", "taskrun", "inboxmessage"):
        assert last.count(f"django_txmsg_{name}") == 0
    assert delta_rows(lake, INBOX).num_rows == 0
    written = [path for path in tmp_path.glob("lake/**/*") if path.is_file()]
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]
    # Erased everywhere: the records no longer name the message.
    options = log.rows(
        "SELECT options FROM django_txmsg_pipelinerun WHERE job = 'erase'"
    )
    assert len(options) == 4
    assert str(foreign) not in str(options)
    assert run(spec, "erase", "--key", PERSON)["messages"] == 0


def forbid_deletion(log: Log, relation: str, *, no_more: bool = False) -> None:
    """Make the database refuse to delete from a table. Pass no_more=True to allow it
    again."""
    if log.vendor == "sqlite":
        log.execute(
            "DROP TRIGGER forbidden"
            if no_more
            else f"CREATE TRIGGER forbidden BEFORE DELETE ON {relation} BEGIN"
            " SELECT RAISE(ABORT, 'not yet'); END"
        )
        return
    if no_more:
        log.execute(f"DROP TRIGGER forbidden ON {relation}")
        return
    log.execute(
        "CREATE OR REPLACE FUNCTION forbid() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE 'not yet'; END $$"
    )
    log.execute(
        f"CREATE TRIGGER forbidden BEFORE DELETE ON {relation}"
        " FOR EACH ROW EXECUTE FUNCTION forbid()"
    )


@pytest.mark.parametrize(
    ("words", "why"),
    [((), "Which messages"), (("--key", ""), "empty"),
     (("--key", PERSON, "--correlation-id", ""), "empty")],
)  # fmt: skip
def test_erase_needs_a_selection(
    words: tuple[str, ...], why: str, make_log, lake: LakeSpec
) -> None:
    log: Log = make_log("sqlite")
    log.send_many(3)  # none of them has a key, or a correlation id
    with pytest.raises(UsageError, match=why):
        run(JobSpec((log.spec,), lake), "erase", *words)
    assert log.count() == 3


@pytest.mark.parametrize(
    "options",
    ["[]", "null", '"x"', '{"message_ids": 5}', '{"message_ids": ["x"]}',
     '{"message_ids": [5]}'],
)  # fmt: skip
def test_a_record_that_was_changed_by_hand_is_named(
    options: str, spark: Any, log: Log, lake: LakeSpec
) -> None:
    """Somebody has changed the record of an earlier `erase`, so that the record cannot
    be read. The next `erase` fails with an error that names the record. It must not
    ignore the record: if the earlier run was killed, the record may list messages that
    are not erased yet."""
    spec = JobSpec((log.spec,), lake)
    record = run(spec, "erase", "--key", "another")["run"]
    log.execute("UPDATE django_txmsg_pipelinerun SET options = %s", options)

    with pytest.raises(EnvironmentFault, match=record):
        run(spec, "erase", "--key", PERSON)

    log.execute("UPDATE django_txmsg_pipelinerun SET options = '{}'")
    assert run(spec, "erase", "--key", PERSON)["messages"] == 0


HOSTILE = "50% of 'ä' \"%s\" \\ ü\u2028"


def test_queued_messages_and_task_results_are_erased(
    log: Log,
) -> None:
    keyed, correlated, other = (uuid.uuid4() for _ in range(3))
    headers = [
        {wire.MESSAGE_ID: str(keyed), wire.KEY: HOSTILE},
        {wire.MESSAGE_ID: str(correlated), wire.CORRELATION_ID: HOSTILE},
        {wire.MESSAGE_ID: str(other), wire.KEY: "50", wire.CORRELATION_ID: "50"},
        {wire.MESSAGE_ID: "of another kind", wire.KEY: HOSTILE},
    ]
    log.insert(
        "django_txmsg_queuemessage",
        [{"queue": "d", "headers": one, "deliveries": 0, "body": SECRET.encode(),
          "enqueued_at": LONG_AGO, "available_at": LONG_AGO} for one in headers],
    )  # fmt: skip
    log.insert(
        "django_txmsg_taskrun",
        [{"message_id": one, "workers": "[]", "result": json.dumps(SECRET),
          "created_at": LONG_AGO} for one in (keyed, other)],
    )  # fmt: skip

    connection = connect_plain(log.spec)
    ids = sorted(messages_named(connection, [HOSTILE], [HOSTILE]))
    erased: dict[str, int] = {}
    for name in ("attempts", "inbox", "outbox"):
        erased |= erase_rows(connection, RELATIONS[name], ids, dry_run=False)
    connection.close()

    assert ids == sorted(map(str, (keyed, correlated)))
    assert (erased["django_txmsg_queuemessage"], erased["django_txmsg_taskrun"]) == (
        2,
        1,
    )
    assert log.count("django_txmsg_queuemessage") == 2
    assert log.count("django_txmsg_taskrun") == 1


def test_messages_are_erased_by_id_and_by_correlation(
    spark: Any, make_log, lake: LakeSpec
) -> None:
    log: Log = make_log("sqlite")
    one, two, three = (uuid.uuid4() for _ in range(3))
    log.send([{"message_id": one}, {"message_id": two, "correlation_id": "c"}])
    log.receive([{"message_id": three, "correlation_id": "c"}])
    archive(spark, log, lake)
    spec = JobSpec((log.spec,), lake)

    done = run(spec, "erase", "--message-id", str(one), "--correlation-id", "c")

    assert done["messages"] == 3
    assert delta_rows(lake).num_rows == 0
    assert log.count("django_txmsg_inboxmessage") == 0


def test_queues_in_the_broker_s_own_database_are_erased(
    spark: Any, make_log, lake: LakeSpec
) -> None:
    log, broker = make_log("sqlite"), make_log("sqlite", "broker")
    named, keyed, other = (uuid.uuid4() for _ in range(3))
    log.send([{"message_id": named}])
    headers = [
        {wire.MESSAGE_ID: str(named)},
        {wire.MESSAGE_ID: str(keyed), wire.KEY: PERSON},
        {wire.MESSAGE_ID: str(other)},
    ]
    broker.insert(
        "django_txmsg_queuemessage",
        [{"queue": "d", "headers": one, "deliveries": 0, "body": SECRET.encode(),
          "enqueued_at": LONG_AGO, "available_at": LONG_AGO} for one in headers],
    )  # fmt: skip
    # These tables belong to another service.
    broker.send([{"message_id": other, "key": PERSON}])
    spec = JobSpec((log.spec,), lake, queues=(broker.spec,))
    words = ("erase", "--message-id", str(named), "--key", PERSON)

    told = run(spec, *words, "--dry-run")
    done = run(spec, *words)

    assert told["counts"] == done["counts"]
    assert done["messages"] == 2
    assert done["database"]["django_txmsg_queuemessage"] == 2
    assert broker.count("django_txmsg_queuemessage") == 1
    assert broker.count() == 1


def test_a_lake_as_it_was_archived_is_verified(
    spark: Any, log: Log, lake: LakeSpec
) -> None:
    log.send_many(250, every=900.0)
    archive(spark, log, lake)
    spec = JobSpec((log.spec,), lake)

    assert run(spec, "verify")["problems"] == []
    run(spec, "sweep", "--replaced-older-than", "0s")
    facts = run(spec, "verify")

    assert (facts["problems"], facts["exit_code"], facts["rows"]) == ([], 0, 250)


@pytest.mark.parametrize(
    "harm", list(sample(["changed", "gone", "cut", "twice", "live"]))
)
def test_what_is_wrong_with_a_lake_is_named(
    spark: Any, make_log, lake: LakeSpec, harm: str
) -> None:
    log: Log = make_log("sqlite")
    log.send_many(30)
    archive(spark, log, lake)
    table = DeltaTable(path_of(lake))
    [file] = [path_of(lake) / one for one in table.file_uris()]
    if harm == "gone":
        file.unlink()
    elif harm == "cut":
        file.write_bytes(file.read_bytes()[:100])
    elif harm == "changed":
        table.update(updates={"key": "'forged'"}, predicate="id = 7")
    elif harm == "twice":
        row = table.to_pyarrow_table(filters=[("id", "=", 7)])
        from deltalake import write_deltalake

        write_deltalake(table, row, mode="append")
    else:
        row = table.to_pyarrow_table(filters=[("id", "=", 7)]).to_pylist()[0]
        log.send([{"id": 7, "message_id": uuid.UUID(row["message_id"])}])

    done = outcome(JobSpec((log.spec,), lake), "verify")

    assert done.exit_code == 4
    said = json.dumps(done.facts["problems"])
    words = {
        "gone": file.name, "cut": file.name, "changed": "batch 1", "twice": "twice",
        "live": "is in the database, too",
    }  # fmt: skip
    assert words[harm] in said


def test_a_damaged_file_of_results_is_named(
    spark: Any, make_log, lake: LakeSpec
) -> None:
    log: Log = make_log("sqlite")
    spec = JobSpec((log.spec,), lake)
    run(spec, "archive", "--older-than", "1d")
    [file] = path_of(lake).with_name("runs").glob("service=*/day=*/*.parquet")
    file.write_bytes(file.read_bytes()[:100])

    done = outcome(spec, "verify")

    [problem] = done.facts["problems"]
    assert (done.exit_code, file.name in problem) == (4, True)
