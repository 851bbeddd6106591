"""A message has its effects at a stage once. Copies are dropped, and a stage derives
the ids of the messages that it sends."""

from __future__ import annotations

import threading
import uuid

import pytest
from django.db import connection, transaction

from django_txmsg import wire
from django_txmsg.envelope.message import Message
from django_txmsg.models import DeadLetter, InboxMessage, OutboxMessage
from django_txmsg.models.queue import QueueMessage
from django_txmsg.sending.outbox import send_message, send_messages
from tests.app.models import Effect, Order
from tests.faults import wait_until
from tests.running import (
    committing,
    copies_dropped,
    declared,
    put,
    running,
    send,
    ship,
    step,
    txmsg,
)

pytestmark = [committing, pytest.mark.usefixtures("impatient")]


def effect(message: Message) -> None:
    """Insert one row, and send one message."""
    Effect.objects.create(name="done", message_id=str(message.id))
    send_message("tests.next", {"from": str(message.id)})


def names() -> list[str]:
    return list(Effect.objects.values_list("name", flat=True))


def test_a_message_arrives_as_it_was_sent() -> None:
    got: list[Message] = []
    with declared(got.append) as stage:
        sent = send(stage.destination, {"n": 1}, headers={"tenant": "a"}, key="k")
        step(stage)
    (message,) = got
    assert (message.id, message.body, message.key) == (sent.id, {"n": 1}, "k")
    assert message.headers["tenant"] == "a"
    assert (message.delivery_attempt, message.redelivered) == (1, False)
    assert message.created_at == sent.created_at
    assert message.service == "tests"


def test_inbox_row_effect_and_outgoing_rows_are_one_transaction() -> None:
    with declared(effect) as stage:
        sent = send(stage.destination)
        step(stage)
        row = InboxMessage.objects.get(stage=stage.name, message_id=sent.id)
        assert row.state == "processed"
        assert (row.deliveries, row.attempts) == (1, 1)
        outgoing = OutboxMessage.objects.get(destination="tests.next")
        assert outgoing.message_id == wire.derived_id("tests", sent.id, stage.name, 0)
        assert outgoing.correlation_id == str(sent.id)
    assert names() == ["done"]
    assert not QueueMessage.objects.filter(queue=stage.destination).exists()


def test_a_duplicate_skips_the_handler_and_is_counted() -> None:
    with declared(effect) as stage:
        sent = send(stage.destination)
        put(stage.destination, message_id=sent.id)
        step(stage, times=2)
        row = InboxMessage.objects.get(message_id=sent.id)
    assert (row.deliveries, row.attempts) == (2, 1)
    assert names() == ["done"]
    assert OutboxMessage.objects.filter(destination="tests.next").count() == 1


def test_a_duplicate_ships_what_the_first_processing_left_unsent() -> None:
    with declared(effect) as stage:
        sent = send(stage.destination)
        step(stage)
        assert not QueueMessage.objects.filter(queue="tests.next").exists()
        put(stage.destination, message_id=sent.id)
        with txmsg(DISPATCH_ON_COMMIT="inline"):
            step(stage)
    assert QueueMessage.objects.filter(queue="tests.next").count() == 1
    assert names() == ["done"]


def test_two_stages_of_one_id_each_process_it() -> None:
    with (
        declared(effect, "tests.first") as first,
        declared(effect, "tests.second") as second,
    ):
        message_id = put("tests.first")
        put("tests.second", message_id=message_id)
        step(first)
        step(second)
    assert names() == ["done", "done"]
    assert OutboxMessage.objects.filter(destination="tests.next").count() == 2


def test_of_copies_that_arrive_at_once_one_handler_runs() -> None:
    """Several copies of a message arrive at the same time. The handler runs for one of
    them. The others wait for its transaction to end, and are then dropped."""
    inside, go_on = threading.Event(), threading.Event()
    runs: list[uuid.UUID] = []

    def slow(message: Message) -> None:
        runs.append(message.id)
        inside.set()
        assert go_on.wait(30)
        effect(message)

    with declared(slow) as stage:
        message_id = put(stage.destination)
        for _ in range(3):
            put(stage.destination, message_id=message_id)
        with copies_dropped() as dropped, running(stage, concurrency=4):
            assert inside.wait(30)
            go_on.set()
            wait_until(lambda: not QueueMessage.objects.exists())
    assert runs == [message_id]
    assert dropped == [message_id] * 3
    assert names() == ["done"]
    row = InboxMessage.objects.get()
    assert (row.state, row.deliveries) == ("processed", 4)


def test_delivery_that_another_worker_got_meanwhile_is_no_copy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def slow(message: Message) -> None:
        QueueMessage.objects.update(lease_token=uuid.uuid4())

    with declared(slow, transaction="broker_only") as stage:
        put(stage.destination)
        with copies_dropped() as dropped:
            step(stage)
    assert "the work is done here" in caplog.text
    assert dropped == []


def test_a_stage_whose_first_copy_fails_lets_the_second_run() -> None:
    """The first attempt is rolled back, so the message is not marked as processed. The
    second attempt runs."""

    def fails_once(message: Message) -> None:
        effect(message)
        if message.delivery_attempt == 1:
            raise ValueError("the first time")

    with declared(fails_once) as stage:
        send(stage.destination)
        step(stage)
        assert names() == []
        assert not OutboxMessage.objects.filter(destination="tests.next").exists()
        step(stage)
    assert names() == ["done"]
    assert InboxMessage.objects.get().attempts == 2


def test_handler_sees_the_senders_data_and_its_writes_are_atomic() -> None:
    """The handler writes through models and with SQL, and fails for every fifth of 75
    messages. The database keeps the writes of all other messages, and no others."""
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

    def handler(message: Message) -> None:
        order = Order.objects.get(number=message.body)
        Effect.objects.create(name="model", message_id=order.number)
        with connection.cursor() as cursor:
            cursor.execute(
                "INSERT INTO app_effect (name, message_id) VALUES (%s, %s)",
                ["by hand", order.number],
            )
        if order.note == "bad":
            raise ValueError

    with declared(handler) as stage:
        with transaction.atomic():
            for n in range(75):
                Order.objects.create(number=str(n), note="good" if n % 5 else "bad")
            send_messages(
                {
                    "destination": stage.destination,
                    "body": str(n),
                    "headers": {"traceparent": trace},
                }
                for n in range(75)
            )
        ship()
        with running(stage, concurrency=4):
            wait_until(lambda: not QueueMessage.objects.exists(), deadline=60)
            wait_until(lambda: DeadLetter.objects.count() == 15, deadline=60)
    good = Order.objects.filter(note="good").values_list("number", flat=True)
    for name in ("model", "by hand"):
        written = Effect.objects.filter(name=name).values_list("message_id", flat=True)
        assert sorted(written) == sorted(good)
    bad = Order.objects.filter(note="bad").values_list("number", flat=True)
    letters = DeadLetter.objects.all()
    assert {bytes(one.body) for one in letters} == {f'"{n}"'.encode() for n in bad}
    assert {one.headers["traceparent"] for one in letters} == {trace}


def test_messages_stored_in_a_savepoint_that_rolls_back_do_not_leave() -> None:
    def handler(message: Message) -> None:
        send_message("tests.kept", 1)
        try:
            with transaction.atomic():
                send_message("tests.lost", 2)
                raise KeyError
        except KeyError:
            pass
        send_message("tests.kept", 3)

    with declared(handler) as stage, txmsg(DISPATCH_ON_COMMIT="inline"):
        send(stage.destination)
        step(stage)
    assert QueueMessage.objects.filter(queue="tests.kept").count() == 2
    assert not OutboxMessage.objects.filter(destination="tests.lost").exists()
    assert not QueueMessage.objects.filter(queue="tests.lost").exists()


def test_a_re_executed_stage_sends_the_same_ids() -> None:
    """Both executions of a stage send messages with the same ids, so the next inbox
    drops the second ones as duplicates."""
    sent: list[uuid.UUID] = []

    def handler(message: Message) -> None:
        sent.extend(send_message("tests.next", n).id for n in range(3))
        if message.delivery_attempt == 1:
            raise ValueError

    with declared(handler) as stage:
        send(stage.destination)
        step(stage, times=2)
    assert len(sent) == 6
    assert sent[:3] == sent[3:]


def test_a_topic_reaches_every_stage_that_subscribes() -> None:
    seen: list[str] = []
    with (
        declared(lambda m: seen.append("a"), "topic:tests.news", name="tests.a") as a,
        declared(lambda m: seen.append("b"), "topic:tests.news", name="tests.b") as b,
    ):
        step(a)
        step(b)
        send("topic:tests.news", "hello")
        step(a)
        step(b)
    assert sorted(seen) == ["a", "b"]


def test_a_stage_on_another_database_keeps_its_inbox_there() -> None:
    def handler(message: Message) -> None:
        Effect.objects.using("other").create(name="there", message_id=str(message.id))
        send_message("tests.next", None)

    with declared(handler, using="other", broker="apart") as stage:
        sent = send(stage.destination, using="other", broker="apart")
        step(stage)
        assert InboxMessage.objects.using("other").get().message_id == sent.id
    assert Effect.objects.using("other").count() == 1
    assert (
        OutboxMessage.objects.using("other").filter(destination="tests.next").exists()
    )
    assert not InboxMessage.objects.exists()
    assert not OutboxMessage.objects.exists()


def test_an_expired_message_is_buried_unprocessed() -> None:
    with declared(effect) as stage:
        put(
            stage.destination,
            headers={
                "txmsg-id": str(uuid.uuid4()),
                "content-type": "application/json",
                "txmsg-expires": "2020-01-01T00:00:00Z",
            },
        )
        step(stage)
    assert names() == []
    assert DeadLetter.objects.get().reason == "expired"


def test_a_foreign_message_is_known_by_the_brokers_id() -> None:
    got: list[Message] = []
    with declared(got.append) as stage:
        put(stage.destination, b"plain", {"content-type": "text/plain"})
        step(stage)
    assert got[0].body == "plain"
    assert InboxMessage.objects.get().message_id == got[0].id
