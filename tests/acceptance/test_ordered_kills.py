"""Relays and consumers killed again and again: each key is processed in its order."""

from __future__ import annotations

import itertools
import random
import uuid
from collections import defaultdict
from typing import Any

import pytest
from django.db import transaction

from django_txmsg import stages
from django_txmsg.envelope.message import Message
from django_txmsg.models import InboxMessage
from django_txmsg.sending.outbox import send_message
from tests.acceptance.crash_play import Manage
from tests.app.models import Effect
from tests.faults import ManageProcess, wait_until
from tests.running import IMPATIENT, committing, txmsg
from tests.services.stomp_server import StompServer

HOOK = f"{__name__}.declare"
STAGE = "tests.killed.in.order"
KEYS, EACH, KILLS = 4, 15, 6


def declare() -> None:
    """Declare the stage in a process that is going to be killed."""
    stages.stage(STAGE, ordered="block", concurrency=2)(note)


def note(message: Message) -> None:
    """Leave an effect, and fail now and then."""
    Effect.objects.create(name=str(message.body), message_id=str(message.id))
    if message.delivery_attempt == 1 and message.id.int % 7 == 0:
        raise ValueError


@committing
@pytest.mark.postgresql
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "broker", ["activemq", pytest.param("rabbitmq", marks=pytest.mark.soak)]
)
def test_each_key_in_its_order(
    broker: str, manage: Manage, request: pytest.FixtureRequest
) -> None:
    server: StompServer = request.getfixturevalue(broker)
    settings: dict[str, Any] = {
        **IMPATIENT,
        "BROKERS": {"default": {"URL": server.url()}},
        "RELAY": {"POLL_INTERVAL": 0.05, "LEASE": 2, "BATCH_SIZE": 5, "LANES": 1},
        "REDELIVERY": {"INITIAL_DELAY": 0.0, "MAX_DELAY": 0.0, "MAX_REDELIVERIES": 50},
    }
    chance = random.Random(11)

    def start(command: str) -> ManageProcess:
        return manage(command, txmsg=settings, hook=HOOK)

    with txmsg(**settings):
        commands = ["relay", "relay", "consume", "consume"]
        running = [start(command) for command in commands]
        for number in range(EACH):
            for key in range(KEYS):
                with transaction.atomic():
                    send_message(STAGE, f"{key}:{number}", key=f"key-{key}")
        wanted = KEYS * EACH
        # Spread over the way: one process dies each time that some more have arrived.
        for done in itertools.islice(itertools.count(0, wanted // (KILLS + 2)), KILLS):
            wait_until(lambda done=done: Effect.objects.count() >= done, deadline=60)
            place = chance.randrange(len(running))
            running[place].kill()
            running[place] = start(commands[place])
        # A killed worker's claim has a lease, whose end nobody waits for here.
        InboxMessage.objects.filter(lease_until__isnull=False).update(
            lease_until="2000-01-01T00:00:00+00:00"
        )
        wait_until(
            lambda: Effect.objects.count() >= wanted,
            deadline=120,
            message=lambda: str(list(
                InboxMessage.objects.filter(processed_at=None).values(
                    "message_id", "key", "waits_for", "due_at", "attempts",
                    "lease_until", "dead_at",
                )
            )),
        )  # fmt: skip
    found: dict[str, list[int]] = defaultdict(list)
    for name in Effect.objects.order_by("id").values_list("name", flat=True):
        key, _, number = name.partition(":")
        found[key].append(int(number))
    assert dict(found) == {str(key): list(range(EACH)) for key in range(KEYS)}
    ids = Effect.objects.values_list("message_id", flat=True)
    assert len(set(map(uuid.UUID, ids))) == wanted
