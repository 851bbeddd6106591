"""A batch runs in one transaction. A failing message does not affect the other
messages. All messages that the batch sends are dispatched together."""

from __future__ import annotations

import uuid
from collections import Counter
from functools import partial

import pytest
from django.db import OperationalError, connection, transaction

from django_txmsg import Refuse
from django_txmsg.envelope.message import Message
from django_txmsg.envelope.redelivery import RedeliveryPolicy
from django_txmsg.errors import NewerCodeNeeded
from django_txmsg.models import Attempt, DeadLetter, InboxMessage, OutboxMessage
from django_txmsg.models.queue import QueueMessage
from django_txmsg.sending.outbox import send_message, send_messages
from tests.app.models import Effect
from tests.faults import wait_until
from tests.running import (
    Handler,
    committing,
    declared,
    put,
    running,
    ship,
    step,
    thread_of,
)

pytestmark = [committing, pytest.mark.usefixtures("impatient")]


def send_many(destination: str, bodies: list[object]) -> None:
    with transaction.atomic():
        send_messages({"destination": destination, "body": body} for body in bodies)
    ship()


def effect(message: Message) -> None:
    Effect.objects.create(name=str(message.body), message_id=str(message.id))
    send_message("tests.next", message.body)


def failing(bad: object, error: type[Exception] = ValueError) -> Handler:
    """Return a handler that records an effect, and then fails if the body is `bad`."""

    def handler(message: Message) -> None:
        effect(message)
        if message.body == bad:
            raise error

    return handler


def effects() -> list[str]:
    return sorted(Effect.objects.values_list("name", flat=True))


def outgoing() -> int:
    return OutboxMessage.objects.filter(destination="tests.next").count()


def test_a_batch_is_one_transaction_and_leaves_nothing_in_the_queue() -> None:
    transactions: Counter[int] = Counter()

    def handler(message: Message) -> None:
        effect(message)
        if connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                cursor.execute("SELECT txid_current()")
                transactions[cursor.fetchone()[0]] += 1
        else:
            transactions[id(connection.atomic_blocks[0])] += 1

    with declared(handler, batch=20) as stage:
        send_many(stage.destination, list(range(20)))
        step(stage)
    assert list(transactions.values()) == [20]
    assert len(effects()) == outgoing() == 20
    assert InboxMessage.objects.filter(processed_at__isnull=False).count() == 20
    assert not QueueMessage.objects.filter(queue=stage.destination).exists()


def test_one_failing_member_rolls_back_alone() -> None:
    with declared(failing(3), batch=10) as stage:
        send_many(stage.destination, list(range(6)))
        step(stage)
        assert effects() == ["0", "1", "2", "4", "5"]
        assert outgoing() == 5
        step(stage, times=2)
    assert effects() == ["0", "1", "2", "4", "5"]
    assert outgoing() == 5
    assert DeadLetter.objects.get().attempts == 3
    assert Attempt.objects.count() == 3
    assert InboxMessage.objects.filter(attempts=1).count() == 5


def test_a_refusing_member_is_buried_alone() -> None:
    with declared(failing(1, Refuse), batch=10) as stage:
        send_many(stage.destination, [0, 1, 2])
        step(stage)
    assert effects() == ["0", "2"]
    assert DeadLetter.objects.get().reason == "refused"


def test_member_whose_handler_needs_newer_code_waits_alone() -> None:
    def handler(message: Message) -> None:
        effect(message)
        if message.body == 1:
            raise NewerCodeNeeded("tests.Newer", 2, 1)

    with declared(handler, batch=10) as stage:
        send_many(stage.destination, [0, 1, 2])
        step(stage)
    assert effects() == ["0", "2"]
    row = InboxMessage.objects.get(processed_at=None)
    assert (row.needs_type, row.needs_version) == ("tests.Newer", 2)
    assert row.attempts == 0
    assert not DeadLetter.objects.exists()


def test_batch_drops_duplicates_of_its_own_and_of_earlier_ones() -> None:
    with declared(effect, batch=10) as stage:
        before = put(stage.destination, b'"before"')
        step(stage)
        twice = uuid.uuid4()
        for body, message_id in ((b'"t"', twice), (b'"t"', twice), (b"1", before)):
            put(stage.destination, body, message_id=message_id)
        put(stage.destination, b'"new"')
        step(stage)
    assert effects() == ["before", "new", "t"]
    assert outgoing() == 3
    for row in InboxMessage.objects.filter(message_id__in=[twice, before]):
        assert row.deliveries == 2
    assert not InboxMessage.objects.exclude(attempts=1).exists()


def test_undecodable_member_of_a_batch_dies_alone() -> None:
    with declared(effect, batch=10) as stage:
        put(stage.destination, b'"good"')
        put(stage.destination, b'{"broken')
        put(stage.destination, b'"better"')
        step(stage)
    assert effects() == ["better", "good"]
    assert bytes(DeadLetter.objects.get().body) == b'{"broken'


@pytest.mark.parametrize("mode", ["blocking", "non_blocking"])
def test_a_failed_member_succeeds_at_its_second_attempt_alone(mode: str) -> None:
    def handler(message: Message) -> None:
        effect(message)
        if message.body == 1 and message.delivery_attempt == 1:
            raise ValueError

    policy = RedeliveryPolicy(initial_delay=0.0, mode=mode)
    with declared(handler, batch=10, redelivery=policy) as stage:
        send_many(stage.destination, [0, 1, 2])
        step(stage, times=2)
    assert effects() == ["0", "1", "2"]
    assert outgoing() == 3
    assert InboxMessage.objects.get(attempts=2).state == "processed"
    assert Attempt.objects.count() == 1


def test_an_operational_error_costs_only_its_member_an_attempt() -> None:
    """A deadlock or a lock time-out is a failed attempt of one message, not an outage.
    No failed attempt is counted for the other messages of the batch."""
    with declared(failing(1, OperationalError), batch=10) as stage:
        send_many(stage.destination, [0, 1, 2])
        step(stage, times=4)
    assert effects() == ["0", "2"]
    assert DeadLetter.objects.get().reason == "attempts_exhausted"
    assert InboxMessage.objects.filter(attempts=1).count() == 2


def test_redelivered_messages_run_outside_of_a_batch() -> None:
    """The handler of a message may kill the worker that runs the batch. The next
    attempt of each message of the batch runs outside a batch, so the other messages are
    affected only once."""
    together: list[int] = []
    attempts: list[list[int]] = []

    def handler(message: Message) -> None:
        rows = InboxMessage.objects.order_by("attempts")
        attempts.append(list(rows.values_list("attempts", flat=True)))
        together.append(len(connection.savepoint_ids))
        effect(message)

    with declared(handler, batch=10) as stage:
        send_many(stage.destination, [0, 1, 2])
        died = thread_of(stage)
        session = died._open()
        deliveries = [session.receive(30) for _ in range(3)]
        InboxMessage.objects.record(
            stage.name,
            [Message(id=uuid.UUID(one.headers["txmsg-id"]), destination="", body=None)
             for one in deliveries if one],
        )  # fmt: skip
        died._close()
        step(stage)
    assert together == [0, 0, 0]
    assert attempts == [[1, 1, 2], [1, 2, 2], [2, 2, 2]]
    assert effects() == ["0", "1", "2"]


def test_a_stop_in_the_middle_loses_and_repeats_nothing() -> None:
    with declared(effect, batch=7) as stage:
        send_many(stage.destination, list(range(60)))
        for wanted in (10, 30):
            with running(stage, concurrency=2):
                wait_until(lambda wanted=wanted: Effect.objects.count() >= wanted)
        with running(stage, concurrency=2):
            wait_until(
                lambda: (
                    not QueueMessage.objects.filter(queue=stage.destination).exists()
                )
            )
    assert effects() == sorted(str(n) for n in range(60))
    assert not InboxMessage.objects.exclude(attempts=1).exists()
    assert outgoing() == 60


def test_hook_that_raises_keeps_no_other_message_from_its_hooks() -> None:
    ran: list[object] = []

    def handler(message: Message) -> None:
        def hook() -> None:
            if message.body == 1:
                raise ValueError("of the hook")
            ran.append(message.body)

        transaction.on_commit(partial(hook))

    with declared(handler, batch=10) as stage:
        send_many(stage.destination, [0, 1, 2, 3])
        step(stage)
    assert ran == [0, 2, 3]
    assert InboxMessage.objects.filter(processed_at__isnull=False).count() == 4
