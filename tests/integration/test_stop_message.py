"""`txmsg stop`: an operator stops a message while its handler runs."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connections, transaction

from django_txmsg import Message, Redeliver, Refuse
from django_txmsg.consuming import deadline
from django_txmsg.consuming.consumer import Consumer
from django_txmsg.errors import StageStopped, StageTimedOut
from django_txmsg.models import (
    Attempt,
    AuditEntry,
    DeadLetter,
    InboxMessage,
    StopRequest,
    Worker,
)
from django_txmsg.runtime import liveness, notifications
from django_txmsg.testing import drain
from tests import factories as make
from tests.app.models import Effect
from tests.factories import ago
from tests.faults import wait_until
from tests.integration.test_handler_timeout import effect, endless
from tests.running import IMPATIENT, committing, declared, put, step, txmsg

pytestmark = [committing, pytest.mark.usefixtures("impatient")]


@contextmanager
def consuming(*stages: Any) -> Iterator[Consumer]:
    """Run a whole consumer until the end of the block."""
    consumer = Consumer(stages)

    def run() -> None:
        try:
            consumer.run()
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield consumer
    finally:
        consumer.stop()
        thread.join(60)


#: On SQLite, a transaction that runs keeps everybody else from writing.
MODES = [pytest.param("outbox", marks=pytest.mark.postgresql), "none"]


@pytest.mark.parametrize("mode", MODES)
def test_the_running_query_is_cancelled_and_the_message_is_dead(mode: Any) -> None:
    began = threading.Event()

    def handler(message: Message) -> None:
        if mode == "outbox":
            effect(message)
        began.set()
        endless()

    with declared(handler, timeout=60.0, transaction=mode) as one, consuming(one):
        sent = put(one.destination)
        assert began.wait(60)
        call_command("txmsg", "stop", str(sent), "--why", "wrong file")
        wait_until(lambda: DeadLetter.objects.exists(), deadline=60)
    letter = DeadLetter.objects.get()
    assert (letter.message_id, letter.reason) == (sent, "refused")
    assert "StageStopped" in letter.exception
    assert letter.exception.endswith(": wrong file")
    assert InboxMessage.objects.get().dead_at is not None
    assert Attempt.objects.count() == 1
    assert not Effect.objects.exists()
    assert not StopRequest.objects.exists()
    assert str(sent) in AuditEntry.objects.get().text


def test_a_draining_consumer_sends_heartbeats_and_obeys(
    caplog: pytest.LogCaptureFixture,
) -> None:
    began = threading.Event()

    def handler(message: Message) -> None:
        began.set()
        wait_until(message.cancelled, deadline=40)

    consume = {**IMPATIENT["CONSUME"], "HEARTBEAT": 0.1, "STUCK_AFTER": 0.5}
    beats: set[Any] = set()

    def beats_on() -> bool:
        worker = Worker.objects.get()
        beats.add(worker.heartbeat_at)
        return len(beats) > 4 and worker.in_flight == len(worker.running) == 1

    with (
        txmsg(CONSUME=consume),
        declared(handler, timeout=60.0, transaction="none") as one,
        consuming(one) as consumer,
    ):
        sent = put(one.destination)
        assert began.wait(60)
        consumer.stop()
        wait_until(beats_on)
        wait_until(lambda: "its handler has been running" in caplog.text)
        call_command("txmsg", "stop", str(sent))
        wait_until(lambda: DeadLetter.objects.exists())
    assert StageStopped.__name__ in DeadLetter.objects.get().exception
    assert not Worker.objects.exists()


@pytest.mark.postgresql
def test_an_attempt_that_begins_after_the_request_is_stopped_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An idle process that receives notifications polls seldom. The request precedes
    the attempt."""
    monkeypatch.setattr(liveness, "CALM", 0.0)
    began: list[str] = []

    def handler(message: Message) -> None:
        began.append(str(message.body))
        wait_until(message.cancelled, deadline=15)

    first, second = uuid.uuid4(), uuid.uuid4()
    with declared(handler, timeout=60.0, transaction="none") as one, consuming(one):
        wait_until(lambda: notifications.has_listener("default"))
        put(one.destination, b'"first"', message_id=first)
        wait_until(lambda: began == ["first"])
        with transaction.atomic():
            for message_id in (second, first):
                StopRequest.objects.ask(one.name, message_id, "wrong file")
        # The consumer has then seen both requests.
        wait_until(lambda: DeadLetter.objects.filter(message_id=first).exists())
        put(one.destination, b'"second"', message_id=second)
        wait_until(lambda: DeadLetter.objects.filter(message_id=second).exists())
    assert began == ["first", "second"]


def test_a_request_that_came_too_late_does_not_stop_a_redelivery() -> None:
    def handler(message: Message) -> None:
        if DeadLetter.objects.exists():
            Consumer([one])._stop_messages("default")
            effect(message)
            return
        # The operator asks twice: the second request finds no handler any more.
        StopRequest.objects.ask(one.name, message.id, "once more")
        raise Refuse("it has ended")

    with declared(handler, timeout=60.0, transaction="none") as one:
        put(one.destination)
        step(one)
        call_command("dead_letters", "redeliver", "--all")
        step(one)
    assert InboxMessage.objects.get().processed_at is not None
    assert Effect.objects.exists()


@pytest.mark.parametrize("mode", MODES)
def test_a_handler_asks_whether_to_end(mode: Any) -> None:
    began, told = threading.Event(), list[bool]()

    def handler(message: Message) -> None:
        told.append(message.cancelled())
        began.set()
        wait_until(message.cancelled, deadline=60)
        told.append(message.cancelled())

    with declared(handler, timeout=60.0, transaction=mode) as one, consuming(one):
        sent = put(one.destination)
        assert began.wait(60)
        call_command("txmsg", "stop", str(sent))
        wait_until(lambda: DeadLetter.objects.exists(), deadline=60)
    assert told == [False, True]
    assert StageStopped.__name__ in DeadLetter.objects.get().exception


def test_cancelled_is_true_after_the_time_out() -> None:
    told: list[bool] = []

    def handler(message: Message) -> None:
        wait_until(message.cancelled, deadline=60)
        told.append(True)

    with (
        txmsg(REDELIVERY={"MAX_REDELIVERIES": 0}),
        declared(handler, timeout=0.1) as one,
    ):
        put(one.destination)
        step(one)
    assert told == [True]
    assert StageTimedOut.__name__ in DeadLetter.objects.get().exception


def test_cancelled_stays_false_without_a_time_out() -> None:
    told: list[bool] = []
    with declared(lambda message: told.append(message.cancelled())) as one:
        put(one.destination)
        step(one)
    assert told == [False]


def test_others_of_its_batch_and_other_stages_go_on() -> None:
    stopped: list[bool] = []

    def handler(message: Message) -> None:
        effect(message)
        if message.body == "stop":
            stopped.append(deadline.stop("elsewhere", message.id, "no"))
            stopped.append(deadline.stop(one.name, uuid.uuid4(), "no"))
            stopped.append(deadline.stop(one.name, message.id, "by us"))

    with declared(handler, timeout=60.0, batch=3) as one:
        for body in (b'"a"', b'"stop"', b'"b"'):
            put(one.destination, body)
        step(one)
    assert stopped == [False, False, True]
    assert sorted(Effect.objects.values_list("name", flat=True)) == ["a", "b"]
    assert StageStopped.__name__ in DeadLetter.objects.get().exception


class ImportFailed(BaseException):
    """A handler's own error. It is not a subclass of `Exception`."""


@pytest.mark.parametrize("error", [ValueError(), ImportFailed(), Redeliver(0)])
def test_message_is_dead_if_its_handler_replaces_the_error_of_the_stop(
    error: BaseException,
) -> None:
    def handler(message: Message) -> None:
        deadline.stop(one.name, message.id, "wrong file")
        try:
            effect(message)
        except Exception as stopped:
            raise error from stopped

    with declared(handler, timeout=60.0) as one:
        put(one.destination)
        step(one)
    letter = DeadLetter.objects.get()
    assert (letter.reason, letter.attempts) == ("refused", 1)
    assert letter.exception.endswith(": wrong file")


def test_a_stopped_message_runs_again_when_it_is_redelivered() -> None:
    def handler(message: Message) -> None:
        effect(message)
        if not DeadLetter.objects.exists():
            deadline.stop(one.name, message.id, "not now")

    with declared(handler, timeout=60.0) as one:
        put(one.destination)
        step(one)
        call_command("dead_letters", "redeliver", "--all")
        drain(one.name)
    assert Effect.objects.count() == 1


def test_only_a_message_that_can_be_stopped_is_asked_to() -> None:
    def fails(message: Message) -> None:
        raise ValueError

    with declared(effect, timeout=60.0) as timed, declared(fails) as untimed:
        ended, waits = put(timed.destination), put(untimed.destination)
        step(timed)
        step(untimed)
        parked = make.InboxMessageFactory(
            stage=timed.name, parked=True, due_at=ago(hours=-3)
        )
        for one in (ended, waits, parked.message_id, uuid.uuid4()):
            with pytest.raises(CommandError, match="its stage has no timeout"):
                call_command("txmsg", "stop", str(one))
    assert not StopRequest.objects.exists()
    assert not AuditEntry.objects.exists()


def test_a_second_request_takes_the_place_of_the_first() -> None:
    message_id = uuid.uuid4()
    StopRequest.objects.ask("tests.stopped", message_id, "by ann")
    StopRequest.objects.update(at=ago(minutes=2))
    StopRequest.objects.ask("tests.stopped", message_id, "by ben")
    StopRequest.objects.ask("tests.other", message_id, "by ben")
    found = {(one.stage, one.why) for one in StopRequest.objects.open()}
    assert found == {("tests.stopped", "by ben"), ("tests.other", "by ben")}
    assert StopRequest.objects.count() == 2


def test_a_request_holds_for_a_minute_and_is_pruned_after_a_day() -> None:
    StopRequest.objects.ask("tests.stopped", uuid.uuid4(), "by ann")
    assert len(StopRequest.objects.open()) == 1
    StopRequest.objects.update(at=ago(minutes=2))
    assert StopRequest.objects.open() == []
    call_command("prune_messages")
    assert StopRequest.objects.count() == 1
    StopRequest.objects.update(at=ago(days=2))
    call_command("prune_messages")
    assert not StopRequest.objects.exists()
