"""A relay is killed at each step. Every message is dispatched, and copies keep their
ids."""

from __future__ import annotations

import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction

from django_txmsg.brokers import get_broker
from django_txmsg.models import OutboxMessage
from django_txmsg.sending.outbox import send_messages
from tests.acceptance.crash_play import Manage
from tests.acceptance.crash_points import RELAY_STEPS
from tests.faults import wait_until
from tests.running import IMPATIENT, committing, txmsg
from tests.services.stomp_server import StompServer

pytestmark = committing

BATCH = 20


def arrivals(broker: str, destination: str, wanted: int) -> Counter[str]:
    """Receive until `wanted` different messages have arrived and the queue is empty.
    Return how often each message arrived."""
    seen: Counter[str] = Counter()
    with get_broker(broker).open() as session:
        session.subscribe(destination, prefetch=100)

        def all_there() -> bool:
            while (delivery := session.receive(0.5)) is not None:
                seen[delivery.headers["txmsg-id"]] += 1
                session.ack([delivery])
            return len(seen) >= wanted

        wait_until(all_there, deadline=60, message=lambda: f"{len(seen)} of {wanted}")
    return seen


def play(url: str, manage: Manage, destination: str) -> None:
    """For each step, start a relay that sends its own messages, and kill it at that
    step. Then start another relay, which sends the rest."""
    # A lane for each step: to the same broker, but by another alias.
    lanes = {f"lane{number}": step for number, step in enumerate(RELAY_STEPS)}
    settings: dict[str, Any] = {
        **IMPATIENT,
        "BROKERS": {name: {"URL": url} for name in ("default", *lanes)},
        "RELAY": {"POLL_INTERVAL": 0.05, "LEASE": 2, "BATCH_SIZE": BATCH, "LANES": 1},
    }
    with txmsg(**settings):
        for lane in lanes:
            with transaction.atomic():
                send_messages(
                    [
                        {"destination": f"{destination}.{lane}", "body": n}
                        for n in range(BATCH * 2)
                    ],
                    broker=lane,
                )
        for lane, step in lanes.items():
            relay = manage(
                *("relay", "--broker", lane),
                hook="tests.acceptance.crash_points.relays",
                txmsg=settings,
                env={"CRASH_POINT": step, "CRASH_GO": "/nowhere/to/go"},
            )
            relay.wait_for_line(f"at {step}")
            relay.kill()
        assert OutboxMessage.objects.filter(dispatched_at=None).exists()
        survivor = manage("relay", txmsg=settings)
        wait_until(
            lambda: not OutboxMessage.objects.filter(dispatched_at=None).exists(),
            deadline=60,
            message=lambda: survivor.output,
        )
        survivor.terminate()
        assert "Dispatched" in survivor.succeed()
        for lane, step in lanes.items():
            seen = arrivals(lane, f"{destination}.{lane}", BATCH * 2)
            rows = OutboxMessage.objects.filter(broker=lane)
            assert set(seen) == {str(one.message_id) for one in rows}, step
            copies = seen.total() - len(seen)
            # What was sent and not settled is sent again, and nothing else is.
            most = {"half sent": BATCH // 2, "sent": BATCH}.get(step, 0)
            assert copies == most, step
        assert not OutboxMessage.objects.exclude(attempts=0).exists()


@pytest.mark.matrix
def test_a_killed_relay_loses_nothing_on_the_embedded_broker(
    manage: Manage, destination: str
) -> None:
    play("database://?poll=0.01", manage, destination)


@pytest.mark.parametrize(
    "broker",
    [
        "activemq",
        pytest.param("rabbitmq", marks=pytest.mark.soak),
        pytest.param("rabbitmq_amqp", marks=pytest.mark.soak),
    ],
)
def test_a_killed_relay_loses_nothing_on_a_server(
    broker: str, manage: Manage, destination: str, request: pytest.FixtureRequest
) -> None:
    server: StompServer = request.getfixturevalue(broker)
    play(server.url(), manage, destination)


@pytest.mark.parametrize("signal", ["terminate", "interrupt"])
def test_a_stopped_relay_settles_what_it_has_claimed(
    signal: str, manage: Manage, destination: str, tmp_path: Path
) -> None:
    message_id = uuid.uuid4()
    with txmsg(), transaction.atomic():
        send_messages(
            [{"destination": destination, "body": 1, "message_id": message_id}]
        )
    go = tmp_path / "go"
    relay = manage(
        "relay",
        hook="tests.acceptance.crash_points.relays",
        txmsg=IMPATIENT,
        env={"CRASH_POINT": "claimed", "CRASH_GO": str(go)},
    )
    relay.wait_for_line("at claimed")
    getattr(relay, signal)()
    relay.wait_for_line("Stopping")
    go.touch()
    relay.succeed()
    assert OutboxMessage.objects.get(message_id=message_id).dispatched_at
