"""`reconcile` if services have pruned rows that no lake has."""

from __future__ import annotations

import datetime as dt
import uuid
from dataclasses import replace

import pytest

from django_txmsg.spark.spec import JobSpec, LakeSpec, Subscription
from tests.spark.log import Log
from tests.spark.running import outcome, run

NOW = dt.datetime.now(dt.timezone.utc)
DAY = dt.timedelta(days=1)
JUDGE = ("reconcile", "--grace", "0s")


def ids(count: int) -> list[uuid.UUID]:
    return [uuid.uuid4() for _ in range(count)]


def begin(log: Log, *, undoes: uuid.UUID | None = None) -> uuid.UUID:
    """Add an open run of a flow, which may undo a request. Return its id."""
    texts = ("key", "state", "step", "reads", "otherwise", "asked", "answer",
             "answer_type", "outcome", "correlation_id")  # fmt: skip
    run_id = uuid.uuid4()
    log.insert(
        "django_txmsg_run",
        [{**dict.fromkeys(texts, ""), "run_id": run_id, "first_run": run_id,
          "service": "payments", "flow": "pay", "version": 1, "turn": run_id,
          "waits_for": "resume", "failing": False, "undos": 0, "caller": {}, "hop": 0,
          "baggage": {}, "since": NOW, "created_at": NOW}]
    )  # fmt: skip
    log.insert(
        "django_txmsg_flowundo",
        [{"run_id": 1, "number": 1, "destination": "refund", "body": b"{}",
          "body_type": "", "request_id": undoes, "cancels": False, "answered": False,
          "created_at": NOW}]
    )  # fmt: skip
    return run_id


def test_no_verdict_where_the_receivers_inbox_is_pruned(
    spark, make_log, lake: LakeSpec
) -> None:
    """`shop` has all of its rows in a lake. `payments` has pruned its inbox before it
    archives into this lake, among others a dead message that was long in work."""
    shop, payments = make_log("sqlite"), make_log("sqlite", "payments")
    pruned, seen, lost, awaited, *told = ids(6)
    topic = "topic:orders.placed"
    listens = Subscription(topic, "payments", "payments.note")
    kept = {"outbox": 7, "inbox": 14}
    spec = JobSpec((shop.spec, payments.spec), lake, kept, (listens,))
    days = {pruned: 20, seen: 5, lost: 3, awaited: 20}
    stored = {one: {"message_id": one, "created_at": NOW - days[one] * DAY}
              for one in days}  # fmt: skip
    stored[awaited] |= {"dispatched_at": NOW - 2 * DAY, "due_at": NOW - 2 * DAY}
    shop.send([*stored.values(), *(
        {"message_id": one, "destination": topic, "created_at": NOW - age * DAY}
        for one, age in zip(told, (20, 3), strict=True)
    )])  # fmt: skip
    payments.receive(
        [{"id": 70, "first_received_at": NOW - 30 * DAY, "dead_at": NOW - 4 * DAY,
          "message_id": uuid.uuid4(), "destination": "mails", "service": "erp"},
         {"id": 90, "message_id": seen, "first_received_at": NOW - 5 * DAY}]
    )  # fmt: skip
    for log in (shop, payments):
        run(JobSpec((log.spec,), lake), "archive", "--older-than", "1d", "--no-vacuum")

    done = outcome(spec, *JUDGE)

    assert done.facts["destinations"] == {
        "orders.place": {"ok": 1, "never_received": 2}, topic: {"never_received": 1},
        "mails": {"unknown_sender": 1},
    }  # fmt: skip
    assert done.facts["not_judged"] == 2
    assert "  2 messages have no verdict: they are older" in "\n".join(done.lines)
    words = ("replay", "--verdict", "never_received", "--dry-run")
    assert run(spec, *words)["chosen"] == 3


def test_no_verdict_where_the_senders_outbox_is_pruned(spark, make_log) -> None:
    """Without a lake, the inbox has older messages than the outbox."""
    shop, payments = make_log("sqlite"), make_log("sqlite", "payments")
    pruned, dead, stranger = ids(3)
    payments.receive(
        [
            {"message_id": pruned, "first_received_at": NOW - 10 * DAY},
            {"message_id": dead, "first_received_at": NOW - 10 * DAY,
             "dead_at": NOW - 10 * DAY},
            {"message_id": stranger, "first_received_at": NOW - 3 * DAY},
        ]
    )  # fmt: skip
    kept = {"outbox": 7, "inbox": 14}

    for sender_first in (True, False):
        logs = (shop.spec, payments.spec)[:: 1 if sender_first else -1]
        facts = run(JobSpec(logs, retention=kept), *JUDGE)

        assert facts["counts"] == {"dead": 1, "unknown_sender": 1}
        assert facts["not_judged"] == 1


@pytest.mark.parametrize(
    ("pruned", "why"), [("outbox", "undo"), ("outbox", "unique"), ("inbox", "undo")]
)
def test_rows_that_are_kept_longer_do_not_show_that_others_were_kept(
    spark, make_log, pruned: str, why: str
) -> None:
    """A request that may be undone is kept in the outbox until it has expired, and in
    the inbox until the run has undone it or ended. A message that holds its unique key
    is kept in the outbox. All other rows of their age were pruned on one side."""
    shop, payments = make_log("sqlite"), make_log("sqlite", "payments")
    request, old, seen = ids(3)
    ages = {request: 25, old: 10, seen: 5}
    shop.send(
        [{"message_id": one, "created_at": NOW - age * DAY, "expires_at":
          NOW + 5 * DAY if (one, why) == (request, "undo") else None,
          "unique_until_processed": (one, why) == (request, "unique")}
         for one, age in ages.items()]
    )  # fmt: skip
    payments.receive(
        [{"message_id": one, "first_received_at": NOW - age * DAY}
         for one, age in ages.items()]
    )  # fmt: skip
    begin(payments, undoes=request if why == "undo" else None)
    log = shop if pruned == "outbox" else payments
    log.execute(f"DELETE FROM django_txmsg_{pruned}message WHERE id = 2")
    kept = {"outbox": 7, "inbox": 7}

    for shop_first in (True, False):
        logs = (shop.spec, payments.spec)[:: 1 if shop_first else -1]
        facts = run(JobSpec(logs, retention=kept), *JUDGE)

        assert (facts["counts"], facts["not_judged"]) == ({"ok": 2}, 1)


def test_a_message_that_has_started_a_run_is_kept_as_long_as_others(
    spark, make_log
) -> None:
    """`payments` has pruned its older messages. All that it has left have started
    runs."""
    shop, payments = make_log("sqlite"), make_log("sqlite", "payments")
    started, lost = begin(payments), uuid.uuid4()
    shop.send([{"message_id": one, "created_at": NOW - age * DAY}
               for one, age in ((started, 5), (lost, 3))])  # fmt: skip
    payments.receive([{"id": 7, "message_id": started,
                       "first_received_at": NOW - 5 * DAY}])  # fmt: skip
    spec = JobSpec((shop.spec, payments.spec), retention={"outbox": 7, "inbox": 7})

    assert run(spec, *JUDGE)["counts"] == {"ok": 1, "never_received": 1}


@pytest.mark.parametrize(
    ("vendor", "why"),
    [("sqlite", ""), ("postgresql", ""), ("sqlite", "dead"), ("postgresql", "undo")],
)
def test_no_verdict_where_the_receiver_has_pruned_all_rows(
    spark, make_log, vendor: str, why: str
) -> None:
    """The retention of `payments` is shorter than that of `shop`, but not shorter than
    a day. The first row may be left, since its message has a dead letter or may be
    undone. A third service has received messages, but has processed none."""
    shop, payments = make_log("sqlite"), make_log(vendor, "payments")
    mails = make_log(vendor, "mails")
    pruned, lost, open_one, left = ids(4)
    sent = {"created_at": NOW - 3 * DAY}
    shop.send(
        [{"message_id": pruned, **sent}, {"created_at": NOW - DAY / 2},
         *([{"message_id": left, **sent}] if why else ()),
         *({"message_id": one, "destination": "mails", **sent}
           for one in (lost, open_one))]
    )  # fmt: skip
    came = {"first_received_at": NOW - 3 * DAY}
    payments.receive(
        [{"message_id": left, **came} | ({"dead_at": NOW} if why == "dead" else {}),
         {"message_id": pruned, **came}]
    )  # fmt: skip
    if why == "undo":
        begin(payments, undoes=left)
    rest = "id > 1" if why else "true"
    payments.execute(f"DELETE FROM django_txmsg_inboxmessage WHERE {rest}")
    mails.receive([{"message_id": open_one, "first_received_at": NOW - 3 * DAY,
                    "destination": "mails", "processed_at": None}])  # fmt: skip
    kept = {"outbox": 7, "inbox": 14}
    stages = (Subscription("orders.place", "payments", "s"),)
    spec = JobSpec((shop.spec, payments.spec, mails.spec), None, kept, stages)

    facts = run(spec, *JUDGE)

    counts = {"never_received": 2, "not_processed": 1}
    counts |= {"dead": {"dead": 1}, "undo": {"ok": 1}}.get(why, {})
    assert (facts["counts"], facts["not_judged"]) == (counts, 1)


def test_a_database_without_rows_is_no_pruned_one_if_another_has_rows(
    spark, make_log
) -> None:
    """`payments` has two databases. One of them is in use no more, and was pruned.
    `mails` has never received a message, but its tests have emptied its tables."""
    shop, payments = make_log("sqlite"), make_log("sqlite", "payments")
    unused = replace(make_log("sqlite", "unused").spec, service="payments")
    mails = make_log("sqlite", "mails")
    seen, *lost = ids(3)
    shop.send([{"message_id": one, "destination": at, "created_at": NOW - 3 * DAY}
               for one, at in zip((seen, *lost), ("orders", "orders", "mails"),
                                  strict=True)])  # fmt: skip
    for log in (payments, Log(unused), mails):
        log.receive([{"message_id": seen, "destination": "orders",
                      "first_received_at": NOW - 3 * DAY}])  # fmt: skip
    for log in (Log(unused), mails):
        log.execute("DELETE FROM django_txmsg_inboxmessage")
    mails.execute("UPDATE sqlite_sequence SET seq = 0")
    stages = (Subscription("mails", "mails", "s"),)
    services = (shop.spec, payments.spec, unused, mails.spec)
    kept = {"outbox": 7, "inbox": 14}

    facts = run(JobSpec(services, None, kept, stages), *JUDGE)

    counts = {"ok": 1, "never_received": 2}
    assert (facts["counts"], facts["not_judged"]) == (counts, 0)


def test_a_pruned_sender_may_have_had_another_name(
    spark, make_log, lake: LakeSpec
) -> None:
    shop, payments = make_log("sqlite"), make_log("sqlite", "payments")
    payments.receive(
        [
            {"message_id": one, "first_received_at": NOW - 10 * DAY, "service": name}
            for one, name in zip(ids(2), ("shop", "store"), strict=True)
        ]
    )
    renamed = replace(lake, former={"store": "shop"})
    kept = {"outbox": 7, "inbox": 14}

    facts = run(JobSpec((shop.spec, payments.spec), renamed, kept), *JUDGE)

    assert (facts["counts"], facts["not_judged"]) == ({}, 2)


def test_a_new_service_has_lost_what_was_sent_before_its_first_message(
    spark, make_log, lake: LakeSpec
) -> None:
    """The first row of all may be in the lake."""
    shop, payments = make_log("sqlite"), make_log("sqlite", "payments")
    lost, *seen = ids(3)
    shop.send([{"message_id": lost, "created_at": NOW - 5 * DAY}])
    shop.send([{"message_id": one, "created_at": NOW - DAY} for one in seen])
    # One statement has marked both as processed.
    payments.receive(
        [{"message_id": one, "first_received_at": NOW - DAY} for one in seen]
    )
    kept = {"outbox": 7, "inbox": 14}

    spec = JobSpec((shop.spec, payments.spec), lake, kept)
    for archived in (None, shop, payments):
        if archived is not None:
            run(JobSpec((archived.spec,), lake), "archive", "--older-than", "1h")
        facts = run(spec, *JUDGE, "--dry-run")
        assert facts["counts"] == {"ok": 2, "never_received": 1}


def test_the_first_batch_may_have_no_row_that_shows_what_was_kept(
    spark, make_log, lake: LakeSpec
) -> None:
    """The first message of `payments` came twice, and the first one of `shop` expires.
    Each was archived alone."""
    shop, payments = make_log("sqlite"), make_log("sqlite", "payments")
    first, second, lost, recent, stranger = ids(5)
    ages = {first: 40, second: 30, lost: 20, recent: 5}
    stored = [
        {"message_id": one, "created_at": NOW - age * DAY, "expires_at":
         NOW - 39 * DAY if one == first else None} for one, age in ages.items()
    ]  # fmt: skip
    came = [
        {"message_id": one, "first_received_at": NOW - age * DAY, "deliveries":
         1 + (one == first)} for one, age in (ages | {stranger: 20}).items()
        if one != lost
    ]  # fmt: skip
    for log, add, rows in (
        (shop, shop.send, stored), (payments, payments.receive, came),
    ):  # fmt: skip
        for part in rows[:1], rows[1:]:
            add(part)
            run(JobSpec((log.spec,), lake), "archive", "--older-than", "10d")
    kept = {"outbox": 7, "inbox": 14}

    for logs in ((shop.spec, payments.spec), (payments.spec, shop.spec)):
        facts = run(JobSpec(logs, lake, kept), *JUDGE)

        assert facts["counts"] == {
            "ok": 2, "redelivered_deduplicated": 1, "never_received": 1,
            "unknown_sender": 1,
        }  # fmt: skip
