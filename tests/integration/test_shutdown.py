"""A stopping process finishes the messages in progress, and starts no others."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from django.db import connection

from django_txmsg.consuming.consumer import Consumer
from django_txmsg.consuming.limits import Throttle
from django_txmsg.envelope.message import Message
from django_txmsg.envelope.redelivery import Dead, RedeliveryPolicy
from django_txmsg.models import InboxMessage
from django_txmsg.models.queue import QueueMessage
from django_txmsg.runtime import liveness
from django_txmsg.runtime.thread_group import ThreadGroup
from tests.app.models import Effect
from tests.faults import wait_until
from tests.running import (
    IMPATIENT,
    committing,
    declared,
    put,
    running,
    thread_of,
    txmsg,
)

pytestmark = [committing, pytest.mark.usefixtures("impatient")]


def effect(message: Message) -> None:
    Effect.objects.create(name="done", message_id=str(message.id))


@pytest.mark.parametrize("transaction", ["outbox", "best_effort_1pc"])
def test_stop_finishes_the_running_message_and_costs_no_attempt(
    transaction: str,
) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def handler(message: Message) -> None:
        inside.set()
        assert go_on.wait(30)
        effect(message)

    with declared(handler, transaction=transaction) as stage:
        for _ in range(10):
            put(stage.destination)
        stop = threading.Event()
        group = ThreadGroup(stop.set)
        group.add("stage", thread_of(stage, stop).run)
        group.start()
        assert inside.wait(30)
        stop.set()
        go_on.set()
        group.join()
        assert Effect.objects.count() == 1
        waiting = QueueMessage.objects.filter(queue=stage.destination)
        assert waiting.count() == 9
        assert not waiting.filter(lease_token__isnull=False).exists()
        assert not InboxMessage.objects.filter(processed_at=None).exists()
        with running(stage):
            wait_until(lambda: Effect.objects.count() == 10)
            wait_until(lambda: not waiting.exists())
    assert not InboxMessage.objects.exclude(attempts=1).exists()


def test_a_message_received_after_the_stop_is_not_processed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with declared(effect) as stage:
        stop = threading.Event()
        thread = thread_of(stage, stop)
        session = thread._open()
        real = session.receive

        def receive(timeout: float) -> object:
            delivery = real(timeout)
            stop.set()
            return delivery

        monkeypatch.setattr(session, "receive", receive)
        put(stage.destination)
        thread._step()
        assert QueueMessage.objects.filter(queue=stage.destination).count() == 1
    assert not Effect.objects.exists()
    assert not InboxMessage.objects.exists()


def test_thread_that_waits_for_its_turn_is_alive_and_gives_back_after_the_stop() -> (
    None
):
    """A throttled stage processes one message at a time. The process is stopped while a
    thread with a delivery waits for another thread's handler."""
    throttle, stop = Throttle(after=1), threading.Event()
    throttle.note(Dead("refused"))
    group = ThreadGroup(stop.set)
    with declared(effect) as stage:
        put(stage.destination)
        waiting = QueueMessage.objects.filter(queue=stage.destination)
        group.add("stage", thread_of(stage, stop, throttle=throttle).run)
        with throttle.turn(stop.is_set):
            group.start()
            wait_until(lambda: waiting.filter(lease_token__isnull=False).exists())
            silent = [0.0]

            def turned() -> bool:
                silent.append(liveness.state().silent)
                return silent[-1] < silent[-2]

            for _ in range(2):  # the first may precede the wait
                wait_until(turned)
            stop.set()
        group.join()
        assert waiting.filter(lease_token__isnull=True).count() == 1
    assert not Effect.objects.exists()
    assert not InboxMessage.objects.exists()


def test_fast_starts_and_stops_lose_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with declared(effect) as stage:
        for n in range(8):
            for _ in range(5):
                put(stage.destination)
            with running(stage, concurrency=2):
                wait_until(lambda n=n: Effect.objects.count() > n)
        with running(stage):
            wait_until(lambda: Effect.objects.count() == 40)
            wait_until(lambda: not QueueMessage.objects.exists())
    assert not InboxMessage.objects.exclude(attempts=1).exists()
    assert not [one for one in caplog.records if one.levelname == "ERROR"]


def test_a_paused_stage_gives_back_what_it_holds() -> None:
    with declared(effect) as stage, running(stage) as (thread,):
        thread.paused.set()
        wait_until(lambda: thread._subscription.session is None)
        put(stage.destination)
        thread.paused.clear()
        wait_until(Effect.objects.exists)


def test_a_stuck_handler_is_named_with_its_stack() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def waits_for_ever(message: Message) -> None:
        inside.set()
        go_on.wait(30)

    with declared(waits_for_ever) as stage, running(stage) as (thread,):
        put(stage.destination)
        assert inside.wait(30)
        stack = thread.stuck(0.0)
        assert stack is not None
        assert "waits_for_ever" in stack
        assert thread.stuck(600.0) is None
        go_on.set()


def test_a_pause_between_two_attempts_is_not_called_stuck() -> None:
    began = time.monotonic()

    def fails(message: Message) -> None:
        raise ValueError

    policy = RedeliveryPolicy(initial_delay=600.0, mode="blocking")
    with declared(fails, redelivery=policy) as stage, running(stage) as (thread,):
        put(stage.destination)
        wait_until(
            lambda: liveness.pause_end(thread._ident) > began and not thread.stuck(0.0)
        )
        assert thread.busy_since is not None


@pytest.mark.postgresql
def test_a_thread_that_waits_before_its_handler_is_not_called_a_stuck_handler(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another session has locked the inbox. Afterwards the handler itself waits."""
    other: Any = connection.copy()
    go_on = threading.Event()

    def waits_for_ever(message: Message) -> None:
        go_on.wait(30)

    def said(words: str) -> bool:
        return any(
            one.name == "django_txmsg.consumer" and words in one.getMessage()
            for one in caplog.records
        )

    consume = {**IMPATIENT["CONSUME"], "HEARTBEAT": 0.1, "STUCK_AFTER": 0.2}
    with txmsg(CONSUME=consume), declared(waits_for_ever) as stage:
        consumer = Consumer([stage])
        group = ThreadGroup(consumer.stop)
        group.add("consumer", consumer.run)
        group.start()
        try:
            wait_until(lambda: consumer.threads[0].dry)
            with other.cursor() as elsewhere:
                elsewhere.execute("BEGIN")
                elsewhere.execute("LOCK TABLE django_txmsg_inboxmessage IN SHARE MODE")
                put(stage.destination)
                wait_until(lambda: said("no handler is running now"))
                assert not said("its handler has been running")
                caplog.clear()
                elsewhere.execute("ROLLBACK")
            wait_until(lambda: said("its handler has been running for more than"))
            assert not said("no handler is running now")
        finally:
            other.close()
            go_on.set()
            consumer.stop()
            group.join()
