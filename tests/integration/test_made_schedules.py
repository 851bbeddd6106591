"""Recurring messages that are created at run time: by code, on the page, and by
command."""

from __future__ import annotations

import datetime as dt
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from io import StringIO
from typing import Any

import cronsim
import pytest
from django.contrib.admin.models import LogEntry
from django.core.management import CommandError, call_command
from django.db import connections, transaction
from django.test import Client

from django_txmsg import every, make_recurring, remove_recurring
from django_txmsg.errors import ConfigurationError, InvalidMessage
from django_txmsg.models import AuditEntry, OutboxMessage, Schedule
from django_txmsg.monitoring import schedule
from django_txmsg.runtime import liveness
from django_txmsg.scheduling.timekeeper import Timekeeper
from tests.admin.conftest import somebody  # noqa: F401 - a fixture
from tests.faults import wait_until
from tests.forgetting import forget_recurring
from tests.integration.test_recurring import LONG, MINUTE, NOON, Clock, at, stored
from tests.running import committing, txmsg

URL = "/admin/django_txmsg/schedule/"


@pytest.fixture(autouse=True)
def _nothing_leaves_by_itself(impatient: None) -> None:
    """Use settings without a thread that dispatches after commits, because the thread
    would outlive its test."""


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timekeeper(clock: Clock) -> Timekeeper:
    """Return a timekeeper that has made one check for due messages. Its process
    declares no recurring message."""
    found = Timekeeper(["default"], now=clock)
    assert not found.is_idle("default")
    found.tick()
    return found


def make(name: str = "made", expression: str = "* * * * *", **options: Any) -> None:
    make_recurring(name, expression, "tests.made", tz="UTC", **options)
    Schedule.objects.update(last_tick=NOON)  # by the test's clock


def bodies() -> list[str]:
    rows = OutboxMessage.objects.order_by("id")
    return [bytes(row.body).decode() for row in rows]


@pytest.mark.django_db
def test_made_message_is_stored_at_its_ticks_until_removed(
    clock: Clock, timekeeper: Timekeeper
) -> None:
    make(body={"a": 1}, key="k", expires=dt.timedelta(hours=1), headers={"h": "x"})
    for _ in range(2):
        clock.now += MINUTE
        timekeeper.tick()
        timekeeper.tick()
    assert stored() == at(1, 2)
    row = OutboxMessage.objects.order_by("pk")[0]
    assert (bytes(row.body), row.key, row.headers["h"]) == (b'{"a":1}', "k", "x")
    assert row.expires_at is not None

    assert remove_recurring("made")
    assert not remove_recurring("made")
    clock.now += MINUTE
    timekeeper.tick()
    assert stored() == at(1, 2)


@pytest.mark.django_db
def test_making_a_recurring_message_again_changes_it(
    clock: Clock, timekeeper: Timekeeper
) -> None:
    make(body=1)
    clock.now += MINUTE
    timekeeper.tick()
    make(expression="*/5 * * * *", body=2)
    Schedule.objects.update(last_tick=clock.now)
    clock.now += 4 * MINUTE
    timekeeper.tick()
    assert stored() == at(1, 5)
    assert bodies() == ["1", "2"]


@pytest.mark.django_db
def test_paused_recurring_message_stores_nothing(
    clock: Clock, timekeeper: Timekeeper
) -> None:
    make()
    assert Schedule.objects.pause("tests", "made")
    clock.now += MINUTE
    timekeeper.tick()
    assert stored() == []


@committing
def test_recurring_message_is_made_and_removed_by_its_transaction() -> None:
    for work in (make, lambda: remove_recurring("kept")):
        make("kept")
        with suppress(KeyError), transaction.atomic():
            work()
            raise KeyError
    assert Schedule.objects.get().name == "kept"


@pytest.mark.django_db
def test_each_recurring_message_counts_as_a_turn_of_the_loop(
    clock: Clock, timekeeper: Timekeeper
) -> None:
    for name in "abc":
        make(name, body=name)
    clock.now += MINUTE
    began, turned = [time.monotonic()], []

    def look(execute: Any, sql: str, *rest: Any) -> Any:
        if sql.startswith("UPDATE"):
            now = time.monotonic()
            turned.append(now - liveness.state().silent > began[-1])
            began.append(now)
        return execute(sql, *rest)

    liveness.begin("timekeeper")
    try:
        with connections["default"].execute_wrapper(look):
            timekeeper.tick()
    finally:
        liveness.ended()

    assert turned == [True, True, True]


@pytest.mark.django_db
def test_a_check_evaluates_no_expression_that_is_not_due(
    clock: Clock, timekeeper: Timekeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        make(f"hourly-{number}", f"{number} 13 * * *")
    make("due", "* * * * *", body=1)
    clock.now += MINUTE
    timekeeper.tick()
    evaluated: list[str] = []
    original = cronsim.CronSim

    def evaluate(expression: str, *rest: Any, **options: Any) -> Any:
        evaluated.append(expression)
        return original(expression, *rest, **options)

    monkeypatch.setattr(cronsim, "CronSim", evaluate)
    for _ in range(3):
        clock.now += MINUTE / 4
        timekeeper.tick()
    assert evaluated == []
    clock.now += MINUTE / 4
    timekeeper.tick()
    assert set(evaluated) == {"* * * * *"}
    assert bodies() == ["1", "1"]


@committing
@pytest.mark.postgresql
def test_a_locked_recurring_message_delays_no_other(
    clock: Clock, timekeeper: Timekeeper
) -> None:
    make("a", body="a")
    make("b", body="b")
    clock.now += MINUTE

    def tick() -> None:
        try:
            timekeeper.tick()
        finally:
            connections.close_all()

    thread = threading.Thread(target=tick)
    with transaction.atomic():
        make_recurring("a", "* * * * *", "tests.made", "changed", tz="UTC")
        thread.start()
        wait_until(lambda: bodies() == ['"b"'], deadline=10)
        thread.join(10)
        assert not thread.is_alive()
    assert bodies() == ['"b"']


@committing
@pytest.mark.postgresql
def test_a_tick_and_a_removal_at_once_leave_no_message_behind() -> None:
    """A tick begins while a transaction removes the recurring message. The tick waits
    for the commit, finds no row, and stores nothing."""
    clock = Clock()
    timekeeper = Timekeeper(["default"], now=clock)
    make()

    def tick() -> None:
        try:
            timekeeper.tick()
        finally:
            connections.close_all()

    clock.now += MINUTE
    thread = threading.Thread(target=tick)
    with transaction.atomic():
        assert remove_recurring("made")
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()  # it waits for us
    thread.join(60)
    assert stored() == []
    assert not Schedule.objects.exists()


@pytest.mark.django_db
def test_what_the_code_declares_comes_first(
    clock: Clock, timekeeper: Timekeeper
) -> None:
    make("both", body="made")
    every("* * * * *", "tests.declared", "declared", name="both", tz="UTC")
    try:
        with pytest.raises(InvalidMessage, match="is declared by every"):
            make("both")
        clock.now += MINUTE
        timekeeper.tick()
    finally:
        forget_recurring("both")
    assert bodies() == ['"declared"']


@pytest.mark.django_db
@pytest.mark.parametrize(
    "made",
    [
        {"expression": "?", "destination": "d"},
        {"expression": "* * * * *", "destination": "d", "expires": "PT5M"},
        ["* * * * *", "d"],
    ],
    ids=["expression", "expires", "list"],
)
def test_a_row_that_this_code_cannot_read_keeps_no_other_from_its_ticks(
    clock: Clock, timekeeper: Timekeeper, caplog: pytest.LogCaptureFixture, made: object
) -> None:
    make("bad")
    Schedule.objects.update(made=made)
    make("good")
    clock.now += MINUTE
    timekeeper.tick()
    assert stored() == at(1)
    assert "'bad' cannot be read" in caplog.text


@pytest.mark.django_db
def test_recurring_message_of_another_service_is_left_alone(
    clock: Clock, timekeeper: Timekeeper
) -> None:
    with txmsg(SERVICE="elsewhere"):
        make()
    assert not remove_recurring("made")
    clock.now += MINUTE
    timekeeper.tick()
    assert stored() == []


@pytest.mark.django_db
def test_recurring_message_of_a_former_service_name_goes_on(
    clock: Clock, timekeeper: Timekeeper
) -> None:
    with txmsg(SERVICE="elsewhere"):
        make()
        make("both", body="former")
        make("removed")
    make("both", body="own")
    with txmsg(FORMER_SERVICES=("elsewhere",)):
        assert remove_recurring("removed")
        clock.now += MINUTE
        timekeeper.tick()
    assert sorted(bodies()) == ['"own"', "null"]
    assert remove_recurring("made")


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"expression": "often"}, ConfigurationError),
        ({"expression": LONG}, ConfigurationError),
        ({"body": {"a": "\0"}}, InvalidMessage),
        ({"name": "x" * 256}, ConfigurationError),
        ({"name": ""}, ConfigurationError),
        ({"missed": "some"}, ConfigurationError),
        ({"body": b"bytes"}, InvalidMessage),
        ({"body": object()}, InvalidMessage),
        ({"broker": "nowhere"}, InvalidMessage),
        ({"key": ""}, InvalidMessage),
        ({"unique": "k", "unique_until": "processed"}, InvalidMessage),
    ],
)
def test_unstorable_recurring_message_is_refused(
    options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        make(**options)
    assert not Schedule.objects.exists()


@pytest.fixture
def operator(somebody: Callable[..., Client]) -> Client:  # noqa: F811 - the fixture
    """A user who may create recurring messages."""
    return somebody("view_schedule", "make_schedule")


FORM = {
    "name": "made",
    "expression": "0 3 * * *",
    "tz": "Europe/Berlin",
    "destination": "tests.made",
    "body": '{"html": "<b>"}',
}


@pytest.mark.django_db
def test_the_page_makes_and_removes_a_recurring_message(operator: Client) -> None:
    page = operator.post(f"{URL}make/", FORM, follow=True).content.decode()
    assert "Made recurring message made: 0 3 * * * to tests.made." in page
    assert "Europe/Berlin" in page
    ((one,),) = ([timing.recurring for timing in schedule.read()],)
    assert one is not None
    assert (one.body, one.tz) == ({"html": "<b>"}, "Europe/Berlin")

    operator.post(f"{URL}make/", FORM | {"expression": "0 4 * * *"})
    for wrong in ({"body": "{"}, {"expression": "<b>"}, {"name": ""}):
        page = operator.post(f"{URL}make/", FORM | wrong, follow=True).content.decode()
        assert "Nothing was changed" in page
        assert "<b>" not in page
    for _ in range(2):
        operator.post(f"{URL}remove/", {"name": "made"})
    assert not Schedule.objects.exists()
    said = [
        "Made recurring message made: 0 3 * * * to tests.made.",
        "Changed recurring message made: 0 4 * * * to tests.made.",
        "Removed recurring message made.",
    ]
    assert [entry.text for entry in AuditEntry.objects.order_by("pk")] == said
    entries = LogEntry.objects.order_by("pk")
    assert [entry.change_message for entry in entries] == said


@pytest.mark.django_db
def test_making_needs_its_permission(somebody: Callable[..., Client]) -> None:  # noqa: F811 - the fixture
    make()
    client = somebody("view_schedule", "pause_schedule")
    page = client.get(URL).content.decode()
    assert "made" in page
    assert "Make it" not in page
    assert ">Remove<" not in page
    for verb in ("make", "remove"):
        assert client.post(f"{URL}{verb}/", FORM).status_code == 403
    assert Schedule.objects.count() == 1


@pytest.mark.django_db
def test_the_command_makes_and_removes_a_recurring_message() -> None:
    def told(*arguments: str) -> str:
        out = StringIO()
        call_command("txmsg", "schedule", *arguments, stdout=out)
        return out.getvalue()

    made = ["make", "made", "0 3 * * *", "tests.made", "--body", '{"a": 1}']
    assert "Made recurring message made" in told(*made)
    assert "Changed recurring message made" in told(*made)
    (found,) = json.loads(told("list", "--json"))["recurring"]
    assert (found["name"], found["every"]) == ("made", "0 3 * * *")
    with pytest.raises(CommandError, match="Nothing was changed"):
        told("make", "made", "0 3 * * *", "tests.made", "--body", "{")
    call_command("txmsg", "schedule", *made[:-2], body={"a": 2}, stdout=StringIO())
    assert Schedule.objects.get().made["body"] == {"a": 2}
    assert told("remove", "made") == "Removed recurring message made.\n"
    with pytest.raises(CommandError, match="was made here"):
        told("remove", "made")
    assert AuditEntry.objects.count() == 4
