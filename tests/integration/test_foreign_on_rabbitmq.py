"""Messages without a `txmsg-id` on RabbitMQ, which has no stable id for a message."""

from __future__ import annotations

import json
import os
import signal
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from django_txmsg import stages
from django_txmsg.brokers import get_broker
from django_txmsg.consuming import inbox, modes
from django_txmsg.consuming.arrival import Arrival
from django_txmsg.envelope.broker_url import split_url
from django_txmsg.envelope.message import Message
from django_txmsg.envelope.redelivery import RedeliveryPolicy
from django_txmsg.models import DeadLetter, InboxMessage
from tests import services
from tests.acceptance import crash_points
from tests.acceptance.crash_play import Manage
from tests.app.models import Effect
from tests.faults import wait_until
from tests.integration.test_intake import taking_in
from tests.raw_client import RawClient
from tests.running import IMPATIENT, committing, declared, running, step, txmsg
from tests.services.stomp_server import PASSWORD, READER, USER

# One database will do: what matters here is the broker.
pytestmark = [committing, pytest.mark.postgresql]

JSON = {"content-type": "application/json"}


@pytest.fixture
def settings(rabbitmq: services.RabbitMQ) -> dict[str, Any]:
    return {**IMPATIENT, "BROKERS": {"default": {"URL": rabbitmq.url()}}}


@pytest.fixture(autouse=True)
def in_force(settings: dict[str, Any]) -> Iterator[None]:
    with txmsg(**settings):
        yield


def put_foreign(destination: str, body: bytes, **headers: str) -> None:
    """Send a message with a raw client, because our client would add a `txmsg-id`."""
    address = split_url(get_broker()._url)
    assert address.port is not None
    kind, _, name = destination.rpartition(":")
    with RawClient(
        ("127.0.0.1", address.port), login=USER, passcode=PASSWORD
    ) as client:
        to = {"destination": f"/{kind or 'queue'}/{name}", "persistent": "true"}
        client.send("SEND", {**to, **JSON, **headers}, body, receipt="sent")
        client.expect_receipt("sent")


def effect(message: Message) -> None:
    Effect.objects.create(name=str(message.body), message_id=str(message.id))


def effects() -> list[str]:
    return sorted(Effect.objects.values_list("name", flat=True))


def left(destination: str) -> int:
    with get_broker().open() as opened:
        opened.subscribe(destination, prefetch=10)
        return len(list(iter(lambda: opened.receive(0.5), None)))


@pytest.mark.parametrize("batch", [1, 5])
def test_foreign_messages_are_copies_if_id_and_content_are_equal(
    destination: str, batch: int
) -> None:
    with declared(effect, destination, batch=batch) as stage:
        for _ in range(2):
            put_foreign(destination, b'"equal"')
            put_foreign(destination, b'"named"', **{"amqp-message-id": "7"})
        put_foreign(destination, b'"used again"', **{"amqp-message-id": "7"})
        put_foreign(destination, b'"named"', **{"amqp-message-id": "7", "retry": "1"})
        with running(stage) as (thread,):
            wait_until(lambda: len(effects()) == 5, deadline=60)
            wait_until(lambda: thread.dry)
        assert left(destination) == 0
    assert effects() == ["equal", "equal", "named", "named", "used again"]


@pytest.mark.parametrize("mode", ["best_effort_1pc", "broker_only"])
def test_foreign_messages_are_once_in_other_modes_too(
    destination: str, mode: Any
) -> None:
    with declared(effect, destination, transaction=mode) as stage:
        put_foreign(destination, b"1")
        put_foreign(destination, b"1")
        with running(stage) as (thread,):
            wait_until(lambda: len(effects()) == 2, deadline=60)
            wait_until(lambda: thread.dry)
        assert left(destination) == 0
    assert effects() == ["1", "1"]


def test_a_topics_message_goes_back_to_its_subscriber_alone(destination: str) -> None:
    topic = f"topic:{destination}"
    first = {"name": f"{destination}.first"}
    second = {"name": f"{destination}.second"}
    with (
        declared(effect, topic, **first) as one,
        declared(effect, topic, **second) as two,
        running(one) as (left_thread,),
        running(two) as (right_thread,),
    ):
        wait_until(lambda: left_thread.dry and right_thread.dry)
        put_foreign(topic, b"1")
        wait_until(lambda: len(effects()) == 2, deadline=60)
        wait_until(lambda: left_thread.dry and right_thread.dry)
    assert sorted(InboxMessage.objects.values_list("stage", flat=True)) == [
        first["name"],
        second["name"],
    ]


@pytest.mark.parametrize("mode", ["outbox", "broker_only"])
def test_message_refused_on_return_is_kept_in_the_inbox(
    rabbitmq: services.RabbitMQ, destination: str, mode: Any
) -> None:
    """The consumer may not write to the queue, so it cannot send messages back to give
    them ids. Each message gets its id in the inbox, and is processed from there."""
    ours = str(uuid.uuid4())
    put_foreign(destination, b'"equal"', colour="red")
    put_foreign(destination, b'"equal"', colour="red")
    put_foreign(destination, b'"ours"', **{"txmsg-id": ours})
    url = rabbitmq.url(user=READER, password=PASSWORD)
    with (
        txmsg(**{**IMPATIENT, "BROKERS": {"default": {"URL": url}}}),
        declared(effect, destination, transaction=mode) as stage,
        running(stage) as (thread,),
    ):
        # Equal ones are two messages still.
        everything = ["equal", "equal", "ours"]
        wait_until(lambda: effects() == everything, deadline=60)
        wait_until(lambda: thread.dry)
    assert left(destination) == 0
    assert not DeadLetter.objects.exists()
    assert not InboxMessage.objects.filter(attempts__gt=1).exists()


def test_a_dead_letter_that_does_not_go_back_is_taken_in(
    rabbitmq: services.RabbitMQ, destination: str
) -> None:
    put_foreign(destination, b"given up")
    url = rabbitmq.url(user=READER, password=PASSWORD)
    with (
        txmsg(**{**IMPATIENT, "BROKERS": {"default": {"URL": url}}}),
        taking_in(url, destination),
    ):
        wait_until(DeadLetter.objects.exists, deadline=60)
    assert left(destination) == 0
    letter = DeadLetter.objects.get()
    assert (letter.reason, bytes(letter.body)) == ("broker", b"given up")


def test_unreadable_foreign_message_is_one_dead_letter(
    destination: str,
) -> None:
    """The message has no stable id, and its worker dies twice before the
    acknowledgement. There is still only one dead letter."""
    put_foreign(destination, b'{"cut off": ')
    with declared(effect, destination) as stage:
        for _ in range(2):
            with get_broker().open() as opened:
                opened.subscribe(destination, prefetch=1)
                delivery = wait_until(lambda: opened.receive(1))
                stop, mode = threading.Event(), modes.of(stage)
                inbox.process(Arrival(mode, delivery, opened, "test", stop))
        step(stage)
    letter = DeadLetter.objects.get()
    assert (letter.reason, letter.deaths) == ("undecodable_body", 3)
    assert left(destination) == 0


def declare() -> None:
    """Declare a stage in the worker, with a crash point after the commit. If DEADLY is
    set, the stage's handler kills the worker."""

    def handler(message: Message) -> None:
        if os.environ.get("DEADLY"):
            print("attempt", message.delivery_attempt, flush=True)  # noqa: T201
            os.kill(os.getpid(), signal.SIGKILL)
        effect(message)

    policy = RedeliveryPolicy(max_redeliveries=2, initial_delay=0.0)
    stages.stage(os.environ["FOREIGN"], redelivery=policy)(handler)
    crash_points.after(inbox, "run", "committed")


def test_workers_killed_before_acknowledging_have_one_effect(
    destination: str, manage: Manage, settings: dict[str, Any], tmp_path: Path
) -> None:
    put_foreign(destination, b'"once"')

    def consume(point: str) -> Any:
        return manage(
            *("consume", destination, "--once"),
            hook="tests.integration.test_foreign_on_rabbitmq.declare",
            txmsg=settings,
            env={
                "FOREIGN": destination,
                "CRASH_POINT": point,
                "CRASH_GO": str(tmp_path / "never"),
            },
        )

    first = consume("committed")
    first.wait_for_line("at committed")
    first.kill()
    # Copies are dropped before they run: this one is killed while it does that.
    second = consume("")
    wait_until(InboxMessage.objects.filter(deliveries=2).exists, deadline=60)
    second.kill()
    consume("").succeed()
    assert effects() == ["once"]
    assert InboxMessage.objects.get().state == "processed"
    assert left(destination) == 0


@pytest.mark.matrix
def test_poison_ends_in_the_dead_letters(
    destination: str, manage: Manage, settings: dict[str, Any]
) -> None:
    put_foreign(destination, b'"deadly"')
    attempts: list[str] = []
    for _ in range(4):
        worker = manage(
            *("consume", destination, "--once"),
            hook="tests.integration.test_foreign_on_rabbitmq.declare",
            txmsg=settings,
            env={"FOREIGN": destination, "DEADLY": "1"},
        )
        worker.wait()
        attempts += [one for one in worker.output.split("\n") if "attempt " in one]
    assert attempts == ["attempt 1", "attempt 2", "attempt 3"]
    letter = DeadLetter.objects.get()
    assert (letter.reason, letter.attempts, letter.deaths) == ("worker_lost", 3, 1)
    assert InboxMessage.objects.get().message_id == letter.message_id
    assert json.loads(bytes(letter.body)) == "deadly"
    assert left(destination) == 0
