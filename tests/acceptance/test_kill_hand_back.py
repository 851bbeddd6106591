"""Mode "broker": a worker killed between the copy and the acknowledgement."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from django_txmsg import side_track, stages
from django_txmsg.message import Message
from django_txmsg.models import Attempt, DeadLetter, InboxMessage
from django_txmsg.redelivery import RedeliveryPolicy
from tests.acceptance import crash_points
from tests.acceptance.crash_play import Manage
from tests.app.models import Effect
from tests.faults import ManageProcess, wait_until
from tests.running import IMPATIENT, committing, put, txmsg
from tests.services.stomp_server import StompServer

pytestmark = committing


def declare() -> None:
    """In the worker: stages that fail, and a stop after the first copy is stored."""

    def handler(message: Message) -> None:
        if message.body == "always" or message.delivery_attempt == 1:
            raise ValueError(f"fails {message.body}")
        Effect.objects.create(name=message.body, message_id=str(message.id))

    policy = RedeliveryPolicy(initial_delay=0.3, backoff=1.0, mode="broker")
    for name in json.loads(os.environ["FAILING_STAGES"]):
        stages.stage(name, redelivery=policy)(handler)
    crash_points.after(side_track, "_hand_back", "handed back")


@pytest.mark.postgresql  # one database will do: the brokers differ
@pytest.mark.parametrize("broker", ["activemq", "rabbitmq"])
def test_both_are_there_and_one_is_dropped(
    broker: str,
    manage: Manage,
    destination: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """The inbox has counted the attempt: no attempt and no effect too many."""
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
