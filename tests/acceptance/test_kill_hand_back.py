"""Redelivery mode "broker": a worker sends a copy of a failed message, and is killed
before it acknowledges the original. The message is processed once, or buried once after
the usual number of attempts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from django_txmsg import stages
from django_txmsg.consuming import failure
from django_txmsg.envelope.message import Message
from django_txmsg.envelope.redelivery import RedeliveryPolicy
from django_txmsg.models import Attempt, DeadLetter, InboxMessage
from tests.acceptance import crash_points
from tests.acceptance.crash_play import Manage
from tests.app.models import Effect
from tests.faults import ManageProcess, wait_until
from tests.running import IMPATIENT, committing, put, txmsg
from tests.services.stomp_server import StompServer

pytestmark = committing


def declare() -> None:
    """Declare stages whose handlers fail. Make the worker wait after the broker has
    stored the first copy of a message."""

    def handler(message: Message) -> None:
        if message.body == "always" or message.delivery_attempt == 1:
            raise ValueError(f"fails {message.body}")
        Effect.objects.create(name=message.body, message_id=str(message.id))

    delay = float(os.environ.get("FAILING_DELAY", "0.3"))
    policy = RedeliveryPolicy(initial_delay=delay, backoff=1.0, mode="broker")
    for name in json.loads(os.environ["FAILING_STAGES"]):
        stages.stage(name, redelivery=policy)(handler)
    crash_points.after(failure, "_hand_back", "handed back")


@pytest.mark.postgresql  # one database will do: the brokers differ
@pytest.mark.parametrize(
    "broker",
    [
        "activemq",
        pytest.param("rabbitmq", marks=pytest.mark.matrix),
        pytest.param("rabbitmq_amqp", marks=pytest.mark.soak),
    ],
)
def test_copy_and_delivery_after_a_kill_are_processed_once(
    broker: str,
    manage: Manage,
    destination: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """A worker is killed between sending the copy and acknowledging the original, so
    both arrive. Only one attempt is counted for the two, and the handler takes effect
    once."""
    server: StompServer = request.getfixturevalue(broker)
    settings = {**IMPATIENT, "BROKERS": {"default": {"URL": server.url()}}}
    once, always = f"{destination}.once", f"{destination}.always"

    def consume(*names: str, point: str = "") -> ManageProcess:
        return manage(
            *("consume", *names),
            hook="tests.acceptance.test_kill_hand_back.declare",
            txmsg=settings,
            env={
                "FAILING_STAGES": json.dumps(names),
                "CRASH_POINT": point,
                "CRASH_GO": str(tmp_path / "never"),
            },
        )

    with txmsg(**settings):
        put(once, b'"once"')
        put(always, b'"always"')
    victims = [consume(name, point="handed back") for name in (once, always)]
    for victim in victims:
        victim.wait_for_line("at handed back")
        victim.kill()
    survivor = consume(once, always)

    def settled() -> bool:
        return (
            DeadLetter.objects.exists()
            # The first delivery, the same again, and the copy.
            and InboxMessage.objects.filter(stage=once, deliveries=3).exists()
        )

    wait_until(settled, deadline=60, message=lambda: survivor.output)
    survivor.terminate()
    survivor.succeed()
    row = InboxMessage.objects.get(stage=once)
    assert (row.state, row.attempts) == ("processed", 2)
    assert Effect.objects.get().name == "once"
    letter = DeadLetter.objects.get()
    assert (letter.stage, letter.attempts) == (always, 7)
    assert (letter.reason, letter.deaths) == ("attempts_exhausted", 1)
    numbers = Attempt.objects.filter(stage=always).order_by("number")
    assert [one.number for one in numbers] == list(range(1, 8))


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "broker",
    ["activemq", "rabbitmq", pytest.param("rabbitmq_amqp", marks=pytest.mark.soak)],
)
def test_copies_survive_the_broker_that_keeps_them(
    broker: str, manage: Manage, destination: str, request: pytest.FixtureRequest
) -> None:
    server: StompServer = request.getfixturevalue(broker)
    settings = {**IMPATIENT, "BROKERS": {"default": {"URL": server.url()}}}
    worker = manage(
        *("consume", destination),
        hook="tests.acceptance.test_kill_hand_back.declare",
        txmsg=settings,
        env={"FAILING_STAGES": json.dumps([destination]), "FAILING_DELAY": "3"},
    )

    def effects(count: int) -> None:
        wait_until(
            lambda: Effect.objects.count() == count,
            deadline=90,
            message=lambda: worker.output,
        )

    with txmsg(**settings):
        put(destination, b'"once"')
        # RabbitMQ has its queues on disk by then: it can lose one made just now. All
        # delays are of one queue: three seconds, more or less.
        effects(1)
        for round_ in range(2):
            for _ in range(20):
                put(destination, b'"once"')
            wait_until(lambda n=round_: Attempt.objects.count() == 21 + 20 * n)
            server.kill()
            server.start()
            effects(21 + 20 * round_)
    worker.terminate()
    worker.succeed()
    assert not DeadLetter.objects.exists()
    assert not InboxMessage.objects.filter(processed_at=None).exists()
    assert Effect.objects.values("message_id").distinct().count() == 41
