"""The three modes of redelivery after a failed attempt."""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from typing import Any

import pytest
from django.db import OperationalError

from django_txmsg import Refuse, signals
from django_txmsg.consuming.limits import Throttle
from django_txmsg.envelope.message import Message
from django_txmsg.envelope.redelivery import Dead, RedeliveryPolicy
from django_txmsg.models import Attempt, DeadLetter, InboxMessage, OutboxMessage
from django_txmsg.models.queue import QueueMessage
from django_txmsg.runtime import database_health, liveness
from tests.faults import wait_until
from tests.running import (
    Script,
    committing,
    copies_dropped,
    declared,
    lose_connection,
    put,
    record_lost_at,
    running,
    send,
    step,
    txmsg,
)

pytestmark = [committing, pytest.mark.usefixtures("impatient")]

MODES = ["outbox", "best_effort_1pc", "broker_only"]
modes = pytest.mark.parametrize("transaction", MODES)
HOW = ["non_blocking", "blocking", "broker"]
how = pytest.mark.parametrize("mode", HOW)


def policy(**given: Any) -> RedeliveryPolicy:
    given = {"max_redeliveries": 2, "initial_delay": 0.0, "max_delay": 0.0, **given}
    return RedeliveryPolicy(**given)


def sent_on() -> int:
    """Return how many messages the stage has sent, through the outbox or directly."""
    return (
        OutboxMessage.objects.filter(destination="tests.next").count()
        + QueueMessage.objects.filter(queue="tests.next").count()
    )


def left_in_queue(destination: str) -> int:
    return QueueMessage.objects.filter(queue=destination).count()


@modes
@how
def test_message_that_fails_twice_is_processed_at_the_third_attempt(
    transaction: Any, mode: Any
) -> None:
    script = Script(ValueError("one"), ValueError("two"))
    with declared(script, transaction=transaction, redelivery=policy(mode=mode)) as s:
        send(s.destination)
        step(s, times=4)
        assert left_in_queue(s.destination) == 0
    assert script.attempts == [1, 2, 3]
    assert sent_on() == 1
    assert Attempt.objects.count() == 2
    assert not DeadLetter.objects.exists()


@modes
@how
def test_redelivery_is_announced_after_its_attempt_is_stored(
    transaction: Any, mode: Any
) -> None:
    stored: list[tuple[int, bool]] = []

    def listen(**kwargs: Any) -> None:
        parked = InboxMessage.objects.filter(due_at__isnull=False).exists()
        stored.append((Attempt.objects.count(), parked))

    script = Script(ValueError("one"), None)
    with declared(script, transaction=transaction, redelivery=policy(mode=mode)) as s:
        send(s.destination)
        signals.message_redelivered.connect(listen)
        try:
            step(s)
        finally:
            signals.message_redelivered.disconnect(listen)
    assert stored == [(1, mode == "non_blocking")]


@modes
@how
def test_message_is_buried_after_exactly_the_maximum_of_attempts(
    transaction: Any, mode: Any
) -> None:
    script = Script(*[ValueError(f"number {n}") for n in range(9)])
    with declared(script, transaction=transaction, redelivery=policy(mode=mode)) as s:
        message = send(s.destination, {"order": 1}, headers={"tenant": "a"})
        step(s, times=5)
        assert left_in_queue(s.destination) == 0
    assert script.attempts == [1, 2, 3]
    assert sent_on() == 0
    letter = DeadLetter.objects.get()
    assert (letter.reason, letter.attempts) == ("attempts_exhausted", 3)
    assert (letter.message_id, letter.stage) == (message.id, s.name)
    assert "number 2" in letter.exception
    assert bytes(letter.body) == b'{"order":1}'
    assert letter.headers["tenant"] == "a"
    attempts = Attempt.objects.order_by("number")
    assert [one.number for one in attempts] == [1, 2, 3]
    assert all("Script" in one.traceback or "__call__" in one.traceback
               for one in attempts)  # fmt: skip


@how
def test_without_redeliveries_the_first_failure_is_the_last(mode: Any) -> None:
    none = policy(mode=mode, max_redeliveries=0)
    script = Script(ValueError())
    with declared(script, redelivery=none) as stage:
        send(stage.destination)
        step(stage, times=2)
        assert left_in_queue(stage.destination) == 0
    assert script.attempts == [1]
    letter = DeadLetter.objects.get()
    assert (letter.reason, letter.attempts) == ("attempts_exhausted", 1)


@how
def test_handlers_changes_to_a_body_are_not_in_the_next_attempt(mode: Any) -> None:
    seen: list[Any] = []

    def handler(message: Message) -> None:
        seen.append(dict(message.body))
        message.body["order"] = "spoilt"
        raise ValueError

    with declared(handler, redelivery=policy(mode=mode)) as stage:
        send(stage.destination, {"order": 1})
        step(stage, times=4)
    assert seen == [{"order": 1}] * 3
    assert bytes(DeadLetter.objects.get().body) == b'{"order":1}'


@how
def test_a_foreign_message_that_always_fails_ends_too(mode: Any) -> None:
    """A foreign message gets its id from the broker's id, which differs for each copy.
    Its attempts are still counted, and the message becomes a dead letter."""
    script = Script(*[ValueError() for _ in range(9)])
    with declared(script, redelivery=policy(mode=mode)) as stage:
        put(stage.destination, b"1", {"content-type": "application/json"})
        step(stage, times=5)
        assert left_in_queue(stage.destination) == 0
    assert script.attempts == [1, 2, 3]
    assert DeadLetter.objects.get().attempts == 3


@how
def test_each_of_many_runs_as_often_as_its_policy_says(mode: Any) -> None:
    """Each of many messages gets exactly the attempts that its policy allows."""
    runs: Counter[int] = Counter()

    def handler(message: Message) -> None:
        runs[message.body] += 1
        if message.body % 3 == 2 or message.body % 3 > runs[message.body] - 1:
            raise MemoryError

    count = 60
    with declared(handler, redelivery=policy(mode=mode)) as stage:
        for number in range(count):
            put(stage.destination, str(number).encode())
        with running(stage):
            wait_until(lambda: DeadLetter.objects.count() == count // 3, deadline=60)
            wait_until(lambda: left_in_queue(stage.destination) == 0)
            wait_until(lambda: not InboxMessage.objects.filter(
                processed_at=None, dead_at=None).exists())  # fmt: skip
    assert runs == {number: number % 3 + 1 for number in range(count)}


@modes
@pytest.mark.parametrize("refusal", ["word", "type"])
def test_a_refusal_is_dead_at_once(transaction: Any, refusal: str) -> None:
    error = Refuse("no such customer") if refusal == "word" else KeyError("customer")
    script = Script(error)
    with declared(
        script, transaction=transaction, redelivery=policy(refuse_on=(LookupError,))
    ) as stage:
        send(stage.destination)
        step(stage, times=2)
        assert left_in_queue(stage.destination) == 0
    assert script.attempts == [1]
    assert DeadLetter.objects.get().reason == "refused"
    assert "customer" in DeadLetter.objects.get().exception
    assert sent_on() == 0


def test_several_threads_do_not_multiply_attempts() -> None:
    script = Script(*[ValueError() for _ in range(99)])
    with declared(script, redelivery=policy(max_redeliveries=6)) as stage:
        send(stage.destination)
        with running(stage, concurrency=4):
            wait_until(DeadLetter.objects.exists)
    assert sorted(script.attempts) == [1, 2, 3, 4, 5, 6, 7]


def test_each_attempt_of_blocking_redelivery_may_last_for_the_timeout() -> None:
    """The thread then counts as alive for so long, as at the first attempt."""
    alive_for: list[float] = []

    def handler(message: Message) -> None:
        _, turned_at, _ = liveness._loops()[threading.get_ident()]
        alive_for.append(turned_at - time.monotonic())
        if len(alive_for) < 3:
            raise ValueError

    blocking = policy(mode="blocking")
    with (
        declared(handler, redelivery=blocking, timeout=900.0) as stage,
        running(stage),
    ):
        put(stage.destination)
        wait_until(lambda: InboxMessage.objects.filter(processed_at__isnull=False))
    assert len(alive_for) == 3
    assert all(seconds > 600 for seconds in alive_for)


def test_a_message_revoked_during_a_blocking_pause_does_not_run_again() -> None:
    """In mode "none", no transaction checks that before the handler runs."""
    script = Script(ValueError())

    def revoke(id: uuid.UUID, stage: str, **_: Any) -> None:
        assert InboxMessage.objects.revoke(stage, id)

    signals.message_redelivered.connect(revoke)
    try:
        blocking = policy(mode="blocking")
        with (
            declared(script, redelivery=blocking, transaction="none") as stage,
            copies_dropped() as copies,
        ):
            put(stage.destination)
            step(stage)
    finally:
        signals.message_redelivered.disconnect(revoke)
    assert script.attempts == [1]
    assert left_in_queue(stage.destination) == 0
    assert not copies


@pytest.mark.postgresql
def test_a_message_revoked_during_an_outage_does_not_run_again() -> None:
    """Its last attempt ended with the outage."""
    attempts: list[int] = []

    def handler(message: Message) -> None:
        attempts.append(message.delivery_attempt)
        if message.delivery_attempt == 1:
            raise ValueError
        assert InboxMessage.objects.revoke(stage.name, message.id)
        lose_connection("killed")
        database_health.breaker("default").failed(OperationalError())
        InboxMessage.objects.exists()

    with declared(handler, redelivery=policy(), transaction="none") as stage:
        put(stage.destination)
        step(stage, times=2)
    assert attempts == [1, 2]
    assert not DeadLetter.objects.exists()


def test_a_message_revoked_as_its_batch_ends_is_dropped() -> None:
    broker = policy(mode="broker")
    with declared(Script(ValueError()), redelivery=broker, batch=2) as stage:
        put(stage.destination)
        put(stage.destination)
        with record_lost_at(
            "UPDATE django_txmsg_inboxmessage SET attempts = attempts + 1",
            "UPDATE django_txmsg_inboxmessage SET dead_at = CURRENT_TIMESTAMP"
            " WHERE processed_at IS NULL",
        ):
            step(stage)
    assert InboxMessage.objects.exclude(processed_at=None).count() == 1
    assert left_in_queue(stage.destination) == 0
    assert not Attempt.objects.exists()


def test_blocking_keeps_the_order() -> None:
    seen: list[object] = []

    def handler(message: Message) -> None:
        seen.append(message.body)
        if message.body == 0 and message.delivery_attempt < 3:
            raise ValueError

    with declared(handler, redelivery=policy(mode="blocking")) as stage:
        for n in range(3):
            send(stage.destination, n)
        step(stage, times=3)
    assert seen == [0, 0, 0, 1, 2]


@modes
def test_a_stop_during_a_blocking_wait_loses_nothing(transaction: Any) -> None:
    """A stage stops while it waits for the next attempt of a failed message. The failed
    attempt counts, and the next worker makes the second one."""
    slow = policy(mode="blocking", initial_delay=600.0, max_delay=600.0)
    script = Script(ValueError())
    with declared(script, transaction=transaction, redelivery=slow) as stage:
        send(stage.destination)
        with running(stage):
            wait_until(Attempt.objects.exists)
        assert left_in_queue(stage.destination) == 1
        step(stage)
        assert left_in_queue(stage.destination) == 0
    assert script.attempts == [1, 2]
    assert sent_on() == 1


def test_a_system_exit_of_a_handler_is_a_failure() -> None:
    script = Script(SystemExit(3))
    with declared(script) as stage:
        send(stage.destination)
        step(stage, times=2)
    assert script.attempts == [1, 2]


def test_failures_in_a_row_limit_the_stage_to_one_at_a_time() -> None:
    inside = 0
    most = 0
    lock = threading.Lock()

    def handler(message: Message) -> None:
        nonlocal most, inside
        with lock:
            inside += 1
            most = max(most, inside)
        lock_step.wait(0.02)
        with lock:
            inside -= 1
        if message.body == "bad":
            raise Refuse

    lock_step = threading.Event()
    throttle = Throttle(after=3)
    for _ in range(3):
        throttle.note(Dead("refused"))
    consume = {"POLL_INTERVAL": 0.02, "THROTTLE_PAUSE": 0.01}
    with txmsg(CONSUME=consume), declared(handler) as stage:
        for _ in range(8):
            send(stage.destination, "bad")
        with running(stage, concurrency=4, throttle=throttle):
            wait_until(lambda: DeadLetter.objects.count() == 8)
            assert throttle.on
            assert most == 1
            send(stage.destination, "good")
            wait_until(lambda: not throttle.on)
