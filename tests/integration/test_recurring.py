"""Recurring messages: each tick is stored once, however many processes run."""

from __future__ import annotations

import datetime as dt
import logging
import math
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connections, transaction
from django.test import override_settings

from django_txmsg import Destination, every, tasks
from django_txmsg.errors import ConfigurationError, InvalidMessage
from django_txmsg.models import OutboxMessage, Schedule
from django_txmsg.runtime.per_process import PerProcess
from django_txmsg.scheduling.time_loop import keeping_time
from django_txmsg.scheduling.timekeeper import AFTER_FAILURE, Timekeeper
from django_txmsg.scheduling.timetable import recurring
from django_txmsg.testing import drain
from tests.faults import ManageProcess, wait_until
from tests.forgetting import forget_recurring
from tests.integration.test_store import Choice, Plain, Text
from tests.running import IMPATIENT, committing, declared, set_sequence, ship, txmsg

UTC = dt.timezone.utc
NOON = dt.datetime(2026, 6, 1, 12, tzinfo=UTC)
MINUTE = dt.timedelta(minutes=1)


@pytest.fixture(autouse=True)
def _nothing_leaves_by_itself(impatient: None) -> None:
    """Use settings without a thread that dispatches after commits, because the thread
    would outlive its test."""


class Clock:
    """A clock that a test sets. The database's clock is real."""

    def __init__(self, now: dt.datetime = NOON) -> None:
        self.now = now

    def __call__(self, using: str) -> dt.datetime:
        return self.now


@contextmanager
def keeping(
    expression: str = "* * * * *", **options: Any
) -> Iterator[tuple[Clock, Timekeeper]]:
    """Declare a recurring message. Yields the clock, and a timekeeper that has made its
    first check at noon."""
    options.setdefault("tz", "UTC")
    one = every(expression, options.pop("destination", "tests.tick"), **options)
    clock = Clock()
    try:
        timekeeper = Timekeeper([one.alias], now=clock)
        timekeeper.tick()
        yield clock, timekeeper
    finally:
        forget_recurring(one.name)


def stored(using: str = "default") -> list[str]:
    """Return the ticks of the stored messages, in the order in which they were
    stored."""
    rows = OutboxMessage.objects.using(using).order_by("id")
    return [row.headers["scheduled-for"] for row in rows]


def at(*minutes: int) -> list[str]:
    return [(NOON + number * MINUTE).isoformat() for number in minutes]


@pytest.mark.django_db
def test_a_tick_is_stored_when_it_comes_and_once() -> None:
    with keeping(body={"a": 1}, key="k", expires=dt.timedelta(hours=1)) as (
        clock,
        first,
    ):
        assert stored() == []
        clock.now += dt.timedelta(seconds=59.9)
        first.tick()
        assert stored() == []

        clock.now += dt.timedelta(seconds=0.1)
        second = Timekeeper(["default"], now=clock)
        first.tick()
        second.tick()
        first.tick()

    row = OutboxMessage.objects.get()
    assert stored() == at(1)
    assert (bytes(row.body), row.key) == (b'{"a":1}', "k")
    assert row.expires_at is not None
    assert (first.stored, second.stored) == (1, 0)


@pytest.mark.django_db
@pytest.mark.parametrize("paused", [True, False])
def test_a_declared_message_of_a_former_service_name_goes_on(paused: bool) -> None:
    """Its ticks are caught up from its last one, unless an operator has paused it."""
    with txmsg(SERVICE="before"), keeping(name="t", missed="all") as (clock, first):
        clock.now += MINUTE
        first.tick()
        if paused:
            call_command("txmsg", "schedule", "pause", "t", "--why", "Ticket 7.")
        with txmsg(SERVICE="after", FORMER_SERVICES=("before",)):
            clock.now += 2 * MINUTE
            Timekeeper(["default"], now=clock).tick()
    assert stored() == (at(1) if paused else at(1, 2, 3))
    row = Schedule.objects.get()
    assert row.service == "after"
    assert bool(row.paused_at) == paused
    assert row.paused_why == ("Ticket 7." if paused else "")


@pytest.mark.django_db
@pytest.mark.parametrize("name", ["\udcff", "a\0b"])
def test_a_name_that_no_database_can_store_is_unknown(name: str) -> None:
    with pytest.raises(CommandError, match="There is no recurring message"):
        call_command("txmsg", "schedule", "pause", name)
    with pytest.raises(CommandError, match="NUL or half of a surrogate"):
        call_command("txmsg", "schedule", "make", name, "* * * * *", "tests.t")


@pytest.mark.django_db
def test_a_tick_is_skipped_while_the_last_message_is_not_processed() -> None:
    options = {"destination": "tests.slow", "unique": "k", "unique_until": "processed"}
    with (
        declared(lambda message: None, "tests.slow"),
        keeping(**options) as (clock, timekeeper),
    ):
        for _ in range(3):
            clock.now += MINUTE
            timekeeper.tick()
            ship()
        assert stored() == at(1)
        assert timekeeper.stored == 1
        drain("tests.slow")
        clock.now += MINUTE
        timekeeper.tick()
    assert stored() == at(1, 4)


@pytest.mark.django_db
def test_the_latest_of_the_missed_ticks_is_made_up_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with keeping() as (clock, timekeeper):
        clock.now += dt.timedelta(days=400, seconds=7)
        timekeeper.tick()
        clock.now += MINUTE
        timekeeper.tick()

    made_up = 400 * 24 * 60
    assert stored() == at(made_up, made_up + 1)
    assert "ticks were missed from 2026-06-01T12:01:00+00:00 on" in caplog.text


@pytest.mark.django_db
@pytest.mark.parametrize("by_setting", [False, True])
def test_missed_all_catches_up_every_tick(by_setting: bool) -> None:
    options = {} if by_setting else {"missed": "all"}
    missed = "all" if by_setting else "latest"
    with txmsg(MISSED_TICKS=missed), keeping(**options) as (clock, timekeeper):
        clock.now += 5 * MINUTE
        timekeeper.tick()

    assert stored() == at(1, 2, 3, 4, 5)


@pytest.mark.django_db
def test_many_missed_ticks_of_one_message_keep_no_other_waiting() -> None:
    with (
        keeping(missed="all", destination="tests.many") as (clock, _),
        keeping(destination="tests.other"),
    ):
        clock.now += 1000 * MINUTE
        timekeeper = Timekeeper(["default"], now=clock)
        assert timekeeper._keep("default") == 0
        other = OutboxMessage.objects.filter(destination="tests.other")
        assert other.count() == 1
        assert OutboxMessage.objects.count() < 500
        timekeeper.tick()

    assert OutboxMessage.objects.count() == 1001


@pytest.mark.django_db
def test_a_clock_that_is_set_back_stops_nothing_and_doubles_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with keeping() as (clock, timekeeper):
        year = 60 * 24 * 365
        for minutes in (1, 2, year, 2.5, 3, 1.5, 2, 3, 4):
            clock.now = NOON + minutes * MINUTE
            timekeeper.tick()
            timekeeper.tick()

    assert stored() == at(1, 2, year, 3, 4)
    assert "the clock was set back" in caplog.text


@pytest.mark.django_db
def test_an_expression_that_changes_makes_up_for_nothing_and_loses_nothing() -> None:
    with keeping("0 * * * *") as (clock, old):
        clock.now += 60 * MINUTE
        old.tick()
        forget_recurring("tests.tick")
        clock.now += 31 * MINUTE
        every("*/5 * * * *", "tests.tick", missed="all", tz="UTC")
        new = Timekeeper(["default"], now=clock)
        new.tick()
        assert stored() == at(60)
        clock.now += 5 * MINUTE
        new.tick()
        assert stored() == at(60, 95)
        # A process that has the old code still.
        forget_recurring("tests.tick")
        every("0 * * * *", "tests.tick", tz="UTC")
        clock.now = NOON + 120 * MINUTE
        old.tick()

    assert stored() == at(60, 95, 120)


@pytest.mark.django_db
def test_a_tick_of_a_new_expression_is_missed_as_any_other() -> None:
    with keeping("0 * * * *") as (clock, _):
        forget_recurring("tests.tick")
        clock.now += 31 * MINUTE
        every("45 * * * *", "tests.tick", tz="UTC")
        Timekeeper(["default"], now=clock).tick()
        clock.now += 20 * MINUTE  # nobody is there at a quarter to
        Timekeeper(["default"], now=clock).tick()

    assert stored() == at(45)


@pytest.mark.django_db
def test_paused_ticks_are_not_stored_nor_caught_up() -> None:
    rows = Schedule.objects
    with keeping(missed="all") as (clock, timekeeper):
        assert rows.pause("service", "other")  # of another service
        assert rows.pause("tests", "tests.tick", by="ada", why="audit")
        assert not rows.pause("tests", "tests.tick")
        clock.now += 3 * MINUTE
        timekeeper.tick()
        assert stored() == []

        assert rows.resume("tests", "tests.tick")
        assert not rows.resume("tests", "tests.tick")
        Schedule.objects.update(last_tick=clock.now)  # by the test's clock
        timekeeper.tick()
        clock.now += MINUTE
        timekeeper.tick()

    assert stored() == at(4)


@pytest.mark.django_db
def test_a_pause_that_comes_between_stops_the_tick() -> None:
    with keeping() as _:
        row = Schedule.objects.get()
        Schedule.objects.pause("tests", "tests.tick")

        assert not Schedule.objects.advance(row, NOON + MINUTE, "")


@pytest.mark.django_db
def test_an_id_that_is_stored_already_is_not_stored_again() -> None:
    with keeping() as (clock, timekeeper):
        clock.now += MINUTE
        timekeeper.tick()
        Schedule.objects.all().delete()  # lost, and begun again at noon
        clock.now = NOON
        timekeeper.tick()
        clock.now += MINUTE
        timekeeper.tick()
        assert Schedule.objects.get().last_tick == clock.now

    assert stored() == at(1)


@pytest.mark.postgresql
@pytest.mark.django_db
def test_tick_is_stored_later_if_the_sequence_is_behind() -> None:
    with keeping() as (clock, timekeeper):
        clock.now += MINUTE
        timekeeper.tick()
        set_sequence(OutboxMessage, OutboxMessage.objects.get().pk)
        clock.now += MINUTE
        assert timekeeper._keep("default") == AFTER_FAILURE
        assert stored() == at(1)
        timekeeper.tick()

    assert stored() == at(1, 2)


@pytest.mark.django_db
def test_names_services_and_ticks_tell_ids_apart() -> None:
    with keeping() as (_, _), keeping(name="again"):
        first, second = recurring()
        ids = {one.message_id(tick) for one in (first, second) for tick in (NOON, None)
               if tick}  # fmt: skip
        here = NOON.astimezone(dt.timezone(dt.timedelta(hours=2)))
        assert first.message_id(here) == first.message_id(NOON)
        with txmsg(SERVICE="elsewhere"):
            ids |= {first.message_id(NOON)}

    assert len(ids) == 3
    assert all(isinstance(one, uuid.UUID) for one in ids)


@pytest.mark.django_db
def test_unstorable_recurring_message_is_retried_and_blocks_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with keeping(name="bad", body=object()) as (clock, timekeeper), keeping():
        timekeeper.tick()
        clock.now += MINUTE
        with caplog.at_level(logging.ERROR):
            assert timekeeper._keep("default") == AFTER_FAILURE
        assert stored() == at(1)
        assert "'bad' could not be stored after 2026-06-01 12:00:00" in caplog.text
        assert Schedule.objects.get(name="bad").last_tick == NOON


@pytest.mark.django_db(databases=["default", "other"])
def test_a_message_is_stored_in_its_own_database() -> None:
    with keeping(using="other") as (clock, timekeeper):
        clock.now += MINUTE
        Timekeeper(["default"], now=clock).tick()
        assert not timekeeper.is_idle("other")
        timekeeper.tick()

    assert Timekeeper(["other"]).is_idle("other")
    assert stored() == []
    assert stored("other") == at(1)
    assert not Schedule.objects.exists()
    with keeping():  # in another database than this timekeeper's
        assert Timekeeper(["other"]).is_idle("other")


@pytest.mark.django_db
def test_recurring_messages_of_the_settings_override_the_code() -> None:
    schedule = {
        "tests.tick": {"EVERY": "*/5 * * * *", "DESTINATION": "tests.five"},
        "nightly": {
            "EVERY": "0 3 * * *", "DESTINATION": "tests.night", "BODY": [1],
            "TZ": "Europe/Berlin", "MISSED": "all", "EXPIRES": 90, "BROKER": "default",
        },
    }  # fmt: skip
    with keeping(), txmsg(SCHEDULE=schedule):
        nightly, five = recurring()

    assert five.destination == "tests.five"
    assert (nightly.name, nightly.body, nightly.tz) == ("nightly", [1], "Europe/Berlin")
    assert nightly.expires == dt.timedelta(seconds=90)
    assert nightly.makes_up_all
    assert str(nightly.cron) == "0 3 * * * Europe/Berlin"


@pytest.mark.django_db
@pytest.mark.parametrize("night", ["2026-03-29", "2026-10-25"])
def test_a_nightly_message_leaves_once_when_the_clocks_change(night: str) -> None:
    """The clocks in Europe/Berlin go forward or back during the night, and a check runs
    every ten minutes. The nightly message is stored once."""
    with keeping("30 2 * * *", tz="Europe/Berlin", missed="all") as (clock, timekeeper):
        Schedule.objects.update(last_tick=f"{night}T00:00+02:00")
        start = dt.datetime.fromisoformat(f"{night}T00:00+02:00")
        for number in range(6 * 6):
            clock.now = start + 10 * number * MINUTE
            timekeeper.tick()

    assert len(stored()) == 1


@pytest.mark.django_db
def test_an_hourly_message_leaves_in_every_hour_of_a_change() -> None:
    with keeping("0 * * * *", tz="Europe/Berlin") as (clock, timekeeper):
        for night in ("2026-03-29", "2026-10-25"):
            start = dt.datetime.fromisoformat(f"{night}T00:00+00:00")
            Schedule.objects.update(last_tick=start)
            for number in range(6 * 6):
                clock.now = start + 10 * number * MINUTE
                timekeeper.tick()

    assert len(stored()) == len(set(stored())) == 2 * 5


@committing
def test_timekeepers_that_race_for_a_tick_store_it_once() -> None:
    with keeping(missed="all") as (clock, _):
        clock.now += 30 * MINUTE
        start = threading.Barrier(6)
        keepers = [Timekeeper(["default"], now=clock) for _ in range(6)]

        def race(keeper: Timekeeper) -> None:
            start.wait(30)
            try:
                keeper.tick()
            finally:
                connections.close_all()

        threads = [threading.Thread(target=race, args=[one]) for one in keepers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

    assert stored() == at(*range(1, 31))
    assert sum(one.stored for one in keepers) == 30


@committing
@pytest.mark.postgresql
def test_a_connection_that_breaks_costs_no_tick() -> None:
    settings = txmsg(
        SCHEDULE={"tick": {"EVERY": "* * * * * *", "DESTINATION": "tests.second"}},
        MISSED_TICKS="all",
    )
    breaking = (
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    with settings:
        timekeeper = Timekeeper(["default"])
        with keeping_time([timekeeper], lambda: None):
            for number in (1, 2):
                wait_until(lambda n=number: timekeeper.stored >= n, deadline=60)
                with connections["default"].cursor() as cursor:
                    cursor.execute(breaking)
            wait_until(lambda: timekeeper.stored > 4, deadline=60)

    ticks = [dt.datetime.fromisoformat(one) for one in stored()]
    gaps = {later - earlier for earlier, later in pairwise(ticks)}
    assert gaps == {dt.timedelta(seconds=1)}


@committing
def test_tick_of_a_rolled_back_transaction_is_stored_later() -> None:
    with keeping() as (clock, timekeeper):
        clock.now += MINUTE
        with suppress(KeyError), transaction.atomic():
            timekeeper.tick()
            raise KeyError
        assert stored() == []
        timekeeper.tick()

    assert stored() == at(1)


@committing
@pytest.mark.parametrize("command", ["relay", "txmsg run"])
def test_schedule_thread_runs_until_stopped(command: str) -> None:
    schedule = {"tick": {"EVERY": "* * * * * *", "DESTINATION": "tests.second"}}
    settings = {**IMPATIENT, "SCHEDULE": schedule}
    with ManageProcess(*command.split(), txmsg=settings) as relay:
        wait_until(
            lambda: (
                OutboxMessage.objects.filter(dispatched_at__isnull=False).count() > 1
            ),
            deadline=60,
            message=lambda: relay.output,
        )
        relay.terminate()
        relay.succeed()

    ticks = stored()
    assert len(set(ticks)) == len(ticks)


@committing
def test_tasks_of_old_and_new_code_store_the_next_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Execute Celery's task in turns in two processes, whose code declares different
    expressions."""
    clock = Clock()
    processes = [
        (expression, PerProcess(lambda *using: Timekeeper(using, now=clock)))
        for expression in ("* * * * *", "*/5 * * * *")
    ]

    def take_turns() -> None:
        for expression, timekeeper in processes:
            monkeypatch.setattr(tasks, "_TIMEKEEPER", timekeeper)
            one = every(expression, "tests.tick", tz="UTC")
            try:
                tasks.relay_outbox()
            finally:
                forget_recurring(one.name)

    with txmsg():
        take_turns()
        assert stored() == []
        clock.now += 5 * MINUTE
        take_turns()
    assert stored() == at(5)


@committing
def test_a_relay_that_runs_once_stores_what_is_due() -> None:
    clock = Clock()
    with txmsg(), keeping():
        Schedule.objects.update(last_tick=NOON)
        call_command("relay", "--once", verbosity=0)

    assert OutboxMessage.objects.filter(dispatched_at__isnull=False).count() == 1
    assert clock.now == NOON


@pytest.mark.django_db
def test_a_tick_goes_its_whole_way_and_says_which_it_is() -> None:
    seen = []

    def handler(message: Any) -> None:
        seen.append((message.body, message.headers["scheduled-for"]))

    with declared(handler, "tests.tick"), keeping(body=[1]) as (clock, timekeeper):
        clock.now += MINUTE
        timekeeper.tick()
        drain("tests.tick")

    assert seen == [([1], *at(1))]


def test_two_recurring_messages_of_one_name_are_refused() -> None:
    try:
        every("* * * * *", "tests.once", {"a": 1})
        every("* * * * *", "tests.once", {"a": 1})  # imported twice
        with pytest.raises(ConfigurationError, match="Two recurring"):
            every("* * * * *", "tests.once", {"a": 2})
    finally:
        forget_recurring("tests.once")


#: A valid expression that is longer than its column.
LONG = ",".join(["0"] * 128) + " * * * *"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"expression": "bad"}, ConfigurationError),
        ({"tz": "Europe/Bärlin"}, ConfigurationError),
        ({"missed": "some"}, ConfigurationError),
        ({"name": "x" * 256}, ConfigurationError),
        ({"expression": LONG}, ConfigurationError),
        ({"destination": "no such place"}, InvalidMessage),
        ({"destination": Plain.PLACE}, InvalidMessage),
    ],
)
def test_invalid_every_is_refused_at_its_declaration(
    arguments: dict[str, Any], error: type[Exception]
) -> None:
    known = recurring()
    given: dict[str, Any] = {"expression": "* * * * *", "destination": "tests.tick"}
    with pytest.raises(error):
        every(**{**given, **arguments})

    assert recurring() == known


def test_a_typed_destination_recurs() -> None:
    try:
        one = every("* * * * *", Destination("tests.typed", dict))
        assert one.name == "tests.typed"
    finally:
        forget_recurring("tests.typed")


@pytest.mark.django_db
@pytest.mark.parametrize("member", [Choice.PLACE, Text.PLACE])
def test_a_text_enums_member_recurs_to_its_value(member: Any) -> None:
    unique = {"unique": "k", "unique_until": "processed"}
    with (
        declared(lambda message: None, "orders.place"),
        keeping(destination=member, **unique) as (clock, timekeeper),
    ):
        (one,) = recurring()
        one.check()
        assert (one.name, str(one.destination)) == ("orders.place", "orders.place")
        clock.now += MINUTE
        timekeeper.tick()

    assert OutboxMessage.objects.get().destination == "orders.place"


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (5, "must be a dict like"),
        ({"EVERY": "* * * * *"}, "must be a dict like"),
        ({"EVERY": "often", "DESTINATION": "a"}, "not a cron expression"),
        ({"EVERY": "* * * * *", "DESTINATION": "a b"}, "cannot be used"),
        ({"EVERY": "* * * * *", "DESTINATION": "a", "TZ": "Mars"}, "No time zone"),
        ({"EVERY": "* * * * *", "DESTINATION": "a", "BODI": 1}, 'mean "BODY"'),
        ({"EVERY": "* * * * *", "DESTINATION": "a", "MISSED": "no"}, "not str 'no'"),
        ({"EVERY": 5, "DESTINATION": "a"}, "must be a string, not int 5"),
        *(
            ({"EVERY": "* * * * *", "DESTINATION": "a", "EXPIRES": seconds}, "at most")
            for seconds in (1e300, math.nan)
        ),
    ],
)
def test_check_reports_errors_in_the_schedule_setting(entry: Any, said: str) -> None:
    from django_txmsg import conf

    with override_settings(TXMSG={"SCHEDULE": {"x": entry}}):
        (problem,) = conf.problems()

    assert problem.path.startswith('TXMSG["SCHEDULE"]["x"]')
    assert said in f"{problem.message} {problem.hint}"
