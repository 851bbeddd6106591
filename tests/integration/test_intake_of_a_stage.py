"""If the broker gives up on a message that a stage has received, the dead letter is the
stage's."""

from __future__ import annotations

import threading
import uuid
from contextlib import AbstractContextManager, ExitStack
from functools import partial

import amqp
import pytest
from django.db import connections, transaction
from django.db.models.functions import Now

from django_txmsg import Message, send_message, send_messages, stages
from django_txmsg.dead_letters import bulk
from django_txmsg.envelope.redelivery import RedeliveryPolicy
from django_txmsg.models import DeadLetter, InboxMessage, QueueMessage
from tests import factories
from tests.app.models import Effect
from tests.faults import wait_until
from tests.integration.test_intake import WithDeadLetters, taking_in
from tests.running import committing, copies_dropped, declared, ship, step
from tests.services import ByAmqp, RabbitMQ
from tests.services.stomp_server import PASSWORD, USER

pytestmark = [committing, pytest.mark.usefixtures("impatient")]

BACKEND = f"{WithDeadLetters.__module__}.{WithDeadLetters.__name__}"


def effect(message: Message) -> None:
    Effect.objects.create(name=str(message.body), message_id=str(message.id))


def effects() -> list[str]:
    return list(Effect.objects.order_by("id").values_list("name", flat=True))


def send_chain(stage: stages.Stage, count: int) -> list[Message]:
    """Store messages of one key, and dispatch them to the stage's queue."""
    with transaction.atomic():
        sent = send_messages(
            {"destination": stage.destination, "body": number, "key": "k"}
            for number in range(count)
        )
    ship()
    return sent


def lose(stage: stages.Stage, message: Message) -> None:
    """Let a worker die during its attempt to process a message, and the broker move the
    message to its dead-letter queue."""
    InboxMessage.objects.record(stage.name, [message])
    dead_letter(stage, message.id)


def dead_letter(stage: stages.Stage, message_id: uuid.UUID) -> None:
    """Move a message from the stage's queue to the broker's dead-letter queue."""
    rows = QueueMessage.objects.filter(queue=stage.destination)
    (row,) = [one for one in rows if one.headers["txmsg-id"] == str(message_id)]
    row.queue = "DLQ"
    row.headers |= {"original-destination": stage.destination}
    row.save()


def intake() -> AbstractContextManager[None]:
    """Read the dead-letter queue until it is empty and the block has ended."""

    def is_empty() -> bool:
        return not QueueMessage.objects.filter(queue="DLQ").exists()

    return taking_in("database://?poll=0.01", "DLQ", is_empty, BACKEND=BACKEND)


def take_in_another() -> None:
    """Wait until an intake holds its only delivery. Then it takes in another message,
    and still holds that delivery."""
    held = QueueMessage.objects.filter(queue="DLQ", lease_token__isnull=False)
    wait_until(held.exists)
    kept = held.get()
    factories.QueueMessageFactory(queue="DLQ")
    wait_until(DeadLetter.objects.exists)
    assert str(DeadLetter.objects.get().message_id) != kept.headers["txmsg-id"]
    assert held.filter(pk=kept.pk).exists()


def resolve(kind: str) -> None:
    assert bulk.finish(bulk.start(kind, {})).done == 1


def test_with_skip_the_next_message_of_the_key_runs() -> None:
    with declared(effect, ordered="skip") as stage:
        lost, _ = send_chain(stage, 2)
        lose(stage, lost)
        step(stage)
        assert effects() == []
        with intake():
            pass
        letter = DeadLetter.objects.get()
        assert (letter.stage, letter.reason) == (stage.name, "broker")
        assert letter.attempts == 1
        row = InboxMessage.objects.get(message_id=lost.id)
        assert (row.state, row.key) == ("dead", "k")
        step(stage)
        assert effects() == ["1"]


@pytest.mark.parametrize(
    ("kind", "order"), [("redeliver", ["0", "1"]), ("discard", ["1"])]
)
def test_with_block_the_next_message_waits_for_the_operator(
    kind: str, order: list[str]
) -> None:
    with declared(effect, ordered="block") as stage:
        lost, _ = send_chain(stage, 2)
        lose(stage, lost)
        with intake():
            pass
        step(stage, times=2)
        assert effects() == []
        resolve(kind)
        step(stage, times=len(order))
        assert effects() == order


def send_unique(stage: stages.Stage) -> Message:
    with transaction.atomic():
        return send_message(
            stage.destination,
            None,
            unique="k",
            unique_until="processed",
            on_conflict="skip",
        )


def test_a_key_is_released_that_the_message_held_until_it_is_processed() -> None:
    with declared(effect) as stage:
        first = send_unique(stage)
        ship()
        lose(stage, first)
        assert send_unique(stage).id == first.id
        with intake():
            pass
        assert send_unique(stage).id != first.id


@pytest.mark.parametrize("parked", [False, True])
def test_discarding_a_message_that_no_stage_has_buried_releases_its_key(
    parked: bool,
) -> None:
    with declared(effect, transaction="none") as stage:
        first = send_unique(stage)
        ship()
        lose(stage, first)
        with intake():
            pass
        assert send_unique(stage).id == first.id
        if parked:
            InboxMessage.objects.update(due_at=Now(), headers={}, body=b"null")
        resolve("discard")
        assert (send_unique(stage).id == first.id) == parked


def test_a_message_whose_turn_has_not_come_runs_at_its_turn() -> None:
    """The worker has died before it parked the message. If the message counted as dead
    at the stage, the message behind it would overtake the message in front of it."""
    with declared(effect, ordered="skip") as stage:
        _, lost, _ = send_chain(stage, 3)
        lose(stage, lost)
        with intake():
            pass
        assert not DeadLetter.objects.exists()
        step(stage, times=4)
        assert effects() == ["0", "1", "2"]
        assert InboxMessage.objects.get(message_id=lost.id).attempts == 2


def test_message_that_a_worker_may_be_processing_unlocked_is_not_dead() -> None:
    """In mode "none", a worker processes a message without a lock."""
    with declared(effect, transaction="none") as stage:
        (message,) = send_chain(stage, 1)
        lose(stage, message)
        with intake():
            pass
    assert DeadLetter.objects.get().stage == ""
    assert InboxMessage.objects.get().dead_at is None


@pytest.mark.parametrize("state", ["processed", "parked", "dead"])
def test_copy_of_a_message_that_the_stage_has_settled_or_parked_is_dropped(
    state: str,
) -> None:
    """A worker dies before it acknowledges the message. The broker moves the message to
    its dead-letter queue."""
    policy = RedeliveryPolicy(max_redeliveries=1 if state == "parked" else 0)

    def handle(message: Message) -> None:
        if state != "processed":
            raise ValueError

    with declared(handle, redelivery=policy) as stage:
        (message,) = send_chain(stage, 1)
        (copy,) = QueueMessage.objects.all()
        step(stage)
        before = InboxMessage.objects.values().get()
        copy.save(force_insert=True)
        dead_letter(stage, message.id)
        with copies_dropped() as dropped, intake():
            pass
    assert dropped == [message.id]
    assert InboxMessage.objects.values().get() == before
    letters = DeadLetter.objects.values_list("stage", "reason", "deaths")
    assert list(letters) == (
        [(stage.name, "attempts_exhausted", 1)] if state == "dead" else []
    )


def test_a_lost_acknowledgement_makes_no_second_dead_letter() -> None:
    with declared(effect) as stage:
        (message,) = send_chain(stage, 1)
        (copy,) = QueueMessage.objects.all()
        lose(stage, message)
        with intake():
            pass
        copy.save(force_insert=True)
        dead_letter(stage, message.id)
        with intake():
            pass
    letter = DeadLetter.objects.get()
    assert (letter.stage, letter.deaths) == (stage.name, 1)


def test_rabbitmq_s_delivery_limit(
    rabbitmq: RabbitMQ, rabbitmq_amqp: ByAmqp, destination: str
) -> None:
    dead = f"DLQ.{destination}"
    message = Message(id=uuid.uuid4(), destination=destination, body=None)
    arguments = {
        "x-queue-type": "quorum",
        "x-delivery-limit": 1,
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": dead,
    }
    address = f"127.0.0.1:{rabbitmq.amqp_port}"
    with (
        declared(effect, destination) as stage,
        amqp.Connection(address, USER, PASSWORD) as server,
    ):
        channel = server.channel()
        channel.queue_declare(dead, durable=True, auto_delete=False)
        channel.queue_declare(
            destination, durable=True, auto_delete=False, arguments=arguments
        )
        headers = {"txmsg-id": str(message.id)}
        channel.basic_publish(
            amqp.Message(b"null", application_headers=headers), routing_key=destination
        )
        InboxMessage.objects.record(stage.name, [message])
        for _ in range(2):
            wait_until(partial(channel.basic_get, destination))
            channel.close()  # the delivery goes back
            channel = server.channel()
        with taking_in(rabbitmq_amqp.url(), dead):
            pass
    letter = DeadLetter.objects.get()
    assert (letter.stage, letter.destination) == (destination, destination)
    assert "delivery_limit" in letter.exception


@pytest.mark.parametrize("kind", ["rabbitmq", "rabbitmq_amqp"])
def test_rabbitmq_s_queue_of_a_subscription(
    kind: str, rabbitmq: RabbitMQ, destination: str, request: pytest.FixtureRequest
) -> None:
    dead = f"DLQ.{destination}"
    message = Message(id=uuid.uuid4(), destination=destination, body=None)
    arguments = {
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": dead,
        "x-max-length": 0,
    }
    address = f"127.0.0.1:{rabbitmq.amqp_port}"
    with (
        declared(effect, f"topic:{destination}", ordered="skip") as stage,
        amqp.Connection(address, USER, PASSWORD) as server,
    ):
        assert stage.subscriber is not None
        InboxMessage.objects.record(stage.name, [message])
        channel = server.channel()
        for queue, given in ((dead, {}), (stage.subscriber, arguments)):
            channel.queue_declare(
                queue, durable=True, auto_delete=False, arguments=given
            )
        headers = {"txmsg-id": str(message.id)}
        channel.basic_publish(
            amqp.Message(b"null", application_headers=headers),
            routing_key=stage.subscriber,
        )
        with taking_in(request.getfixturevalue(kind).url(), dead):
            pass
        channel.queue_delete(stage.subscriber)
    letter = DeadLetter.objects.get()
    assert (letter.stage, letter.destination) == (stage.name, f"topic:{destination}")
    assert InboxMessage.objects.get().state == "dead"


@pytest.mark.postgresql
def test_a_worker_that_processes_a_copy_finishes_first() -> None:
    began, go_on = threading.Event(), threading.Event()

    def slow(message: Message) -> None:
        began.set()
        assert go_on.wait(60)
        effect(message)

    def work() -> None:
        try:
            step(stage)
        finally:
            connections.close_all()

    with declared(slow) as stage:
        (message,) = send_chain(stage, 1)
        (copy,) = QueueMessage.objects.all()
        worker = threading.Thread(target=work)
        worker.start()
        assert began.wait(60)
        copy.pk = None
        copy.save(force_insert=True)
        QueueMessage.objects.exclude(pk=copy.pk).update(queue="elsewhere")
        dead_letter(stage, message.id)
        with intake():
            take_in_another()
            go_on.set()
        worker.join(60)
    assert len(effects()) == 1
    assert not DeadLetter.objects.filter(message_id=message.id).exists()


@pytest.mark.postgresql
def test_a_worker_that_dies_with_the_row_locked_leaves_no_key_that_stands_still() -> (
    None
):
    began, go_on = threading.Event(), threading.Event()

    def work(pk: int) -> None:
        try:
            with transaction.atomic():
                InboxMessage.objects.select_for_update().get(pk=pk)
                began.set()
                assert go_on.wait(60)
        finally:
            connections.close_all()

    with declared(effect, ordered="skip") as stage:
        lost, _ = send_chain(stage, 2)
        lose(stage, lost)
        row = InboxMessage.objects.get(message_id=lost.id)
        worker = threading.Thread(target=work, args=[row.pk])
        with ExitStack() as stack:
            stack.callback(worker.join, 60)
            stack.callback(go_on.set)
            worker.start()
            assert began.wait(60)
            with intake():
                take_in_another()
                go_on.set()
        assert DeadLetter.objects.get(message_id=lost.id).stage == stage.name
        row.refresh_from_db()
        assert row.state == "dead"
        step(stage)
        assert effects() == ["1"]


def test_a_stage_whose_database_is_away_delays_no_other_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with declared(effect, using="other") as stage:
        (message,) = send_chain(stage, 1)
        InboxMessage.objects.db_manager("other").record(stage.name, [message])
        dead_letter(stage, message.id)
        name = connections.settings["other"]["NAME"]
        monkeypatch.setitem(connections.settings["other"], "NAME", "/nowhere/db")
        with intake():
            take_in_another()
            monkeypatch.setitem(connections.settings["other"], "NAME", name)
    assert DeadLetter.objects.using("other").get().stage == stage.name
