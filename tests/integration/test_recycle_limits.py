"""`MAX_MESSAGES` and `MAX_MEMORY`: at its limit, a consumer finishes its messages and
exits, so that a supervisor restarts it."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from django.core.management import call_command
from django.db import connections

from django_txmsg.consuming import limits
from django_txmsg.consuming.consumer import Consumer
from django_txmsg.envelope.message import Message
from django_txmsg.management.commands._run import Service
from django_txmsg.models import InboxMessage, Worker
from django_txmsg.models.queue import QueueMessage
from tests.app.models import Effect
from tests.faults import wait_until
from tests.running import committing, declared, put, txmsg

pytestmark = committing


def effect(message: Message) -> None:
    Effect.objects.create(name="done", message_id=str(message.id))


def limited(**given: float) -> AbstractContextManager[Any]:
    return txmsg(CONSUME={"POLL_INTERVAL": 0.02, **given})


@contextmanager
def working(consumer: Consumer) -> Iterator[threading.Thread]:
    def run() -> None:
        try:
            consumer.run()
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield thread
    finally:
        consumer.stop()
        thread.join(60)


def test_consumer_ends_after_max_messages_and_leaves_the_rest() -> None:
    with limited(MAX_MESSAGES=3), declared(effect) as stage:
        for _ in range(10):
            put(stage.destination)
        consumer = Consumer([stage])
        consumer.run()
        left = QueueMessage.objects.filter(queue=stage.destination)

        assert Effect.objects.count() == consumer.handled == 3
        assert left.count() == 7
        assert not left.exclude(lease_token=None).exists()
        assert consumer.allowance.over == "3 deliveries are handled"
        assert not Worker.objects.exists()
        # Started again, it goes on from there.
        with limited(MAX_MESSAGES=7):
            Consumer([stage]).run()
    assert Effect.objects.count() == 10
    assert not InboxMessage.objects.exclude(deliveries=1, attempts=1).exists()


def test_threads_finish_their_messages_before_the_process_ends() -> None:
    with limited(MAX_MESSAGES=4), declared(effect, concurrency=4) as stage:
        for _ in range(20):
            put(stage.destination)
        consumer = Consumer([stage])
        consumer.run()

    assert 4 <= consumer.handled <= 7
    assert Effect.objects.count() == consumer.handled


def test_limit_ends_the_relay_of_the_same_process() -> None:
    with limited(MAX_MESSAGES=2), declared(effect) as stage:
        for _ in range(3):
            put(stage.destination)
        Service(["default"], ["default"], [stage]).run()

    assert Effect.objects.count() == 2


def test_failed_messages_count_towards_the_limit() -> None:
    def handler(message: Message) -> None:
        raise LookupError

    with limited(MAX_MESSAGES=3), declared(handler) as stage:
        put(stage.destination)
        consumer = Consumer([stage])
        consumer.run()

    assert consumer.handled == 3


def test_with_too_much_memory_it_ends_but_not_before_it_did_some_work() -> None:
    with limited(MAX_MEMORY=1.0), declared(effect) as stage:
        consumer = Consumer([stage])
        with working(consumer) as thread:
            wait_until(lambda: consumer.threads[0].dry)
            assert thread.is_alive()
            assert not consumer.allowance.over
            put(stage.destination)
            wait_until(lambda: not thread.is_alive())

    assert Effect.objects.count() == 1
    assert consumer.allowance.over.endswith("MiB of memory, limit 1")


def test_a_limit_that_is_not_reached_ends_nothing() -> None:
    with limited(MAX_MESSAGES=10, MAX_MEMORY=1e6), declared(effect) as stage:
        put(stage.destination)
        consumer = Consumer([stage])
        consumer.run(once=True)

    assert consumer.handled == 1
    assert not consumer.allowance.over


def test_memory_is_measured_in_mib() -> None:
    before = limits.resident()
    ballast = b"x" * (64 * limits.MIB)
    grown = limits.resident() - before

    assert len(ballast) / limits.MIB / 2 < grown
    assert 1 < before < 100_000


def test_the_command_says_why_it_ended() -> None:
    err, out = io.StringIO(), io.StringIO()
    with limited(MAX_MESSAGES=2), declared(effect) as stage:
        for _ in range(3):
            put(stage.destination)
        call_command("consume", stage.name, stderr=err, stdout=out)

    assert "Ended: 2 deliveries are handled." in err.getvalue()
    assert "Handled 2 deliveries." in out.getvalue()
