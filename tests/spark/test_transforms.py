"""The transforms, on small data frames whose results are written by hand."""

from __future__ import annotations

import datetime as dt
import json
import uuid
from typing import Any

import pyspark.sql.functions as sf
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import types as t
from pyspark.testing import assertDataFrameEqual, assertSchemaEqual

from django_txmsg import wire
from django_txmsg.spark.errors import UsageError
from django_txmsg.spark.jobs import analyze
from django_txmsg.spark.jobs.listeners import read_places
from django_txmsg.spark.jobs.reconcile import differences
from django_txmsg.spark.schemas import STAGED, struct_of
from django_txmsg.spark.transforms import outgoing
from django_txmsg.spark.transforms import reconcile as judging
from django_txmsg.spark.transforms.journeys import (
    EXPECTED,
    LETTERS,
    RECEIVED,
    SENT,
    arrivals,
    kept,
    merged,
    steps,
)
from django_txmsg.spark.transforms.reconcile import (
    SUMMARY,
    VERDICT,
    Judgement,
    outcome,
    places,
    summary,
)
from tests.spark.conftest import analyzes

UTC = dt.timezone.utc
T0 = dt.datetime(2026, 3, 1, 12, tzinfo=UTC)
HORIZON = T0 + dt.timedelta(hours=10)
LATE = dt.timedelta(hours=1)


def at(minutes: float) -> dt.datetime:
    return T0 + dt.timedelta(minutes=minutes)


def sent(spark: Any, *rows: tuple[Any, ...], **more: Any) -> Any:
    """Return outbox rows. They are due when they are stored, unless `more` contains
    another `due_at`."""
    names = ("service", "message_id", "destination", "created_at", "expires_at",
             "dispatched_at", "dead_at", "cancelled_at")  # fmt: skip
    usual = {"broker": "default", "attempts": 0, **more}
    return spark.createDataFrame(
        [
            usual | {"due_at": row[3]} | dict(zip(names, row, strict=False)) | more
            for row in rows
        ],
        SENT,
    )


def received(spark: Any, *rows: tuple[Any, ...], **more: Any) -> Any:
    names = ("service", "stage", "message_id", "destination", "created_at",
             "first_received_at", "processed_at", "dead_at", "deliveries")  # fmt: skip
    return spark.createDataFrame(
        [
            {"sender": "a", "attempts": 1, **more} | dict(zip(names, row, strict=True))
            for row in rows
        ],
        RECEIVED,
    )


def letters(spark: Any, *rows: tuple[Any, ...]) -> Any:
    names = ("service", "stage", "message_id", "destination", "message_created_at",
             "created_at", "resolution", "resolved_at", "replaced_by",
             "reason")  # fmt: skip
    return spark.createDataFrame(
        [dict(zip(names, row, strict=False)) for row in rows], LETTERS
    )


def reconcile(
    sent: Any, arrived: Any, expected: Any, letters: Any = None, **how: Any
) -> Any:
    by = Judgement(**how)
    if letters is None:
        letters = sent.sparkSession.createDataFrame([], LETTERS)
    return judging.reconcile(steps(sent, arrived, letters), expected, by)


def expected(spark: Any, *rows: tuple[Any, ...]) -> Any:
    return spark.createDataFrame([(*row, None)[:4] for row in rows], EXPECTED)


def test_every_verdict_is_reached(spark) -> None:
    young = HORIZON + dt.timedelta(minutes=1)
    q, topic = "q", "topic:t"
    messages = sent(
        spark,
        ("a", "ok", q, at(0), None, at(1), None),
        ("a", "lost", q, at(0), None, at(1), None),
        ("a", "waiting", q, at(0), None, None, None),
        ("a", "young", q, young, None, young, None),
        ("a", "twice", q, at(0), None, at(1), None),
        ("a", "again", q, at(0), None, at(1), None),
        ("a", "late", q, at(0), None, at(1), None),
        ("a", "dead-there", q, at(0), None, at(1), None),
        ("a", "dead-here", q, at(0), None, None, at(2)),
        ("a", "taken-back", q, at(0), None, None, at(2), at(2)),
        ("a", "parked", q, at(0), None, at(1), None),
        ("a", "revoked", q, at(0), at(9), at(1), None),
        ("a", "gone-by", q, at(0), at(4), at(1), None),
        ("a", "fan", topic, at(0), None, at(1), None),
        ("a", "before", topic, at(-60), None, at(-59), None),
        ("a", "nobody", "topic:silent", at(0), None, at(1), None),
    )
    row = lambda m, **k: (  # noqa: E731 - a table of rows
        "b", k.get("stage", "s"), m, k.get("d", q), at(0), k.get("r", at(2)),
        k.get("p", at(3)), k.get("x"), k.get("n", 1),
    )  # fmt: skip
    receipts = received(
        spark,
        row("ok"),
        row("twice"), row("twice", r=at(90), p=at(91)),
        row("again", n=3),
        row("late", p=at(70)),
        row("dead-there", p=None, x=at(5)),
        row("parked", p=None),
        row("fan", d=topic, stage="one"),
        row("stranger"),
    ).unionByName(received(
        spark,
        row("revoked", p=None, x=at(5)), row("gone-by", p=None, x=at(5)),
        # Revoked before it arrived, by an early release.
        row("unseen", d="", p=None, x=at(5)),
        row("orphan", p=None, x=at(5), n=0),
        revoked_at=at(5),
    ))  # fmt: skip
    listeners = expected(spark, (topic, "b/one", at(-1)), (topic, "b/two", at(-1)))

    verdicts = reconcile(
        messages, receipts, listeners, horizon=HORIZON, late_after=LATE,
        # A destination, and no consumer.
        external=["b*"],
    )  # fmt: skip

    assertSchemaEqual(verdicts.schema, VERDICT, ignoreNullable=True)
    assertDataFrameEqual(
        verdicts.select("message_id", "consumer", "verdict"),
        spark.createDataFrame(
            [
                ("ok", "b/s", "ok"),
                ("lost", None, "never_received"),
                ("waiting", None, "in_flight"),
                ("young", None, "in_flight"),
                ("twice", "b/s", "processed_twice"),
                ("again", "b/s", "redelivered_deduplicated"),
                ("late", "b/s", "late"),
                ("dead-there", "b/s", "dead"),
                ("dead-here", None, "dead"),
                ("taken-back", None, "cancelled"),
                ("parked", "b/s", "in_flight"),
                ("revoked", "b/s", "cancelled"),
                ("gone-by", "b/s", "expired"),
                ("orphan", "b/s", "cancelled"),
                ("fan", "b/one", "ok"),
                ("fan", "b/two", "never_received"),
                ("stranger", "b/s", "unknown_sender"),
            ],
            "message_id string, consumer string, verdict string",
        ),
    )


def test_what_two_consumers_of_a_queue_process_is_processed_twice(spark) -> None:
    messages = sent(spark, *[("a", one, "q", at(0), None, at(1), None) for one in "xy"])
    got = ("q", at(0), at(2), at(3), None, 1)
    waits = ("q", at(0), at(2), None, None, 1)
    receipts = received(
        spark,
        ("b", "old", "x", *got), ("b", "new", "x", *got),
        ("b", "old", "y", *got), ("b", "new", "y", *waits),
    )  # fmt: skip

    verdicts = reconcile(
        messages, receipts, expected(spark), horizon=HORIZON, late_after=LATE
    )

    rows = verdicts.select("message_id", "consumer", "verdict").collect()
    assert sorted(map(tuple, rows)) == [
        ("x", "b/new, b/old", "processed_twice"),
        ("y", "b/new, b/old", "redelivered_deduplicated"),
    ]


@pytest.mark.matrix
def test_expired_and_external_messages_are_not_lost(spark) -> None:
    after = HORIZON + dt.timedelta(hours=1)
    messages = sent(
        spark,
        ("a", "expired", "q", at(0), at(60), at(1), None),
        ("a", "lasts", "q", at(0), after, at(1), None),
        ("a", "for-good", "q", at(0), at(60), at(1), None),
        ("a", "for-good", "q", at(90), None, at(91), None),
        ("a", "elsewhere", "erp", at(0), None, at(1), None),
    )

    verdicts = reconcile(
        messages, received(spark), expected(spark), horizon=HORIZON, late_after=LATE,
        external=["erp"],
    )  # fmt: skip

    rows = verdicts.select("message_id", "verdict").collect()
    assert dict(map(tuple, rows)) == {
        "expired": "expired", "lasts": "never_received", "for-good": "never_received",
        "elsewhere": "external",
    }  # fmt: skip


def test_the_logs_are_exchanged_once(spark) -> None:
    verdicts = reconcile(
        sent(spark, ("a", "1", "q", at(0), None, at(1), None)), received(spark),
        expected(spark), horizon=HORIZON, late_after=LATE,
    )  # fmt: skip

    plan = verdicts._jdf.queryExecution().executedPlan().toString()
    assert plan.count("Exchange hashpartitioning") == 1
    assert "SortMergeJoin" not in plan


def test_a_summary_counts_verdicts_by_day_and_destination(spark) -> None:
    messages = sent(
        spark,
        ("a", "1", "q", at(0), None, at(1), None),
        ("a", "2", "q", at(5), None, at(6), None),
        ("a", "3", "q", at(-24 * 60), None, at(1), None),
    )
    verdicts = reconcile(
        messages, received(spark), expected(spark), horizon=HORIZON, late_after=LATE
    )

    days = summary(outcome(verdicts))

    assertSchemaEqual(days.schema, SUMMARY, ignoreNullable=True)
    assertDataFrameEqual(
        days,
        spark.createDataFrame(
            [
                (T0.date(), "q", "never_received", 2, at(0), at(5)),
                (at(-24 * 60).date(), "q", "never_received", 1, at(-1440), at(-1440)),
            ],
            SUMMARY,
        ),
    )


def test_a_message_is_late_and_lost_from_when_it_was_due(spark) -> None:
    day = 24 * 60
    ends = dt.timedelta(days=1)

    def delayed(name: str, due: float, gone: float | None, attempts: int = 0) -> Any:
        left = None if gone is None else at(gone)
        row = ("a", name, "q", at(0), None, left, None)
        return sent(spark, row, due_at=at(due), attempts=attempts)

    again = sent(
        spark,
        ("a", "left-again", "q", at(0), None, at(1), None),
        ("a", "left-again", "q", at(60), None, at(day + 1), None),
    )
    messages = (
        delayed("prompt", day, day)
        # The relay was down until now.
        .unionByName(delayed("left-now", 0, day + 1))
        .unionByName(again)
        .unionByName(delayed("late", day, day))
        .unionByName(delayed("tried-again", day, day, attempts=1))
        # Due at once: only attempts to send it have made it due again.
        .unionByName(delayed("refused-first", 15, 15, attempts=7))
        .unionByName(delayed("just-left", day + 30, day + 30))
        .unionByName(delayed("lost", day - 60, day - 60))
        .unionByName(delayed("next-week", 7 * day, None))
    )

    def got(name: str, minute: float) -> tuple[Any, ...]:
        done = at(minute)
        return ("b", "s", name, "q", at(0), done, done, None, 1)

    receipts = received(
        spark,
        got("prompt", day + 1), got("late", day + 61), got("tried-again", day + 1),
        got("refused-first", 61),
    )  # fmt: skip

    verdicts = reconcile(
        messages, receipts, expected(spark), horizon=T0 + ends, late_after=LATE,
        stuck_before=T0 + ends,
    )  # fmt: skip

    assert dict(verdicts.select("message_id", "verdict").collect()) == {
        "prompt": "ok", "late": "late", "tried-again": "ok",
        "refused-first": "late", "just-left": "in_flight", "lost": "never_received",
        "next-week": "in_flight", "left-now": "in_flight", "left-again": "in_flight",
    }  # fmt: skip

    strict = reconcile(
        messages.where("message_id = 'tried-again'"), receipts, expected(spark),
        horizon=T0 + ends, late_after=dt.timedelta(seconds=62),
    )  # fmt: skip
    [row] = strict.where("message_id = 'tried-again'").collect()
    assert row.verdict == "ok"


@pytest.mark.matrix
def test_message_that_waits_too_long_is_a_finding(spark) -> None:
    messages = sent(
        spark,
        ("a", "not-sent", "q", at(0), None, None, None),
        ("a", "soon-sent", "q", at(400), None, None, None),
        ("a", "not-processed", "q", at(0), None, at(1), None),
        ("a", "tried-later", "q", at(0), None, at(1), None),
    )
    waiting = ("q", at(0), at(2), None, None, 1)
    receipts = received(spark, ("b", "s", "not-processed", *waiting)).unionByName(
        received(spark, ("b", "s", "tried-later", *waiting), due_at=at(301))
    )

    verdicts = reconcile(
        messages, receipts, expected(spark), horizon=HORIZON, late_after=LATE,
        stuck_before=at(300),
    )  # fmt: skip

    assert dict(verdicts.select("message_id", "verdict").collect()) == {
        "not-sent": "not_sent", "soon-sent": "in_flight",
        "not-processed": "not_processed", "tried-later": "in_flight",
    }  # fmt: skip


@pytest.mark.matrix
def test_resolved_dead_letter_is_no_finding(spark) -> None:
    topic = "topic:t"
    messages = sent(
        spark,
        *[
            ("a", name, "q", at(0), None, at(1), None)
            for name in ("open", "discarded", "replaced", "again", "died-again")
        ],
        ("a", "refused", topic, at(0), None, None, at(2)),
        ("a", "too-late", "q", at(0), at(5), None, at(6)),
        ("a", "withdrawn", "q", at(0), None, None, at(2)),
        ("a", "withdrawn", "q", at(9), None, None, at(12), at(12)),
        # Its broker got it, but broke the connection before it confirmed that.
        ("a", "doubtful", "q", at(0), None, None, at(2), at(2)),
        ("a", "to-all", topic, at(0), None, None, at(2), at(2)),
    )
    receipts = received(
        spark,
        *[
            ("b", "s", name, "q", at(0), at(2), None, at(died), 1)
            for name, died in (
                ("open", 3), ("discarded", 3), ("replaced", 3), ("again", 3),
                ("died-again", 30),
            )
        ],
        ("b", "s", "doubtful", "q", at(0), at(1), None, None, 1),
        ("b", "new", "to-all", topic, at(0), at(1), None, None, 1),
        # A stage gets its copy here: it is in no outbox.
        ("b", "s", "copy", "q", at(0), at(9), at(10), None, 1),
    )  # fmt: skip
    resolved = letters(
        spark,
        ("b", "s", "open", "q", at(0), at(3), "open", None),
        ("b", "s", "discarded", "q", at(0), at(3), "discarded", at(9)),
        ("b", "s", "replaced", "q", at(0), at(3), "replaced", at(9), "copy"),
        ("b", "s", "again", "q", at(0), at(3), "redelivered", at(9)),
        ("b", "s", "died-again", "q", at(0), at(3), "discarded", at(9)),
        ("a", "", "refused", topic, at(0), at(2), "discarded", at(9)),
        ("a", "", "withdrawn", "q", at(0), at(2), "redelivered", at(9)),
        ("a", "", "forgotten", "q", at(0), at(2), "discarded", at(9)),
    )
    listeners = expected(spark, (topic, "b/s", at(-1)))

    verdicts = reconcile(
        messages, receipts, listeners, resolved, horizon=HORIZON, late_after=LATE
    )

    to_all = verdicts.where("message_id = 'to-all'").select("consumer", "verdict")
    assert dict(to_all.collect()) == {"b/s": "cancelled", "b/new": "in_flight"}
    verdicts = verdicts.where("message_id <> 'to-all'")
    assert dict(verdicts.select("message_id", "verdict").collect()) == {
        "open": "dead", "discarded": "discarded", "replaced": "replaced",
        "again": "in_flight", "died-again": "dead", "refused": "discarded",
        "too-late": "expired", "copy": "ok", "withdrawn": "cancelled",
        "doubtful": "in_flight",
    }  # fmt: skip


@pytest.mark.matrix
def test_destination_that_matches_a_pattern_is_external(spark) -> None:
    lost = [
        ("a", name, place, at(0), None, at(1), None)
        for name, place in (
            ("task", "shop.tasks.pay"), ("erp", "erp.invoices"), ("ours", "erp"),
        )
    ]  # fmt: skip
    tasks = [("a", one, one, at(0), None, at(1), None) for one in ("plain", "once")]
    messages = (
        sent(spark, *lost)
        .unionByName(sent(spark, *tasks, broker="celery"))
        .unionByName(
            sent(spark, ("a", "bus", "q", at(0), None, at(1), None), broker="bus.west")
        )
    )
    got = ("q", at(0), at(2), at(300), None, 1)
    receipts = received(
        spark, ("b", "s", "event", *got), sender="//legacy.example/orders"
    ).unionByName(received(spark, ("b", "s", "stranger", *got), sender="legacy"))

    verdicts = reconcile(
        messages, receipts, expected(spark), horizon=HORIZON, late_after=LATE,
        external=["shop.tasks.*", "erp.*", "broker:bus.*"],
        external_senders=["//legacy.example/*"],
        task_brokers=[("a", "celery")], received={"once"},
    )  # fmt: skip

    assert dict(verdicts.select("message_id", "verdict").collect()) == {
        "task": "external", "erp": "external", "ours": "never_received",
        "plain": "external", "once": "never_received", "bus": "external",
        "event": "external", "stranger": "unknown_sender",
    }  # fmt: skip


def test_a_clock_that_is_ahead_makes_no_message_late(spark) -> None:
    ids = ("prompt", "late")
    messages = sent(spark, *[("a", n, "q", at(0), None, at(1), None) for n in ids])
    receipts = received(
        spark,
        ("b", "s", "prompt", "q", at(0), at(120), at(121), None, 1),
        ("b", "s", "late", "q", at(0), at(120), at(190), None, 1),
    )

    verdicts = reconcile(
        messages, receipts, expected(spark), horizon=HORIZON, late_after=LATE,
        late_at=[("other", dt.timedelta(0)), ("q*", LATE)],
        clocks=[("a", "b", 120 * 60_000_000)],
    )  # fmt: skip

    assert dict(verdicts.select("message_id", "verdict").collect()) == {
        "prompt": "ok", "late": "late",
    }  # fmt: skip


@pytest.mark.matrix
def test_retired_listener_has_no_lost_messages(spark) -> None:
    topic = "topic:t"
    messages = sent(
        spark,
        ("a", "before", topic, at(0), None, at(1), None),
        ("a", "after", topic, at(60), None, at(61), None),
    )
    listeners = expected(
        spark, (topic, "b/old", at(-1), at(60)), (topic, "b/new", at(60))
    )

    verdicts = reconcile(
        messages, received(spark), listeners, horizon=HORIZON, late_after=LATE
    )

    rows = verdicts.select("message_id", "consumer", "verdict").collect()
    assert sorted(map(tuple, rows)) == [
        ("after", "b/new", "never_received"), ("before", "b/old", "never_received"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("delay", "over"), [(30, True), pytest.param(7 * 24 * 60, False, id="days")]
)
def test_a_delayed_message_is_owed_to_who_listens_when_it_is_due(
    spark, delay: int, over: bool
) -> None:
    """One listener has been replaced while the message waited for its time. After days,
    the message is judged again by each run."""
    topic, due, replaced = "topic:t", at(delay), at(delay / 2)
    messages = sent(spark, ("a", "delayed", topic, at(0), None, due, None), due_at=due)
    receipts = received(spark, ("b", "new", "delayed", topic, at(0), due, due, None, 1))
    listeners = expected(
        spark, (topic, "b/old", at(-1), replaced), (topic, "b/new", replaced)
    )
    of_each = steps(messages, receipts, spark.createDataFrame([], LETTERS))

    verdicts = reconcile(
        messages, receipts, listeners, horizon=due + LATE, late_after=LATE
    )

    rows = verdicts.select("message_id", "consumer", "verdict").collect()
    assert [tuple(row) for row in rows] == [("delayed", "b/new", "ok")]
    assert {row.over for row in kept(merged(of_each), listeners).collect()} == {over}


def test_message_without_inbox_row_has_the_fate_of_its_dead_letter(spark) -> None:
    topic = "topic:t"
    messages = sent(
        spark,
        *[("a", name, "q", at(0), None, at(1)) for name in ("open", "gone", "edited")],
        ("a", "expiring", "q", at(0), at(5), at(1)),
        ("a", "shared", topic, at(0), None, at(1)),
        *[("a", name, "q", at(0), None, at(1)) for name in ("full", "purged", "tried")],
        ("a", "tried", "q", at(3), None, at(4)),
    )
    # Its stage could not read these messages. The broker gave up the last three.
    buried = letters(
        spark,
        ("b", "s", "open", "q", at(0), at(2), "open", None),
        ("b", "s", "gone", "q", at(0), at(2), "discarded", at(3)),
        ("b", "s", "edited", "q", at(0), at(2), "replaced", at(3)),
        ("b", "s", "expiring", "q", at(0), at(2), "open", None),
        ("b", "s", "foreign", "q", None, at(2), "open", None),
        ("b", "s", "shared", topic, at(0), at(2), "open", None),
        ("b", "", "full", "q", at(0), at(2), "open", None, None, "broker"),
        ("b", "", "purged", "q", at(0), at(2), "discarded", at(3), None, "broker"),
        ("b", "", "tried", "q", at(0), at(2), "redelivered", at(3), None, "broker"),
    )
    listeners = expected(spark, (topic, "b/s", at(-1)), (topic, "b/other", at(-1)))

    verdicts = reconcile(
        messages, received(spark), listeners, buried, horizon=HORIZON, late_after=LATE
    )

    rows = verdicts.select("message_id", "consumer", "verdict").collect()
    assert sorted(map(tuple, rows)) == [
        ("edited", None, "replaced"), ("expiring", None, "dead"),
        ("full", None, "dead"), ("gone", None, "discarded"), ("open", None, "dead"),
        ("purged", None, "discarded"), ("shared", "b/other", "never_received"),
        ("shared", "b/s", "dead"), ("tried", None, "never_received"),
    ]  # fmt: skip


def test_a_letter_goes_with_its_message_wherever_that_is_expected(spark) -> None:
    """Two delayed messages died at the relay when they were due, and are discarded. A
    listener of one of them had been added while it waited. Nobody listened to the
    other."""
    place = ("topic:t", "topic:silent")
    messages = sent(
        spark,
        ("a", "refused", place[0], at(0), None, None, at(301)),
        ("a", "unheard", place[1], at(0), None, None, at(301)),
        due_at=at(300),
    )
    resolved = letters(
        spark,
        ("a", "", "refused", place[0], at(0), at(301), "discarded", at(360)),
        ("a", "", "unheard", place[1], at(0), at(301), "discarded", at(360)),
    )
    listeners = expected(
        spark, (place[0], "b/old", at(-1)), (place[0], "b/new", at(200)),
        (place[1], "b/later", at(400)),
    )  # fmt: skip

    verdicts = reconcile(
        messages, received(spark), listeners, resolved, horizon=HORIZON, late_after=LATE
    )

    rows = verdicts.select("message_id", "consumer", "verdict").collect()
    assert sorted(map(tuple, rows)) == [
        ("refused", "b/new", "discarded"), ("refused", "b/old", "discarded"),
        ("unheard", None, "discarded"),
    ]  # fmt: skip


def test_topic_message_that_died_before_any_stage_listened_is_judged_once(
    spark,
) -> None:
    """Two messages died at the relay, and were redelivered after a stage had begun to
    listen. It received one of them."""
    topic = "topic:t"
    messages = sent(
        spark,
        *[("a", one, topic, at(0), None, None, at(1)) for one in ("got", "lost")],
        *[("a", one, topic, at(60), None, at(61)) for one in ("got", "lost")],
    )
    receipts = received(
        spark, ("b", "s", "got", topic, at(60), at(62), at(63), None, 1)
    )

    verdicts = reconcile(
        messages, receipts, expected(spark, (topic, "b/s", at(30))),
        horizon=HORIZON, late_after=LATE,
    )  # fmt: skip

    rows = verdicts.select("message_id", "consumer", "verdict").collect()
    assert sorted(map(tuple, rows), key=str) == [
        ("got", "b/s", "ok"), ("lost", "b/s", "never_received"),
    ]  # fmt: skip


def test_a_redelivered_message_is_owed_to_no_stage_that_was_retired_meanwhile(
    spark,
) -> None:
    """Two messages died at the relay. Before they were redelivered, one stage had been
    replaced, and another one had been retired."""
    topic, silent = "topic:t", "topic:silent"
    messages = sent(
        spark,
        *[("a", one, one, at(0), None, None, at(1)) for one in (topic, silent)],
        *[("a", one, one, at(60), None, at(61)) for one in (topic, silent)],
    )
    resolved = letters(
        spark,
        *[("a", "", one, one, at(0), at(1), "redelivered", at(60))
          for one in (topic, silent)],
    )  # fmt: skip
    receipts = received(
        spark, ("b", "new", topic, topic, at(60), at(62), at(63), None, 1)
    )
    listeners = expected(
        spark, (topic, "b/old", at(-1), at(30)), (topic, "b/new", at(30)),
        (topic, "b/still", at(-1)), (silent, "b/old", at(-1), at(30)),
    )  # fmt: skip

    verdicts = reconcile(
        messages, receipts, listeners, resolved,
        horizon=HORIZON, late_after=LATE, stuck_before=HORIZON,
    )  # fmt: skip

    rows = verdicts.select("message_id", "consumer", "verdict").collect()
    assert sorted(map(tuple, rows)) == [
        (topic, "b/new", "ok"), (topic, "b/still", "never_received"),
    ]  # fmt: skip


def test_places_tell_who_listens_and_how_long_messages_take(spark) -> None:
    rows = received(
        spark,
        ("b", "s", "1", "topic:t", at(3), at(4), at(5), None, 1),
        ("b", "s", "2", "topic:t", at(1), at(9), at(9), None, 1),
        ("b", "s", "3", "queue", at(0), at(9), at(9), None, 1),
    )

    minute = 60_000_000
    found = places(arrivals(rows)).toArrow().to_pylist()

    assert {tuple(row.values()) for row in found} == {
        ("topic:t", "b/s", "a", "b", at(1), at(9), at(1), at(3), 2, minute, minute),
        ("queue", None, "a", "b", *[at(0)] * 4, 1, 9 * minute, 9 * minute),
    }


def test_messages_of_a_topic_that_waited_show_no_clock_difference(spark) -> None:
    """The consumers b and c take three messages at once, after half an hour and an
    hour. The consumer d takes each message two hours after it was sent."""
    taken = {"b": [32, 32, 32], "c": [61.5, 61.5, 61.5], "d": [120, 121, 122]}
    rows = received(
        spark,
        *[(service, "s", str(sent), "topic:t", at(sent), at(end), at(end), None, 1)
          for service, ends in taken.items() for sent, end in enumerate(ends)],
    )  # fmt: skip

    found = differences(read_places(arrivals(rows)), [])

    assert [(one.receiver, one.ahead) for one in found] == [
        ("d", dt.timedelta(hours=2))
    ]


def test_a_stage_did_not_listen_while_its_first_message_waited(spark) -> None:
    day = 24 * 60
    rows = received(
        spark,
        ("b", "new", "delayed", "topic:t", at(0), at(6 * day), at(6 * day), None, 1),
        ("b", "new", "prompt", "topic:t", at(5 * day), at(5 * day), None, None, 1),
        ("b", "late", "delayed", "topic:t", at(0), at(6 * day), at(6 * day), None, 1),
    )

    found = read_places(arrivals(rows))

    times = {one.consumer: (one.first_at, one.last_at, one.sent_at) for one in found}
    assert times == {
        "b/new": (at(5 * day), at(6 * day), at(5 * day)),
        "b/late": (at(6 * day), at(6 * day), at(0)),
    }


# -- A plain model of reconciliation, and random logs ------------------------------

MINUTES = st.integers(-30, 660)
SENDS = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(["q", "topic:t"]), MINUTES,
              st.sampled_from(["left", "waits", "dead"])),
    max_size=8,
)  # fmt: skip
RECEIPTS = st.lists(
    st.tuples(st.integers(0, 7), st.sampled_from(["q", "topic:t"]),
              st.sampled_from(["one", "two"]), MINUTES, st.integers(1, 3),
              st.sampled_from(["done", "slow", "dead", "open"])),
    max_size=10,
)  # fmt: skip
LISTENERS = st.dictionaries(st.sampled_from(["b/one", "b/two"]), MINUTES, max_size=2)


def model(
    sends: list[Any], receipts: list[Any], listeners: dict[str, int]
) -> list[tuple[str, str, str | None, str]]:
    """Compute the verdicts of `reconcile` in plain Python, with dictionaries and
    loops."""
    stored: dict[tuple[str, str, str], list[Any]] = {}
    whole: dict[tuple[str, str], list[Any]] = {}
    for number, destination, minute, fate in sends:
        whole.setdefault((str(number), destination), []).append((minute, fate))
        due = [""]
        if destination != "q":
            due = [c for c, since in listeners.items() if minute >= since] or [""]
        for consumer in due:
            key = (str(number), destination, consumer)
            stored.setdefault(key, []).append((minute, fate))
    receipt: dict[tuple[str, str, str], list[Any]] = {}
    for number, destination, stage, minute, deliveries, fate in receipts:
        consumer = f"b/{stage}"
        key = (str(number), destination, "" if destination == "q" else consumer)
        receipt.setdefault(key, []).append((minute, deliveries, fate, consumer))
    found = []
    for key in stored.keys() | receipt.keys():
        message, destination, pair = key
        rows, sent_rows = receipt.get(key, []), stored.get(key, [])
        if not sent_rows or not pair:  # It was not expected there, or by no stage.
            sent_rows = whole.get((message, destination), [])
        all_dead = bool(sent_rows) and all(f == "dead" for _, f in sent_rows)
        if destination != "q" and not pair and not all_dead:
            continue
        consumer = ", ".join(sorted({c for *_, c in rows})) or pair or None
        sent_at = min(m for m, *_ in sent_rows or rows)
        young = at(max(m for m, *_ in sent_rows) if sent_rows else sent_at) >= HORIZON
        done = [
            m + (120 if f == "slow" else 1)
            for m, _, f, _ in rows
            if f in ("done", "slow")
        ]
        died = all_dead or any(f == "dead" for _, _, f, _ in rows)
        if len(done) > 1:
            verdict = "processed_twice"
        elif not sent_rows:
            verdict = "in_flight" if young else "unknown_sender"
        elif done and min(done) - sent_at > 60:
            verdict = "late"
        elif done and sum(n for _, n, _, _ in rows) > 1:
            verdict = "redelivered_deduplicated"
        elif done:
            verdict = "ok"
        elif died:
            verdict = "dead"
        elif rows or young or not any(f == "left" for _, f in sent_rows):
            verdict = "in_flight"
        else:
            verdict = "never_received"
        found.append((message, destination, consumer, verdict))
    return sorted(found, key=str)


@pytest.mark.matrix
@settings(
    max_examples=8,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(cases=st.lists(st.tuples(SENDS, RECEIPTS, LISTENERS), min_size=8, max_size=8))
def test_random_logs_are_judged_as_by_the_plain_model(spark, cases) -> None:
    # Many logs in one frame, kept apart by their names: a Spark job costs a second.
    sends, receipts, listeners, want = [], [], [], []
    for case, (some_sends, some_receipts, some_listeners) in enumerate(cases):

        def name(text: str, case: int = case) -> str:
            return f"{text}#{case}"

        for number, destination, minute, fate in some_sends:
            left = at(minute + 1) if fate == "left" else None
            dead = at(minute + 1) if fate == "dead" else None
            to = (name(str(number)), name(destination))
            sends.append(("a", *to, at(minute), None, left, dead))
        for number, destination, stage, minute, deliveries, fate in some_receipts:
            ends = {"done": at(minute + 1), "slow": at(minute + 120)}
            done = ends.get(fate)
            dead = at(minute + 1) if fate == "dead" else None
            receipts.append(("b", stage, name(str(number)), name(destination),
                             at(minute), at(minute), done, dead,
                             deliveries))  # fmt: skip
        listeners += [
            (name("topic:t"), consumer, at(since))
            for consumer, since in some_listeners.items()
        ]
        want += [
            (name(m), name(d), c, v)
            for m, d, c, v in model(some_sends, some_receipts, some_listeners)
        ]

    verdicts = reconcile(
        sent(spark, *sends), received(spark, *receipts), expected(spark, *listeners),
        horizon=HORIZON, late_after=LATE,
    )  # fmt: skip

    rows = verdicts.select("message_id", "destination", "consumer", "verdict").collect()
    assert sorted(map(tuple, rows), key=str) == sorted(want, key=str)


# -- Latency, activity, dead letters -------------------------------------------------

INBOX = (
    "service string, stage string, destination string, created_at timestamp,"
    " first_received_at timestamp, started_at timestamp, processed_at timestamp,"
    " dead_at timestamp, deliveries int, attempts int"
)


def at_once() -> dict[str, Any]:
    """Return columns for messages that are due when they are stored."""
    return {"due_at": sf.col("created_at"), "attempts": sf.lit(0)}


def inbox_row(seconds: float, minute: float = 0, **more: Any) -> tuple[Any, ...]:
    start = at(minute)
    done = start + dt.timedelta(seconds=seconds)
    row = {"service": "b", "stage": "s", "destination": "q", "created_at": start,
           "first_received_at": start, "started_at": start, "processed_at": done,
           "dead_at": None, "deliveries": 1, "attempts": 1}  # fmt: skip
    return tuple((row | more).values())


@analyzes
def test_sketches_merge_to_percentiles_and_keep_negative_times(spark) -> None:
    rows = [inbox_row(float(n), minute=70.0 * (n % 2)) for n in range(1, 101)]
    rows.append(inbox_row(-5.0))

    sketches = analyze.stage_latencies(spark.createDataFrame(rows, INBOX))
    merged = analyze.percentiles(sketches.where("measure = 'critical'"), "stage")

    assertSchemaEqual(sketches.schema, analyze.LATENCY, ignoreNullable=True)
    # Two hours, and the one before in which the wrong clock has it processed.
    assert sketches.where("measure = 'critical'").count() == 3
    [row] = merged.collect()
    assert (row.messages, row.negative, row.longest) == (101, 1, 100.0)
    assert row.p50 == pytest.approx(50, abs=2)
    assert row.p95 == pytest.approx(95, abs=2)


@pytest.mark.matrix
def test_activity_counts_by_hour(spark) -> None:
    outbox = spark.createDataFrame(
        [
            ("a", "q", at(0), at(1), None, None),
            ("a", "q", at(10), at(90), None, None),
            ("a", "q", at(20), None, at(30), None),
            ("a", "q", at(25), None, at(30), at(30)),
            ("a", "r", at(130), None, None, None),
        ],
        "service string, destination string, created_at timestamp,"
        " dispatched_at timestamp, dead_at timestamp, cancelled_at timestamp",
    ).withColumns(at_once())
    inbox = spark.createDataFrame(
        [
            inbox_row(60.0),
            inbox_row(60.0, deliveries=3, attempts=2),
            inbox_row(0, processed_at=None, dead_at=at(65), attempts=7),
        ],
        INBOX,
    )

    assertDataFrameEqual(
        analyze.throughput(outbox, inbox),
        spark.createDataFrame(
            [(at(0), 4, 1, 2, 0), (at(60), 0, 1, 0, 1), (at(120), 1, 0, 0, 0)],
            analyze.THROUGHPUT,
        ),
    )
    assertDataFrameEqual(
        analyze.backlog(outbox, at(0), at(200)),
        spark.createDataFrame([(at(0), 1), (at(60), 0), (at(120), 1)], analyze.BACKLOG),
    )
    assertDataFrameEqual(
        analyze.redeliveries(inbox),
        spark.createDataFrame([("b", "s", 3, 2, 5, 10, 1)], analyze.REDELIVERIES),
    )
    assertDataFrameEqual(
        analyze.senders(outbox),
        spark.createDataFrame([("a", "q", 4, 1), ("a", "r", 1, 0)], analyze.SENDERS),
    )


def test_backlog_includes_messages_that_waited_before(spark) -> None:
    outbox = spark.createDataFrame(
        [
            ("a", "q", at(-6000), None, None),
            ("a", "q", at(-5000), at(70), None),
            ("a", "q", at(-4000), at(-3000), None),
            ("a", "q", at(-4000), None, at(-1)),
            ("a", "q", at(10), at(11), None),
        ],
        "service string, destination string, created_at timestamp,"
        " dispatched_at timestamp, dead_at timestamp",
    ).withColumns(at_once())

    assertDataFrameEqual(
        analyze.backlog(outbox, at(5), at(200)),
        spark.createDataFrame([(at(0), 2), (at(60), 1)], analyze.BACKLOG),
    )


@analyzes
@pytest.mark.matrix
def test_delayed_messages_are_neither_backlog_nor_latency(spark) -> None:
    outbox = sent(
        spark,
        ("a", "delayed", "q", at(0), None, at(121), None),
        due_at=at(120),
    ).unionByName(
        sent(
            spark,
            ("a", "next-week", "q", at(0), None, None, None),
            ("a", "called-off", "q", at(0), None, None, at(1), at(1)),
            due_at=at(10_000),
        )
    )
    row = ("b", "s", "delayed", "q", at(0), at(121), at(122), None, 1)
    inbox = received(spark, row)
    inbox = inbox.withColumn("started_at", sf.col("first_received_at"))

    assertDataFrameEqual(
        analyze.backlog(outbox, at(-60), at(200)),
        spark.createDataFrame([(at(120), 0)], analyze.BACKLOG),
    )
    found = analyze.stage_latencies(analyze.from_due(inbox, outbox))
    assert dict(found.select("measure", "longest").collect()) == {
        "critical": 120.0, "transit": 60.0, "processing": 60.0,
    }  # fmt: skip


def test_dead_letters_of_one_cause_are_one_group(spark) -> None:
    letters = spark.createDataFrame(
        [
            ("b", "s", "r", "KeyError: order 17", "key", "open", at(0)),
            ("b", "s", "r", f"KeyError: order {uuid.uuid4()}", "key", "open", at(10)),
            ("b", "s", "r", "KeyError: order 0xff", "key", "discarded", at(20)),
            ("b", "s", "r", "ValueError: x", "value", "open", at(5)),
            ("b", "s", "r", "ValueError: y", "value", "open", at(6)),
        ],
        "service string, stage string, reason string, exception string,"
        " fingerprint string, resolution string, created_at timestamp",
    )

    groups = analyze.groups(letters)

    assertSchemaEqual(groups.schema, analyze.GROUPS, ignoreNullable=True)
    found = {
        row.letters: (row.open, [i for i, n in enumerate(row.growth) if n], row.group)
        for row in groups.collect()
    }
    # In 24 equal parts of the 20 minutes.
    assert found[3] == (2, [0, 12, 23], "key")
    assert found[2] == (2, [6, 7], "value")


# -- Outgoing ------------------------------------------------------------------------


def test_derived_ids_are_the_version_5_uuids_of_the_standard_library(spark) -> None:
    names = ["", "x", "ünïcödé", "replay/run/6f0d4a3e", "a" * 500]
    frame = spark.createDataFrame([(one,) for one in names], "name string")

    rows = frame.select("name", outgoing.derived_uuid(frame.name).alias("id")).collect()

    assert {row.name: row.id for row in rows} == {
        one: str(uuid.uuid5(wire.NAMESPACE, one)) for one in names
    }


def test_a_dataset_becomes_messages_of_its_template(spark) -> None:
    rows = spark.createDataFrame(
        [(1, "Ann", 2.5, None), (2, "Bob", 3.0, "x")],
        "id int, name string, amount double, note string",
    )

    staged = outgoing.from_dataset(
        rows, run="r", destination="mail.{name}", key="{id}", identity="id",
        headers={"for": "{name}!"},
        template={"id": "{id}", "hello": "Dear {name},", "sum": "{amount}",
                  "note": "{note}", "fixed": [1, 2], "deep": {"x": None}},
    )  # fmt: skip

    assertSchemaEqual(staged.schema, STAGED, ignoreNullable=True)
    first = staged.orderBy("key").collect()[0]
    assert (first.destination, first.key) == ("mail.Ann", "1")
    assert first.headers == '{"for":"Ann!"}'
    assert json.loads(bytes(first.body)) == {
        "id": 1, "hello": "Dear Ann,", "sum": 2.5, "note": None, "fixed": [1, 2],
        "deep": {"x": None},
    }  # fmt: skip
    again = outgoing.from_dataset(
        rows, run="r", destination="d", template={}, identity="id"
    )
    assert {r.message_id for r in again.collect()} == {
        r.message_id for r in staged.collect()
    }


def test_a_header_without_a_value_is_left_out(spark) -> None:
    rows = spark.createDataFrame([(1, None), (2, "x")], "id int, note string")

    staged = outgoing.from_dataset(
        rows, run="r", destination="d", template={}, key="{id}",
        headers={"note": "{note}!", "id": "{id}"},
    )  # fmt: skip

    found = [json.loads(row.headers) for row in staged.orderBy("key").collect()]
    assert found == [{"id": "1"}, {"note": "x!", "id": "2"}]


@pytest.mark.parametrize("identity", ["at,naive", "at", ""])
def test_instants_that_differ_in_microseconds_identify_rows(
    spark, identity: str
) -> None:
    at = "timestamp '2026-01-01 12:00:00.{0}Z' at"
    naive = "timestamp_ntz '2026-01-01 12:00:00.{0}' naive"

    def ids(*fractions: str) -> list[str]:
        rows = spark.sql(
            " UNION ALL ".join(f"SELECT {at}, {naive}".format(f) for f in fractions)
        )
        staged = outgoing.from_dataset(
            rows, run="r", destination="d", template={}, identity=identity
        )
        return [row.message_id for row in staged.collect()]

    assert len({*ids("123", "123001", "123002")}) == 3
    # As earlier releases derived it.
    values = {"at": "2026-01-01T12:00:00.123Z", "naive": "2026-01-01T12:00:00.123"}
    names = identity.split(",") if identity else [*values]
    text = json.dumps({name: values[name] for name in names}, separators=(",", ":"))
    number = "" if identity else "/1"
    name = f"send/r/{text}{number}"
    assert ids("123") == [str(uuid.uuid5(wire.NAMESPACE, name))]


@pytest.mark.matrix
def test_equal_rows_without_an_identity_are_messages_of_their_own(spark) -> None:
    rows = spark.createDataFrame([(1,), (1,), (2,)], "n int")
    make = lambda: outgoing.from_dataset(  # noqa: E731
        rows, run="r", destination="d", template={"n": "{n}"}
    )

    first = {row.message_id for row in make().collect()}

    assert len(first) == 3
    assert {row.message_id for row in make().collect()} == first


def test_an_unknown_column_is_named(spark) -> None:
    rows = spark.createDataFrame([(1,)], "n int")

    with pytest.raises(UsageError, match="no column 'm'; it has n"):
        outgoing.from_dataset(rows, run="r", destination="d", template={"x": "{m}"})


def test_schema_of_a_text_is_what_spark_makes_of_it(spark) -> None:
    text = (
        "a string, b long not null, c integer, d double, e boolean, f binary, "
        "g timestamp, h date"
    )
    assert struct_of(text) == t.DataType.fromDDL(text)
    assert struct_of(struct_of("a string"), "b long") == struct_of("a string, b long")
