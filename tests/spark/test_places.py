"""The messages show which stages consume which topic, and which services' clocks
differ."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from typing import Any

from django_txmsg.spark.jobs.listeners import Listener, Place, listeners
from django_txmsg.spark.jobs.reconcile import differences
from django_txmsg.spark.spec import Subscription
from django_txmsg.spark.tally import Line

UTC = dt.timezone.utc
EVER = dt.datetime(1970, 1, 1, tzinfo=UTC)
T0 = dt.datetime(2026, 3, 1, 12, tzinfo=UTC)
TOPIC = "topic:t"
SECOND = 1_000_000


def at(minutes: float) -> dt.datetime:
    return T0 + dt.timedelta(minutes=minutes)


NOW = at(1000)
TICK = dt.timedelta(microseconds=1)


def heard(consumer: str, first: float, last: float, sent: float | None = None) -> Place:
    receiver = consumer.partition("/")[0]
    times = at(first), at(last), at(first), at(last if sent is None else sent)
    return Place(TOPIC, consumer, "a", receiver, *times, 5, 1, 1)


def declared(*names: str) -> list[Subscription]:
    """Return subscriptions of service b to a topic, and one to a queue."""
    topics = [Subscription(TOPIC, "b", one) for one in names]
    return [*topics, Subscription("queue", "b", "queue")]


def who(*given: Any) -> dict[str, tuple[Any, Any]]:
    found = listeners(*given, NOW)
    assert len({one.consumer for one in found.expected}) == len(found.expected)
    return {one.consumer: (one.since, one.until) for one in found.expected}


def test_listener_that_received_once_is_expected_from_then_on() -> None:
    found = [heard("c/s", 5, 9), heard("c/s", 3, 4)]
    assert who([], found, declared()) == {"c/s": (at(3), None)}


def test_a_declared_stage_listens_since_ever_or_from_now_on() -> None:
    first = listeners([], [], declared("s"), NOW)
    assert first.fresh == first.expected == [Listener(TOPIC, "b/s", EVER)]
    assert who(first.fresh, [], declared("s", "more")) == {
        "b/s": (EVER, None), "b/more": (NOW, None),
    }  # fmt: skip


def test_a_stage_that_was_renamed_before_any_run_hands_its_messages_over() -> None:
    found = [heard("b/old", 0, 50), heard("b/new", 60, 90)]
    assert who([], found, declared("new")) == {
        "b/old": (at(0), at(50) + TICK), "b/new": (at(50) + TICK, None),
    }  # fmt: skip


def test_a_stage_begins_after_the_former_one_has_received_its_last_message() -> None:
    """That message was sent with a delay."""
    assert who([], [heard("b/old", 0, 70, sent=50)], declared("new")) == {
        "b/old": (at(0), at(50) + TICK), "b/new": (at(70), None),
    }  # fmt: skip


def test_a_stage_that_was_renamed_between_runs_hands_its_messages_over() -> None:
    """No run has recorded the old stage, but one has seen the service without it."""
    found = [heard("b/old", 0, 50)]
    run = listeners([], found, declared("new"), NOW, ["b"])
    assert run.fresh == [Listener(TOPIC, "b/new", at(50) + TICK)]
    # One that replaces no stage has no earlier messages to receive.
    run = listeners([], [], declared("new"), NOW, ["b"])
    assert run.fresh == [Listener(TOPIC, "b/new", NOW)]


def test_a_stage_that_was_renamed_since_ends_where_the_new_one_begins() -> None:
    known = [Listener(TOPIC, "b/old", EVER)]
    found = [heard("b/old", 0, 50), heard("b/new", 60, 90)]

    run = listeners(known, found, declared("new"), NOW)

    assert run.fresh == [
        Listener(TOPIC, "b/old", EVER, at(60)), Listener(TOPIC, "b/new", NOW),
    ]  # fmt: skip
    assert [one.consumer for one in run.expected if one.until] == ["b/old"]
    expected = {"b/old": (EVER, at(60)), "b/new": (at(60), None)}
    assert who(known, found, declared("new")) == expected
    # The next run knows, and notes nothing again.
    again = listeners([*known, *run.fresh], found, declared("new"), NOW + TICK)
    assert again.fresh == []
    assert again.expected == run.expected


def test_a_stage_that_is_renamed_back_begins_where_the_other_one_ends() -> None:
    known = [
        Listener(TOPIC, "b/old", EVER), Listener(TOPIC, "b/old", EVER, at(60)),
        Listener(TOPIC, "b/new", at(60)),
    ]  # fmt: skip
    found = [heard("b/old", 0, 150), heard("b/new", 60, 90)]

    run = listeners(known, found, declared("old"), NOW)

    end = at(90) + TICK
    assert run.expected == [
        Listener(TOPIC, "b/new", at(60), end),
        Listener(TOPIC, "b/old", EVER, at(60)), Listener(TOPIC, "b/old", end),
    ]  # fmt: skip
    again = listeners([*known, *run.fresh], found, declared("old"), NOW + TICK)
    assert (again.fresh, again.expected) == ([], run.expected)
    # The other one has received nothing: it never listened.
    [old] = listeners(known, found[:1], declared("old"), NOW).expected[1:]
    assert old == Listener(TOPIC, "b/old", EVER)


def test_a_stage_that_is_removed_was_expected_until_now() -> None:
    known = [Listener(TOPIC, "b/s", at(0))]
    assert who(known, [], declared()) == {"b/s": (at(0), NOW)}
    # This service declares no stages here, so a removal cannot be seen.
    assert who(known, [], []) == {"b/s": (at(0), None)}


def test_a_retired_stage_may_subscribe_again() -> None:
    known = [Listener(TOPIC, "b/s", at(0)), Listener(TOPIC, "b/s", at(0), at(10))]
    found = listeners(known, [heard("b/s", -5, 8)], declared("s"), NOW)
    assert found.expected == [
        Listener(TOPIC, "b/s", at(-5), at(10)), Listener(TOPIC, "b/s", NOW),
    ]  # fmt: skip


def test_listener_retired_by_hand_comes_back_with_a_later_message() -> None:
    known = [Listener(TOPIC, "c/s", at(0), at(10))]
    # Its queue still had messages, or it stopped a little later.
    for sent in (9, 69):
        found = [heard("c/s", 0, 200, sent)]
        assert who(known, found, declared()) == {"c/s": (at(0), at(10))}

    found = [heard("c/s", 0, 200, sent=90)]
    # Perhaps it was retired days later, with an earlier time.
    long_after = at(90) + dt.timedelta(days=3)
    assert listeners(known, found, declared(), long_after).fresh == []

    run = listeners(known, found, declared(), NOW)

    assert run.fresh == [Listener(TOPIC, "c/s", at(90))]
    assert run.expected == [Listener(TOPIC, "c/s", at(0), at(10)), *run.fresh]
    again = listeners([*known, *run.fresh], [heard("c/s", 0, 500)], declared(), NOW)
    assert (again.fresh, again.expected) == ([], run.expected)
    retired = [*known, *run.fresh, Listener(TOPIC, "c/s", at(90), at(500))]
    assert listeners(retired, [heard("c/s", 0, 500)], declared(), NOW).fresh == []


def between(least: float, median: float, minutes: float = 60, **more: Any) -> Place:
    times = int(least * SECOND), int(median * SECOND)
    count = more.get("messages", 10)
    ends = at(0), at(minutes), at(0), at(minutes)
    return Place("q", "", "a", "b", *ends, count, *times)


def test_equally_long_transit_times_are_a_clock_difference() -> None:
    [found] = differences([between(7200, 7201)], [])
    assert (found.sender, found.receiver) == ("a", "b")
    assert found.ahead == dt.timedelta(hours=2)
    assert "clock of b is about 7,200 s ahead of that of a" in found.describe()
    # A destination that gets few messages says nothing against that.
    few = between(7199, 7200, messages=1)
    [found] = differences([between(7200, 7201), few], [])
    assert found.ahead == dt.timedelta(seconds=7199)
    [found] = differences([between(-7200, -7190)], [])
    assert "behind" in found.describe()


def test_one_message_with_a_wrong_time_does_not_change_the_others_verdicts() -> None:
    assert differences([between(-86_400, 1, minutes=100_000)], []) == []


def test_messages_that_waited_for_a_consumer_show_no_difference() -> None:
    # What was sent an hour earlier has waited for an hour longer.
    assert differences([between(7200, 7200 + 1800)], []) == []
    # They are all of one moment.
    assert differences([between(7200, 7201, minutes=0)], []) == []
    assert differences([between(7200, 7201, messages=2)], []) == []
    # Another message between these two was prompt, or is counted without being read.
    assert differences([between(7200, 7201), between(1, 2)], []) == []
    prompt = Line(
        T0.date(),
        "q",
        "a",
        "b/s",
        again=False,
        receivers=None,
        messages=1,
        first_us=0,
        last_us=0,
    )
    assert differences([between(7200, 7201)], [prompt]) == []
    for more in ({"sender": "c"}, {"consumer": "c/s"}):
        assert differences([between(7200, 7201)], [replace(prompt, **more)])
    assert differences([between(30, 31)], []) == []


def test_a_consumer_that_works_in_batches_shows_no_difference() -> None:
    hour, day = 3600, 24 * 60
    assert differences([between(hour, 12 * hour, minutes=90 * day)], []) == []
    assert differences([between(120, 600, minutes=2 * day)], []) == []


def test_a_renamed_service_has_one_clock() -> None:
    former = {"old": "a", "was": "b"}
    [found] = differences(
        [between(7200, 7201), replace(between(7200, 7201), sender="old"),
         replace(between(7200, 7201), receiver="was"),
         replace(between(7200, 7201), sender="was")],
        [], former,
    )  # fmt: skip
    assert (found.sender, found.receiver) == ("a", "b")
    prompt = Line(T0.date(), "q", "old", "was/s", False, None, 1, 0, 0)
    assert differences([between(7200, 7201)], [prompt], former) == []
