"""`@stage(rate=, per=)`: messages over the rate wait in the inbox, separately for each
key."""

from __future__ import annotations

import datetime as dt
import itertools
import threading
import uuid
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import OperationalError, connection
from django.db.models import F, Max, Min
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_txmsg import Message, RedeliveryPolicy, stage, wire
from django_txmsg.checks import stages as checks
from django_txmsg.consuming.consumer import (
    Consumer,
    _record_options,
    wake_for_parked,
)
from django_txmsg.envelope.stage_options import Rate
from django_txmsg.errors import ConfigurationError
from django_txmsg.models import Attempt, DeadLetter, InboxMessage, RateLine
from django_txmsg.models import stage as rate_lines
from django_txmsg.models.queue import QueueMessage
from django_txmsg.testing import drain
from tests.app.models import Effect
from tests.factories import WorkerFactory, ago
from tests.faults import ManageProcess, wait_until
from tests.running import (
    IMPATIENT,
    Script,
    committing,
    declared,
    put,
    running,
    send,
    step,
    thread_of,
    txmsg,
)

pytestmark = [committing, pytest.mark.usefixtures("impatient")]

BROKER = "database://?poll=0.01&lease=2"
HOUR = 3600.0


def effect(message: Message) -> None:
    Effect.objects.create(
        name=message.headers.get("tenant", ""), message_id=str(message.id)
    )


def waiting() -> list[InboxMessage]:
    return list(InboxMessage.objects.filter(due_at__isnull=False).order_by("due_at"))


def seconds_until(row: InboxMessage) -> float:
    assert row.due_at is not None
    return (row.due_at - timezone.now()).total_seconds()


@pytest.mark.parametrize("mode", ["outbox", "none", "best_effort_1pc", "broker_only"])
def test_messages_over_the_rate_wait_for_their_slots(mode: Any) -> None:
    """Messages over the rate leave the queue, and no attempt is counted. Later messages
    get later slots."""
    script = Script()
    with declared(script, transaction=mode, rate="1/h") as one:
        for _ in range(3):
            put(one.destination)
        step(one, times=4)
    assert script.attempts == [1]
    assert not QueueMessage.objects.filter(queue=one.destination).exists()
    second, third = waiting()
    assert [row.attempts for row in (second, third)] == [0, 0]
    assert 0.9 * HOUR < seconds_until(second) <= HOUR
    assert 1.9 * HOUR < seconds_until(third) <= 2 * HOUR
    assert third.last_error == "over the rate of 1/h"


def test_a_busy_thread_takes_several_slots_with_one_statement() -> None:
    """A thread processes many messages and stays below the rate. It takes several slots
    with one statement."""
    with declared(effect, rate="9000000/m") as one:
        for _ in range(40):
            put(one.destination)
        with CaptureQueriesContext(connection) as queries:
            step(one, times=40)
    lines = [query for query in queries if "rateline" in query["sql"].lower()]
    assert 0 < len(lines) < 40
    assert Effect.objects.count() == 40
    assert RateLine.objects.get().taken >= 40


def test_each_value_of_the_header_has_its_own_rate() -> None:
    with declared(effect, rate="1/h", per="tenant") as one:
        for tenant in ("a", "a", "a", "b", "b"):
            send(one.destination, headers={"tenant": tenant})
        send(one.destination)
        step(one, times=8)
    names = Effect.objects.order_by("name").values_list("name", flat=True)
    assert list(names) == ["", "a", "b"]
    assert len(waiting()) == 3


def test_a_key_with_many_overdue_messages_does_not_delay_another() -> None:
    """After an outage, a key has many overdue messages. They get new slots, and the
    message of another key is processed immediately."""
    with declared(effect, rate="2/h", per="tenant") as one:
        for _ in range(30):
            send(one.destination, headers={"tenant": "many"})
        step(one, times=32)
        send(one.destination, headers={"tenant": "few"})
        day = dt.timedelta(days=1)
        InboxMessage.objects.filter(due_at__isnull=False).update(
            due_at=F("due_at") - day
        )
        RateLine.objects.update(origin=F("origin") - day.total_seconds())
        step(one, times=6)
    assert sorted(Effect.objects.values_list("name", flat=True)) == [
        "few", "many", "many",
    ]  # fmt: skip
    rows = waiting()
    assert len(rows) == 28
    apart = [
        round((after.due_at - before.due_at).total_seconds())  # type: ignore[operator]
        for before, after in itertools.pairwise(rows)
    ]
    assert set(apart) <= {1799, 1800, 1801}
    assert 0 < seconds_until(rows[0]) <= HOUR / 2


def test_a_message_waits_for_its_slot_once() -> None:
    with declared(effect, rate="1/h") as one:
        send(one.destination)
        send(one.destination)
        step(one, times=3)
        (row,) = waiting()
        _let_pass(row, HOUR)
        step(one)
    assert Effect.objects.count() == 2
    assert not waiting()
    assert InboxMessage.objects.filter(attempts=1).count() == 2
    assert RateLine.objects.get().taken == 2


def _let_pass(row: InboxMessage, seconds: float) -> None:
    row.due_at = row.due_at and row.due_at - dt.timedelta(seconds=seconds)
    row.save(update_fields=["due_at"])
    RateLine.objects.update(origin=F("origin") - seconds)


def test_a_redelivery_takes_a_slot_of_its_own() -> None:
    script = Script(ValueError(), None)
    with declared(script, rate="1/h") as one:
        send(one.destination)
        step(one, times=2)
        (row,) = waiting()
        assert (row.attempts, row.slot, script.attempts) == (1, 1, [1])
        assert seconds_until(row) > 0.9 * HOUR
        _let_pass(row, HOUR)
        step(one)
    assert script.attempts == [1, 2]
    assert Attempt.objects.count() == 1


def test_a_copy_of_a_waiting_message_does_not_move_it() -> None:
    with declared(effect, rate="1/h") as one:
        put(one.destination)
        sent = put(one.destination)
        step(one, times=2)
        before = waiting()
        put(one.destination, message_id=sent)
        step(one)
    (row,) = waiting()
    assert (row.due_at, row.slot) == (before[0].due_at, before[0].slot)
    assert row.deliveries == 2


def test_a_claimed_message_is_given_back_if_its_slot_is_refused_at_a_stop() -> None:
    stop = threading.Event()

    def refuse(execute: Any, sql: str, *rest: Any) -> Any:
        if "rateline" in sql:
            stop.set()
            raise OperationalError("refused")
        return execute(sql, *rest)

    with declared(Script(ValueError()), rate="600/m") as stage:
        put(stage.destination)
        step(stage)
        thread = thread_of(stage, stop)
        wake_for_parked([thread])
        with connection.execute_wrapper(refuse):
            thread._step()
        thread._close()
    assert stop.is_set()
    row = InboxMessage.objects.get()
    assert (row.attempts, row.lease_token) == (1, None)


def test_a_worker_that_dies_after_the_slot_loses_only_the_slot() -> None:
    """A worker dies after it has taken a slot for a message. When the lease has ended,
    the message is claimed again and takes another slot."""
    died: list[int] = []

    def handler(message: Message) -> None:
        if not died and message.delivery_attempt == 1 and message.body == "b":
            died.append(RateLine.objects.get().taken)
            raise KeyboardInterrupt
        effect(message)

    with declared(handler, rate="1/h") as one:
        send(one.destination, "a")
        send(one.destination, "b")
        step(one, times=2)
        _let_pass(waiting()[0], HOUR)
        with pytest.raises(KeyboardInterrupt):
            step(one)
        (row,) = waiting()
        assert (row.slot, row.key, row.processed_at) == (None, "", None)
        InboxMessage.objects.filter(pk=row.pk).update(lease_until=ago(minutes=1))
        step(one)
        (row,) = waiting()
        assert row.slot == 2
        assert 0.9 * HOUR < seconds_until(row) <= HOUR
        _let_pass(row, HOUR)
        step(one)
    assert died == [2]
    assert Effect.objects.count() == 2


@pytest.mark.parametrize(("rate", "hours"), [("2/h", 0.5), ("1/d", 24)])
def test_a_changed_rate_moves_the_messages_that_wait(rate: str, hours: float) -> None:
    with declared(effect, rate="1/h") as one:
        for _ in range(4):
            send(one.destination)
        step(one, times=4)
        name, destination = one.name, one.destination
    with declared(effect, destination, name=name, rate=rate) as changed:
        Consumer([changed])._begin("default")
    after = [seconds_until(row) / HOUR for row in waiting()]
    expected = [hours * number for number in (1, 2, 3)]
    assert after == pytest.approx(expected, abs=0.05 * hours)


@pytest.mark.parametrize("rate", ["2/h", "1/d", None])
def test_a_change_of_rate_moves_a_few_messages_at_a_time(
    rate: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ends before it has moved all messages does not stop the next
    process from moving the others."""
    monkeypatch.setattr(rate_lines, "MOVED", 2)
    with declared(effect, rate="1/h") as old:
        for _ in range(6):
            send(old.destination)
        step(old, times=6)
    before = {row.pk: row.due_at for row in waiting()}
    new = replace(old, rate=rate and Rate.parse(rate))
    moved: list[int] = []

    def between() -> None:
        moved.append(sum(row.due_at != before[row.pk] for row in waiting()))
        if len(moved) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _record_options(new, between)
    _record_options(new, between)
    assert moved[0] == 2
    assert len(moved) >= 3
    assert moved[-1] == 5
    hours = {"2/h": 0.5, "1/d": 24.0}.get(rate or "", 0.0)
    after = [seconds_until(row) / HOUR for row in waiting()]
    expected = [hours * number for number in (1, 2, 3, 4, 5)]
    assert after == pytest.approx(expected, abs=0.05 * (hours or 1))


@pytest.mark.parametrize("rate", ["100/s", None])
def test_what_old_code_parked_under_its_rate_moves_after_its_end(
    rate: str | None,
) -> None:
    """A process with the old rate parks messages after a process with the new rate has
    begun. When the old process has ended, its messages get the new rate."""
    with declared(effect, rate="1/h") as old:
        new = replace(old, rate=rate and Rate.parse(rate))
        worker = WorkerFactory(stages=[old.name])
        consumer = Consumer([new])
        consumer._begin("default")
        consumer._look_after_process()
        for _ in range(3):
            send(old.destination)
        step(old, times=3, parked=False)
        send(old.destination)
        step(new, parked=False)
        assert seconds_until(waiting()[-1]) > HOUR
        worker.delete()
        consumer._look_at_beat = 0
        consumer._look_after_process()
        consumer._begin("default")
        assert seconds_until(waiting()[-1]) < 5


def test_end_of_a_peer_applies_the_options_of_its_own_stages_again() -> None:
    with declared(effect, rate="1/h") as one, declared(effect, rate="1/h") as other:
        worker = WorkerFactory(stages=[one.name, "elsewhere"])
        consumer = Consumer([one, other])
        consumer._begin("default")
        consumer._look_after_process()
        worker.delete()
        consumer._look_at_beat = 0
        consumer._look_after_process()
        with CaptureQueriesContext(connection) as queries:
            consumer._begin("default")
    sql = " ".join(query["sql"] for query in queries)
    assert one.name in sql
    assert other.name not in sql


def test_messages_of_a_peer_that_ends_during_the_start_are_moved() -> None:
    """A process with the old rate parks its last messages, and ends, while a process
    with the new rate writes its first heartbeat."""
    ended = False
    with declared(effect, rate="1/h") as old:
        worker = WorkerFactory(stages=[old.name])
        for _ in range(3):
            send(old.destination)

        def end_first(execute: Any, sql: str, *rest: Any) -> Any:
            nonlocal ended
            if not ended and sql.startswith('INSERT INTO "django_txmsg_worker"'):
                ended = True
                step(old, times=3, parked=False)
                worker.delete()
            return execute(sql, *rest)

        consumer = Consumer([replace(old, rate=Rate.parse("100/s"))])
        with connection.execute_wrapper(end_first):
            consumer.run(once=True)
    assert ended
    assert Effect.objects.count() == 3


def test_messages_that_wait_go_on_if_the_stage_has_no_rate_any_more() -> None:
    with declared(effect, rate="1/d") as one:
        for _ in range(3):
            send(one.destination)
        step(one, times=3)
        name, destination = one.name, one.destination
    assert len(waiting()) == 2
    with declared(effect, destination, name=name) as changed:
        Consumer([changed])._begin("default")
        step(changed, times=2)
    assert Effect.objects.count() == 3


def test_a_changed_per_gives_waiting_messages_slots_of_their_new_lines() -> None:
    """The option `per` of a stage changes while messages wait. The messages get new
    slots. Slots are numbered separately for each key, so a message that kept its old
    number might wait for years."""
    with declared(effect, rate="1/h") as one:
        send(one.destination, headers={"tenant": "a"})
        step(one)
        RateLine.objects.update(taken=9000, origin=F("origin") - 8999 * HOUR)
        for _ in range(2):
            send(one.destination, headers={"tenant": "a"})
        step(one, times=2)
        assert [row.slot for row in waiting()] == [9000, 9001]
        name, destination = one.name, one.destination
    with declared(effect, destination, name=name, rate="1/h", per="tenant") as changed:
        send(changed.destination, headers={"tenant": "a"})
        step(changed)
        InboxMessage.objects.filter(slot=9000).update(due_at=ago(seconds=1))
        step(changed)
    (moved,) = [row for row in waiting() if row.slot != 9001]
    assert moved.slot == 1
    assert 0.9 * HOUR < seconds_until(moved) <= HOUR


def test_a_message_whose_headers_cannot_be_kept_is_buried_without_a_slot() -> None:
    with declared(effect, rate="1/h") as one:
        put(one.destination)
        put(one.destination, headers={"txmsg-id": "no uuid"})
        step(one, times=2)
    assert DeadLetter.objects.get().reason == "malformed_id"
    assert RateLine.objects.get().taken == 1
    assert not waiting()


MINUTES = dt.timedelta(minutes=1)


def test_a_message_that_expires_before_its_slot_leaves_the_slot_to_the_next() -> None:
    """A burst of messages expires before their slots. They wait for their expiry, and
    then become dead letters. The next message gets the first free slot."""
    with declared(effect, rate="1/h", per="tenant") as one:
        for _ in range(3):
            send(one.destination, headers={"tenant": "a"}, expires=50 * MINUTES)
        send(one.destination, headers={"tenant": "a"}, expires=70 * MINUTES)
        send(one.destination, headers={"tenant": "b"}, expires=50 * MINUTES)
        step(one, times=5)
        assert Effect.objects.count() == 2
        *expiring, last = waiting()
        assert [row.attempts for row in expiring] == [0, 0]
        assert [round(seconds_until(row) / 60) for row in expiring] == [50, 50]
        assert last.slot == 1
        assert 0.9 * HOUR < seconds_until(last) <= HOUR
        for row in expiring:
            row.headers["txmsg-expires"] = wire.format_instant(ago(seconds=1))
            row.due_at = ago(seconds=1)
            row.save()
        step(one, times=2)
        assert [row.pk for row in waiting()] == [last.pk]
    assert list(DeadLetter.objects.values_list("reason", flat=True)) == ["expired"] * 2
    assert sorted(RateLine.objects.values_list("taken", flat=True)) == [1, 2]


def test_an_expired_message_takes_no_slot() -> None:
    headers = {
        "content-type": "application/json",
        "txmsg-expires": wire.format_instant(ago(seconds=1)),
    }
    with declared(effect, rate="1/h") as one:
        for number in (1, 2):
            put(
                one.destination,
                headers={**headers, "txmsg-id": str(uuid.UUID(int=number))},
            )
        put(one.destination)
        put(one.destination, headers={**headers, "txmsg-id": str(uuid.UUID(int=3))})
        step(one, times=4)
    assert DeadLetter.objects.filter(reason="expired").count() == 3
    assert Effect.objects.count() == 1
    assert RateLine.objects.get().taken == 1


@pytest.mark.parametrize("rate", ["4/h", None])
def test_a_changed_rate_gives_a_slot_to_a_message_that_would_have_expired(
    rate: str | None,
) -> None:
    with declared(effect, rate="1/h") as old:
        for _ in range(2):
            send(old.destination, expires=50 * MINUTES)
        step(old, times=2)
        assert 49 * 60 < seconds_until(waiting()[0]) <= 50 * 60
        new = replace(old, rate=rate and Rate.parse(rate))
        _record_options(new, lambda: None)
        step(new)
        if rate:
            (row,) = waiting()
            assert 14 * 60 < seconds_until(row) <= 15 * 60
            assert row.slot == 1
            _let_pass(row, 15 * 60)
            step(new)
    assert Effect.objects.count() == 2
    assert not waiting()


@pytest.mark.parametrize("rate", ["1/h", "70/d"])
def test_the_start_of_a_consumer_tries_no_message_that_still_gets_no_slot(
    rate: str,
) -> None:
    """The rate may have changed, but not by enough."""
    with declared(effect, rate="1/h") as one:
        for _ in range(3):
            send(one.destination, expires=15 * MINUTES)
        step(one, times=3)
        before = [row.due_at for row in waiting()]
        _record_options(replace(one, rate=Rate.parse(rate)), lambda: None)
        assert [row.due_at for row in waiting()] == before
    assert len(before) == 2


def test_drain_does_not_wait_for_slots() -> None:
    with declared(effect, rate="1/d") as one:
        for _ in range(3):
            send(one.destination)
        drain()
    assert Effect.objects.count() == 3


def test_an_unused_line_is_pruned() -> None:
    with declared(effect, rate="1/s") as one:
        send(one.destination)
        step(one)
    call_command("prune_messages")
    assert RateLine.objects.count() == 1
    RateLine.objects.update(origin=F("origin") - 15 * 86_400)
    call_command("prune_messages")
    assert not RateLine.objects.exists()


def test_a_message_whose_slot_is_older_than_the_retention_runs_after_a_pause() -> None:
    """A stage was paused for longer than `RETENTION["INBOX"]`, while one message waited
    for its slot. After the pause, a new message arrives first. Both messages are
    processed."""
    with declared(effect, rate="1/m") as one:
        for _ in range(2):
            put(one.destination)
        step(one, times=2)
        RateLine.objects.update(taken=F("taken") + 9000, origin=F("origin") - 9e3 * 60)
        InboxMessage.objects.filter(slot__isnull=False).update(slot=F("slot") + 9000)
        pause = dt.timedelta(days=15)
        RateLine.objects.update(origin=F("origin") - pause.total_seconds())
        InboxMessage.objects.filter(due_at__isnull=False).update(
            due_at=F("due_at") - pause
        )
        call_command("prune_messages")
        put(one.destination)
        step(one, parked=False)
        step(one)
    assert not [row for row in waiting() if seconds_until(row) > 120]
    assert Effect.objects.count() == 3


@pytest.mark.parametrize(
    "options",
    [
        {"rate": "900"},
        {"rate": "0/s"},
        {"rate": 5},
        {"per": "tenant"},
        {"rate": "1/s", "per": ""},
        {"rate": "1/s", "batch": 2},
        {"rate": "1/s", "ordered": "block"},
        {"rate": "1/s", "redelivery": RedeliveryPolicy(mode="blocking")},
    ],
)
def test_a_rate_that_cannot_hold_is_refused(options: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"rate|per"):
        stage("tests.refused", **options)


def test_a_rate_with_blocking_redelivery_by_the_settings_is_an_error() -> None:
    with declared(effect, rate="1/s"):
        assert not [one for one in checks.check() if one.id == "txmsg.E063"]
        with txmsg(REDELIVERY={"MODE": "blocking"}):
            assert [one.id for one in checks.check()].count("txmsg.E063") == 1


STAGE = """
import os, signal
from django_txmsg import stage
from tests.app.models import Effect


def declare():
    @stage("tests.rates", rate="20/s", concurrency=2)
    def handle(message):
        if message.body == "kill" and message.delivery_attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        Effect.objects.create(name="", message_id=str(message.id))
"""


def took() -> float:
    """Return the seconds from the first processed message to the last one."""
    ends = InboxMessage.objects.aggregate(Min("processed_at"), Max("processed_at"))
    first, last = ends.values()
    return float((last - first).total_seconds())


def test_threads_share_a_rate() -> None:
    with declared(effect, rate="20/s") as one:
        for _ in range(21):
            put(one.destination)
        with running(one, 2):
            wait_until(lambda: Effect.objects.count() == 21)
    assert took() > 0.95


@pytest.mark.soak
def test_no_minute_has_five_percent_over_the_rate(
    manage: Callable[..., ManageProcess], tmp_path: Path
) -> None:
    """Two processes share a rate. A message kills one of them. Later both are stopped,
    and after some seconds started again. In every minute, they process at most 105 % of
    the rate."""
    (tmp_path / "rates_of_a_test.py").write_text(STAGE.replace("20/s", "1200/m"))
    for number in range(1600):
        put("tests.rates", b'"kill"' if number == 5 else b"1")

    def start() -> ManageProcess:
        return manage(
            "consume",
            "--processes",
            "2",
            txmsg={**IMPATIENT, "BROKERS": {"default": {"URL": BROKER}}},
            hook="rates_of_a_test.declare",
            env={"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        )

    process = start()
    wait_until(lambda: Effect.objects.count() >= 400, deadline=300)
    process.terminate()
    process.succeed()
    wait_until(lambda: waiting()[0].due_at < ago(seconds=5), deadline=60)  # type: ignore[operator]
    process = start()
    wait_until(lambda: Effect.objects.count() == 1600, deadline=600)
    process.terminate()
    process.succeed()
    rows = InboxMessage.objects.order_by("processed_at")
    ends = [end.timestamp() for end in rows.values_list("processed_at", flat=True)]
    most = max(bisect_right(ends, start + 60) - at for at, start in enumerate(ends))
    assert 1000 < most <= 1260


@pytest.mark.matrix
def test_two_processes_share_a_rate_and_one_of_them_is_killed(
    manage: Callable[..., ManageProcess], tmp_path: Path
) -> None:
    """Each message has its effect once, although a process is killed. The processes
    together never exceed the rate."""
    (tmp_path / "rates_of_a_test.py").write_text(STAGE)
    for number in range(60):
        put("tests.rates", b'"kill"' if number == 0 else b"1")
    process = manage(
        "consume",
        "--processes",
        "2",
        txmsg={**IMPATIENT, "BROKERS": {"default": {"URL": BROKER}}},
        hook="rates_of_a_test.declare",
        env={"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    wait_until(lambda: Effect.objects.count() == 60, deadline=300)
    process.terminate()
    process.succeed()
    assert "ended with 137" in process.output
    assert took() > 57 / 20
