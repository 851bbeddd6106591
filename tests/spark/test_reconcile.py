"""`reconcile` on real message logs. The tests check which messages it judges, which
findings are new, and that no writer is blocked."""

from __future__ import annotations

import datetime as dt
import uuid
from dataclasses import replace
from typing import Any

import pytest

from django_txmsg import send_message
from django_txmsg.envelope.message import Message
from django_txmsg.management.commands.pipeline import job_spec
from django_txmsg.models import InboxMessage
from django_txmsg.spark.cli import parsed
from django_txmsg.spark.errors import EnvironmentFault, UsageError
from django_txmsg.spark.jobs import reconcile
from django_txmsg.spark.jobs.journeys import looked_at
from django_txmsg.spark.jobs.reading import WholeLog
from django_txmsg.spark.jobs.sweep import sweep_command
from django_txmsg.spark.noted import Noted
from django_txmsg.spark.runs import Run
from django_txmsg.spark.schemas import OUTBOX, Table
from django_txmsg.spark.spec import JobSpec, LakeSpec, SourceSpec, Subscription
from django_txmsg.spark.transforms.journeys import SENT
from tests.running import IMPATIENT, declared, send, step
from tests.spark.archives import archive, delta_rows
from tests.spark.conftest import committing
from tests.spark.log import Log
from tests.spark.running import but, outcome, run

UTC = dt.timezone.utc
NOW = dt.datetime.now(UTC)
HOUR, DAY = dt.timedelta(hours=1), dt.timedelta(days=1)
SECOND = dt.timedelta(seconds=1)
JUDGE = ("reconcile", "--grace", "0s")
PARKED = {
    "created_at": NOW - 10 * DAY,
    "processed_at": None,
    "headers": {},
    "body": b"",
}


def ids(count: int) -> list[uuid.UUID]:
    return [uuid.uuid4() for _ in range(count)]


@pytest.mark.matrix
def test_a_message_sent_again_is_judged_by_its_first_receipt_too(
    spark, log: Log, lake: LakeSpec
) -> None:
    messages, long_ago = ids(3), NOW - 30 * 24 * HOUR
    log.send([{"message_id": one, "created_at": long_ago} for one in messages])
    log.receive(
        [
            {"message_id": one, "first_received_at": long_ago, "deliveries": 2}
            for one in messages
        ]
    )
    log.send(
        [
            {"message_id": one, "created_at": NOW - HOUR, "replay_id": "again"}
            for one in messages
        ]
    )

    facts = run(JobSpec((log.spec,), lake), *JUDGE, "--since", "7d")

    assert facts["counts"] == {"redelivered_deduplicated": 3}
    assert facts["exit_code"] == 0


@pytest.mark.matrix
def test_subscription_dates_outlive_the_lakes_retention(
    spark, make_log, lake: LakeSpec
) -> None:
    log: Log = make_log("sqlite")
    topic = "topic:orders.placed"
    log.send([{"destination": topic, "created_at": NOW - HOUR}])

    def lost(*stages: str) -> int:
        declared = tuple(Subscription(topic, "shop", one) for one in stages)
        spec = JobSpec((log.spec,), lake, subscriptions=declared)
        return run(spec, *JUDGE)["counts"].get("never_received", 0)

    assert lost("old") == 1
    assert lost("old", "new") == 1
    # Everything that these runs have noted is of a day past.
    sweep = but(parsed(["sweep"]), keep=dt.timedelta(days=-2))
    sweep_command(JobSpec((log.spec,), lake), sweep, Run("sweep", {}))
    assert lost("old", "new") == 1


@pytest.mark.matrix
def test_a_finding_is_written_when_it_comes_and_when_it_goes(
    spark, make_log, lake: LakeSpec
) -> None:
    log: Log = make_log("sqlite")
    spec = JobSpec((log.spec,), lake)
    [lost, other] = ids(2)
    log.send([{"message_id": lost, "created_at": NOW - 3 * HOUR}])

    def journal() -> list[tuple[str, str]]:
        rows = delta_rows(lake, Table("verdicts", "", "", (), "", ("",))).to_pylist()
        ordered = sorted(rows, key=lambda row: (row["recorded_at"], row["change"]))
        return [(row["message_id"], row["change"]) for row in ordered]

    first = run(spec, *JUDGE)["run"]
    run(spec, *JUDGE)
    assert journal() == [(str(lost), "found")]
    log.send([{"message_id": other, "created_at": NOW - 2 * HOUR}])
    log.receive([{"message_id": lost, "first_received_at": NOW - 3 * HOUR}])
    # A run looks for the messages of all findings, however long ago they were sent.
    run(spec, *JUDGE, "--since", "150m")
    changed = [(str(lost), "found"), (str(other), "found"), (str(lost), "gone")]
    assert journal() == changed
    run(spec, *JUDGE)
    assert journal() == changed
    # A replay chooses what its run had found, and the last one what stands.
    words = ("replay", "--verdict", "never_received", "--dry-run")
    assert run(spec, *words)["chosen"] == 1
    [chosen] = outcome(spec, *words, "--run", first).facts["sample"]
    assert chosen["message_id"] == str(lost)


@pytest.mark.parametrize("archived", [False, True])
def test_an_old_finding_is_gone_when_its_message_is_repaired(
    spark, log: Log, lake: LakeSpec, archived: bool
) -> None:
    """Three messages were lost three days ago. One is replayed, and one arrives late.
    The third is still lost."""
    spec, [again, late, lost] = JobSpec((log.spec,), lake), ids(3)
    sent = [{"message_id": one, "created_at": NOW - 72 * HOUR} for one in (again, late)]
    log.send([*sent, {"message_id": lost, "created_at": NOW - 72 * HOUR}])
    if archived:
        run(spec, "archive", "--older-than", "1d", "--no-vacuum")
    assert run(spec, *JUDGE)["counts"] == {"never_received": 3}
    log.send([{"message_id": again, "created_at": NOW - 2 * HOUR, "replay_id": "r"}])
    log.receive(
        [
            {"message_id": one, "created_at": NOW - 72 * HOUR,
             "first_received_at": NOW - 2 * HOUR}
            for one in (again, late)
        ]
    )  # fmt: skip

    counts = run(spec, *JUDGE, "--since", "24h")["counts"]

    assert counts == {"late": 2, "never_received": 1}
    words = ("replay", "--verdict", "never_received", "--dry-run")
    [chosen] = outcome(spec, *words).facts["sample"]
    assert chosen["message_id"] == str(lost)
    [found] = run(spec, "findings", "--verdict", "never_received")["findings"]
    assert found["message_id"] == str(lost)


@pytest.mark.parametrize(("messages", "with_lake"), [(20, True), (25, False)])
def test_since_judges_all_messages_if_there_are_too_many_findings(
    spark, make_log, lake: LakeSpec, messages: int, with_lake: bool, monkeypatch
) -> None:
    """Each message has two findings, so there are more findings than messages. Without
    a lake, only the worst findings of the first run are known."""
    log: Log = make_log("sqlite")
    topic, lost = "topic:orders.placed", ids(messages)
    monkeypatch.setattr(reconcile, "MOST", 20)
    listeners = tuple(Subscription(topic, "shop", one) for one in ("a", "b"))
    kept = lake if with_lake else None
    spec = JobSpec((log.spec,), kept, subscriptions=listeners)
    of_all = {"destination": topic, "created_at": NOW - 72 * HOUR}
    log.send([{**of_all, "message_id": one} for one in lost])
    log.receive(
        [{**of_all, "message_id": one, "stage": "a",
          "first_received_at": NOW - 48 * HOUR} for one in lost]
    )  # fmt: skip
    found = {"late": messages, "never_received": messages}
    assert run(spec, *JUDGE)["counts"] == found

    assert run(spec, *JUDGE, "--since", "24h")["counts"] == found


def test_a_delayed_message_of_a_renamed_stage_is_not_lost(spark, make_log) -> None:
    log: Log = make_log("sqlite")
    topic, [prompt, delayed] = "topic:orders.placed", ids(2)
    stages = (Subscription(topic, "shop", "new"),)
    sent, due, early = NOW - 30 * HOUR, NOW - 3 * HOUR, NOW - 40 * HOUR
    log.send([{"message_id": prompt, "destination": topic, "created_at": early}])
    log.send([{"message_id": delayed, "destination": topic, "created_at": sent,
               "due_at": due, "dispatched_at": due}])  # fmt: skip
    log.receive(
        [{"message_id": one, "destination": topic, "stage": "old", "created_at": stored,
          "first_received_at": received + SECOND}
         for one, stored, received in ((prompt, early, early), (delayed, sent, due))]
    )  # fmt: skip

    facts = run(JobSpec((log.spec,), subscriptions=stages), *JUDGE)

    assert facts["counts"] == {"ok": 2}


def test_a_delayed_message_is_judged_when_it_was_due(spark, log: Log) -> None:
    [lost, received, waited] = ids(3)
    delayed = {"created_at": NOW - 90 * HOUR, "due_at": NOW - 3 * HOUR,
               "dispatched_at": NOW - 3 * HOUR}  # fmt: skip
    # The relay was down for days.
    late = {"created_at": NOW - 90 * HOUR, "dispatched_at": NOW - 3 * HOUR}
    log.send([{"message_id": lost, **delayed}, {"message_id": received, **delayed}])
    log.send([{"message_id": waited, **late}, {"created_at": NOW - 90 * HOUR}])
    log.receive(
        [{"message_id": received, "created_at": NOW - 90 * HOUR,
          "first_received_at": NOW - 3 * HOUR}]
    )  # fmt: skip

    counts = run(JobSpec((log.spec,)), *JUDGE, "--since", "24h")["counts"]

    assert counts == {"never_received": 2, "ok": 1}


def test_since_judges_the_edited_copies_of_old_dead_letters(spark, log: Log) -> None:
    """One copy waits at its stage for too long. The other was made three days ago, and
    died an hour ago."""
    spec, [original, waits, other, died] = JobSpec((log.spec,)), ids(4)
    old = {"message_created_at": NOW - 10 * DAY}
    replaced = {**old, "created_at": NOW - 9 * DAY, "resolution": "replaced"}
    log.bury(
        [{"message_id": original, "replaced_by": waits, **replaced,
          "resolved_at": NOW - 8 * HOUR},
         {"message_id": other, "replaced_by": died, **replaced,
          "resolved_at": NOW - 3 * DAY},
         {"message_id": died, **old, "created_at": NOW - HOUR}]
    )  # fmt: skip
    log.receive([{"message_id": waits, "first_received_at": NOW - 8 * HOUR,
                  **PARKED, "due_at": NOW - 8 * HOUR},
                 {"message_id": died, "first_received_at": NOW - 3 * DAY,
                  "created_at": NOW - 10 * DAY, "dead_at": NOW - HOUR}])  # fmt: skip

    for _ in range(2):
        counts = run(spec, *JUDGE, "--since", "24h")["counts"]
        assert counts == {"not_processed": 1, "dead": 1}


def test_since_judges_a_dead_letter_that_was_redelivered(spark, log: Log) -> None:
    spec, [message] = JobSpec((log.spec,)), ids(1)
    stored = NOW - 10 * DAY
    log.send([{"message_id": message, "created_at": stored}])
    log.receive([{"message_id": message, "first_received_at": stored,
                  **PARKED, "due_at": NOW - HOUR}])  # fmt: skip
    log.bury(
        [{"message_id": message, "message_created_at": stored, "created_at": stored,
          "resolution": "redelivered", "resolved_at": NOW - HOUR}]
    )  # fmt: skip
    since = (*JUDGE, "--since", "24h")
    assert run(spec, *since)["counts"] == {"in_flight": 1}

    log.execute(
        "UPDATE django_txmsg_inboxmessage SET due_at = NULL, headers = NULL,"
        " body = NULL, dead_at = last_received_at"
    )
    log.execute(
        "UPDATE django_txmsg_deadletter SET resolution = 'open', created_at ="
        " resolved_at, resolved_at = NULL"
    )
    assert run(spec, *since)["counts"] == run(spec, *JUDGE)["counts"] == {"dead": 1}


def test_since_judges_a_redelivered_message_whose_dead_letter_is_archived(
    spark, log: Log, lake: LakeSpec
) -> None:
    """The broker has lost the message after its redelivery."""
    [message] = ids(1)
    spec = JobSpec((log.spec,), lake)
    stored = NOW - 10 * DAY
    log.send([{"message_id": message, "created_at": stored}])
    log.receive([{"message_id": message, "first_received_at": stored, **PARKED}])
    log.bury(
        [{"message_id": message, "message_created_at": stored, "created_at": stored,
          "resolution": "redelivered", "resolved_at": NOW - 20 * HOUR}]
    )  # fmt: skip
    words = ("archive", "--table", "dead_letters", "--older-than", "12h")
    run(spec, *words, "--no-vacuum")
    assert log.count("django_txmsg_deadletter") == 0

    assert run(spec, *JUDGE, "--since", "24h")["counts"] == {"not_processed": 1}


def test_since_judges_an_old_message_whose_next_attempt_is_overdue(
    spark, log: Log
) -> None:
    """Each failed attempt makes the message due later."""
    spec, [message] = JobSpec((log.spec,)), ids(1)
    stored = NOW - 10 * DAY
    log.send([{"message_id": message, "created_at": stored}])
    log.receive([{"message_id": message, "first_received_at": stored,
                  **PARKED, "due_at": NOW - 10 * HOUR}])  # fmt: skip
    since = (*JUDGE, "--since", "24h")
    found = {"not_processed": 1}
    assert run(spec, *since)["counts"] == run(spec, *JUDGE)["counts"] == found


def test_since_judges_an_old_dead_letter_that_was_restored(spark, log: Log) -> None:
    spec, [message] = JobSpec((log.spec,)), ids(1)
    stored = NOW - 10 * DAY
    log.send([{"message_id": message, "created_at": stored}])
    log.receive([{"message_id": message, "first_received_at": stored,
                  "created_at": stored, "processed_at": None,
                  "dead_at": stored}])  # fmt: skip
    log.bury(
        [{"message_id": message, "message_created_at": stored, "created_at": stored}]
    )
    since = (*JUDGE, "--since", "24h")
    assert run(spec, *since)["counts"] == {"dead": 1}


def test_a_run_records_up_to_when_it_has_judged_which_services(spark, make_log) -> None:
    shop, payments = make_log("sqlite"), make_log("sqlite", "payments")
    both = JobSpec((shop.spec, payments.spec))
    words = ("reconcile", "--stuck-after", "1h", "--grace")

    def judged(*services: str) -> float:
        until = Noted(shop.spec).judged_until(services)
        return 0 if until is None else round((NOW - until) / HOUR)

    run(both, *words, "9h")
    assert (judged("shop", "payments"), judged("mails")) == (9, 0)
    run(JobSpec((shop.spec,)), *words, "2h")
    assert (judged("shop", "payments"), judged("shop")) == (9, 2)


@pytest.mark.parametrize("with_lake", [True, False])
def test_a_finding_that_comes_back_is_new(
    spark, log: Log, lake: LakeSpec, with_lake: bool
) -> None:
    spec, [message] = JobSpec((log.spec,), lake if with_lake else None), ids(1)
    fails = (*JUDGE, "--fail-on", "new")
    log.send([{"message_id": message, "created_at": NOW - 3 * HOUR}])
    assert run(spec, *fails)["exit_code"] == 1
    run(spec, "findings", "--all", "--acknowledge", "replayed by hand")
    log.receive([{"message_id": message, "first_received_at": NOW - 3 * HOUR}])
    assert run(spec, *JUDGE)["counts"] == {"ok": 1}
    log.execute("DELETE FROM django_txmsg_inboxmessage")

    back = run(spec, *fails)

    assert (back["exit_code"], back["new"]) == (1, {"never_received": 1})
    [found] = run(spec, "findings")["findings"]
    assert (found["acknowledged_at"], found["note"]) == (None, "")
    assert run(spec, *fails)["exit_code"] == 0


def test_a_finding_of_a_run_without_an_end_is_new(
    spark, make_log, lake: LakeSpec
) -> None:
    """The first run has stored its findings in the lake, and fails before its end."""
    log: Log = make_log("sqlite")
    spec, fails = JobSpec((log.spec,), lake), (*JUDGE, "--fail-on", "new")
    log.send([{"created_at": NOW - 3 * HOUR}])
    log.execute(
        "CREATE TRIGGER refusal BEFORE INSERT ON django_txmsg_finding"
        " BEGIN SELECT RAISE(ABORT, 'refused'); END"
    )
    with pytest.raises(EnvironmentFault, match="refused"):
        run(spec, *fails)
    log.execute("DROP TRIGGER refusal")

    assert run(spec, *fails)["new"] == {"never_received": 1}
    again = run(spec, *fails)
    assert (again["new"], again["exit_code"]) == ({}, 0)


@pytest.mark.matrix
def test_a_listener_of_another_service_is_retired_by_hand(
    spark, make_log, lake: LakeSpec
) -> None:
    log: Log = make_log("sqlite")
    topic = "topic:orders.placed"
    spec = JobSpec((log.spec,), lake)
    [early, late] = ids(2)
    log.send(
        [
            {"message_id": one, "destination": topic, "created_at": NOW - hours * HOUR}
            for one, hours in ((early, 5), (late, 2))
        ]
    )
    log.receive(
        [{"message_id": early, "stage": "old", "destination": topic,
          "first_received_at": NOW - 5 * HOUR}]
    )  # fmt: skip
    assert run(spec, *JUDGE)["counts"] == {"ok": 1, "never_received": 1}

    words = ("listeners", "--retire", topic, "shop/old", "--at", "3h")
    assert run(spec, *words)["rows"] == 1

    facts = run(spec, *JUDGE)
    assert facts["counts"] == {"ok": 1}
    assert [one["consumer"] for one in facts["retired"]] == ["shop/old"]
    [listed] = run(spec, "listeners")["listeners"]
    assert listed["until"] is not None
    with pytest.raises(UsageError, match="no listener"):
        run(spec, "listeners", "--retire", "orders.place", "shop/old")


def test_a_listener_that_no_run_has_recorded_is_owed_no_message(
    spark, make_log, lake: LakeSpec
) -> None:
    log: Log = make_log("sqlite")
    topic = "topic:orders.placed"
    [one] = ids(1)
    log.send([{"message_id": one, "destination": topic, "created_at": NOW - 5 * HOUR}])
    log.receive(
        [{"message_id": one, "stage": "stock", "destination": topic,
          "first_received_at": NOW - 5 * HOUR}]
    )  # fmt: skip
    spec = JobSpec((log.spec,), lake)
    assert run(spec, *JUDGE)["counts"] == {"ok": 1}

    words = ("listeners", "--retire", topic, "shop/none")
    told = outcome(spec, *words)

    assert told.lines[0].startswith("No run has recorded that shop/none receives from")
    assert run(spec, *JUDGE)["counts"] == {"ok": 1}
    declares = replace(spec, subscriptions=(Subscription(topic, "shop", "stock"),))
    with pytest.raises(UsageError, match="declares its stages"):
        run(declares, "listeners", "--retire", topic, "shop/nothing")


@pytest.mark.matrix
def test_two_databases_of_a_service_are_one_log(
    spark, make_log, lake: LakeSpec
) -> None:
    """A service sends a message from one of its databases to the other, and both
    receive a topic's message. No verdict reports a fault, whether the rows are live or
    archived."""
    one, other = make_log("sqlite"), make_log("sqlite", "shop_other")
    topic = "topic:orders.placed"
    sent, told = ids(2)
    one.send([{"message_id": sent, "created_at": NOW - 3 * HOUR},
              {"message_id": told, "destination": topic,
               "created_at": NOW - 3 * HOUR}])  # fmt: skip
    other.receive([{"message_id": sent, "first_received_at": NOW - 3 * HOUR}])
    for log, stage in ((one, "a"), (other, "b")):
        log.receive([{"message_id": told, "stage": stage, "destination": topic,
                      "id": 77, "first_received_at": NOW - 3 * HOUR}])  # fmt: skip
    spec = JobSpec((one.spec, replace(other.spec, service="shop")), lake)

    assert run(spec, *JUDGE)["counts"] == {"ok": 3}
    for log in (one, other):
        source = JobSpec((replace(log.spec, service="shop"),), lake)
        run(source, "archive", "--older-than", "1h", "--table", "inbox", "--no-vacuum")
        assert run(spec, *JUDGE)["counts"] == {"ok": 3}


@pytest.mark.matrix
def test_unacknowledged_findings_set_the_exit_code(
    spark, make_log, lake: LakeSpec
) -> None:
    log: Log = make_log("sqlite")
    spec = JobSpec((log.spec,), lake)
    acknowledge = ("findings", "--all", "--acknowledge", "the <b>supplier</b> was down")
    log.send([{"created_at": NOW - 3 * HOUR}])

    first = run(spec, *JUDGE)
    same = run(spec, *JUDGE, "--fail-on", "new")
    assert run(spec, *acknowledge)["rows"] == 1
    log.send([{"created_at": NOW - 2 * HOUR}])
    later = run(spec, *JUDGE)

    assert [one["exit_code"] for one in (first, same, later)] == [1, 0, 1]
    assert [one["new"] for one in (first, same, later)] == [
        {"never_received": 1}, {}, {"never_received": 1},
    ]  # fmt: skip
    assert [one["unacknowledged"] for one in (first, same, later)] == [
        {"never_received": 1}
    ] * 3
    assert [one["counts"]["never_received"] for one in (first, same, later)] == [
        1, 1, 2,
    ]  # fmt: skip
    assert [bool(one["known_since"]) for one in same["examples"]] == [True]
    assert [bool(one["known_since"]) for one in later["examples"]] == [False]
    assert run(spec, *acknowledge)["rows"] == 1
    # A place that something else consumes is said once, and asked for no more.
    log.send([{"destination": "erp", "created_at": NOW - HOUR}])
    told = run(spec, *JUDGE, "--external", "erp")
    assert told["exit_code"] == 0
    assert told["counts"] == {"never_received": 2, "external": 1}
    [one, two] = run(spec, "findings", "--all")["findings"]
    assert one["note"] == two["note"] == "the <b>supplier</b> was down"
    assert one["found_at"] > two["found_at"]
    assert one["seen_at"] == two["seen_at"]


def test_a_finding_that_early_releases_left_alone_is_judged_again(
    spark, make_log
) -> None:
    log: Log = make_log("sqlite")
    spec = JobSpec((log.spec,))
    log.send([{"created_at": NOW - 3 * DAY}])
    assert run(spec, *JUDGE)["new"] == {"never_received": 1}
    log.execute("UPDATE django_txmsg_finding SET seen_at = '2026-03-01 12:00:00'")

    facts = run(spec, *JUDGE, "--since", "24h")

    assert (facts["counts"], facts["new"]) == ({"never_received": 1}, {})


def test_a_renamed_service_keeps_its_history(spark, make_log, lake: LakeSpec) -> None:
    """`shipping` has archived, and is now `delivery`. Its batches go on, and the jobs
    find its rows under both names."""
    shop, other = make_log("sqlite"), make_log("sqlite", "shipping")
    to, back, told, more = ids(4)
    topic = "topic:orders.placed"

    def sent(log: Log, one: uuid.UUID, destination: str = "orders.place") -> None:
        log.send([{"message_id": one, "destination": destination, "key": "k",
                   "created_at": NOW - DAY}])  # fmt: skip

    def got(log: Log, one: uuid.UUID, **values: Any) -> None:
        log.receive([{"message_id": one, "first_received_at": NOW - DAY, **values}])

    def archived(source: SourceSpec, lake: LakeSpec) -> None:
        run(JobSpec((source,), lake), "archive", "--older-than", "1h", "--no-vacuum")

    sent(shop, to)
    got(other, to)
    sent(shop, told, topic)
    got(other, told, stage="note", destination=topic)
    sent(other, back)
    got(shop, back, service="shipping")
    declared = (Subscription(topic, "shipping", "note"),)
    spec = JobSpec((shop.spec, other.spec), lake, subscriptions=declared)
    assert run(spec, *JUDGE)["counts"] == {"ok": 3}
    for log in (shop, other):
        archived(log.spec, lake)

    source = replace(other.spec, service="delivery")
    renamed = replace(lake, former={"shipping": "delivery"})
    declared = (Subscription(topic, "delivery", "note"),)
    spec = JobSpec((shop.spec, source), renamed, subscriptions=declared)
    with WholeLog(spark, spec) as log_of_all:
        assert looked_at(log_of_all, "inbox").batches == {"shop": 1, "delivery": 1}
    assert run(spec, *JUDGE)["counts"] == {"ok": 3}
    sent(other, more)
    got(shop, more, service="delivery")
    archived(source, renamed)
    assert run(spec, *JUDGE)["counts"] == {"ok": 4}
    alone = JobSpec((source,), lake)
    own = ("--former", "delivery=shipping")
    assert run(alone, "verify", *own)["problems"] == []
    # Of its outbox `back` and `more` are left, under two names.
    assert run(alone, "erase", "--key", "k", *own)["lake"]["outbox"] == 2


@pytest.mark.parametrize("judged_before", [False, True])
def test_the_clock_of_a_renamed_sender_makes_no_message_late(
    make_log, lake: LakeSpec, judged_before: bool
) -> None:
    """The receiver's clock is two hours ahead. The sender was called `store`, so its
    receipts, and journeys that are older than the new name, name it so."""
    shop, payments = make_log("sqlite"), make_log("sqlite", "payments")
    times = {one: NOW - DAY + n * HOUR for n, one in enumerate(ids(4))}
    shop.send([{"message_id": one, "created_at": at} for one, at in times.items()])
    payments.receive(
        [{"message_id": one, "created_at": at, "first_received_at": at + 2 * HOUR,
          "service": "store"} for one, at in times.items()]
    )  # fmt: skip
    if judged_before:
        spec = JobSpec((replace(shop.spec, service="store"), payments.spec), lake)
        for source in spec.services:
            run(JobSpec((source,), lake), "archive", "--older-than", "1h")
        assert run(spec, *JUDGE)["counts"] == {"ok": 4}

    renamed = replace(lake, former={"store": "shop"})
    facts = run(JobSpec((shop.spec, payments.spec), renamed), *JUDGE)

    assert facts["counts"] == {"ok": 4}
    assert [one["sender"] for one in facts["clocks"]] == ["shop"]


@committing
def test_stages_without_inbox_rows_lose_nothing(spark, settings) -> None:
    """Stages of two modes record only redeliveries. The topic's stage fails at the
    first and at the last of three messages."""
    settings.TXMSG = IMPATIENT
    topic, turns = "topic:orders.placed", [ValueError(), None, None, ValueError(), None]

    def forward(message: Message) -> None:
        send_message("orders.next", message.body)

    def note(message: Message) -> None:
        if (error := turns.pop(0)) is not None:
            raise error

    with (
        declared(forward, "orders.place", transaction="broker_only") as first,
        declared(note, topic, name="note", transaction="best_effort_1pc") as listener,
        declared(lambda _: None, "orders.next") as last,
    ):
        step(listener)
        send("orders.place", {})
        step(first)
        step(last)
        for _ in range(3):
            send(topic, {})
            step(listener, times=2)
        assert turns == []
        assert InboxMessage.objects.filter(processed_at=None).count() == 0

        facts = run(job_spec("default"), *JUDGE)

    assert facts["destinations"] == {
        "orders.place": {"external": 1}, "orders.next": {"external": 1},
        topic: {"ok": 2, "external": 1},
    }  # fmt: skip


def test_while_logs_are_compared_no_transaction_is_open(
    spark, pg_log: Log, lake: LakeSpec
) -> None:
    pg_log.send_many(10)

    def held() -> int:
        return int(
            pg_log.value(
                "SELECT count(*) FROM pg_stat_activity WHERE backend_xmin IS NOT NULL"
                " AND datname = current_database() AND pid <> pg_backend_pid()"
            )
        )

    with WholeLog(spark, JobSpec((pg_log.spec,), lake)) as log:
        sent = log.read("outbox", SENT)
        assert held() == 1
        log.release()
        assert held() == 0
        pg_log.execute(f"DELETE FROM {OUTBOX.relation}")
        assert sent.count() == 10


@pytest.mark.parametrize(
    "purged", [True, pytest.param(False, marks=pytest.mark.matrix)]
)
def test_rows_are_compared_only_while_they_may_be_in_two_places(
    spark: Any, pg_log: Log, lake: LakeSpec, purged: bool
) -> None:
    pg_log.send_many(10)
    archive(spark, pg_log, lake)
    pg_log.send([{"created_at": NOW}])
    if not purged:
        pg_log.execute("UPDATE django_txmsg_archivemark SET purged_through = 0")

    with WholeLog(spark, JobSpec((pg_log.spec,), lake)) as log:
        sent = log.read("outbox", SENT)
        plan = sent._jdf.queryExecution().executedPlan().toString()

        assert ("Exchange" in plan) != purged
        assert sent.count() == 11


@pytest.mark.matrix
def test_a_replica_is_read_and_the_record_is_kept_where_one_can_write(
    spark, make_log
) -> None:
    log, replica = make_log("postgresql"), make_log("postgresql")
    replica.send_many(3)
    name = replica.spec.url.rpartition("/")[2]
    replica.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    source = replace(log.spec, reader_url=replica.spec.url)

    facts = run(JobSpec((source,)), *JUDGE)

    assert facts["counts"] == {"never_received": 3}
    assert log.count("django_txmsg_pipelinerun") == 1
    assert replica.count("django_txmsg_pipelinerun") == 0
