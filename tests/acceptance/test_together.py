"""One service uses ordered keys, a rate, replaced messages and several child processes,
while the children and the parent are killed. Each message is processed once. An ordered
stage processes its messages in order."""

from __future__ import annotations

import os
import random
import signal
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from django.db import transaction

from django_txmsg.models import DeadLetter, InboxMessage, OutboxMessage
from django_txmsg.sending.outbox import send_message
from tests.app.models import Effect
from tests.faults import ManageProcess, wait_until
from tests.running import IMPATIENT, committing, txmsg
from tests.services.stomp_server import StompServer

pytestmark = [committing, pytest.mark.postgresql, pytest.mark.timeout(3600)]

#: The stage of a key's orders stores a mail for its tenant, and replaces the pending
#: request to refresh the key's page.
STAGES = """
import os
from django_txmsg import send_message, stage
from tests.app.models import Effect

PREFIX = os.environ["TESTS_PREFIX"]


def declare():
    @stage(PREFIX + ".orders", ordered="block", concurrency=2)
    def order(message):
        key, _, number = message.body.partition(":")
        Effect.objects.create(name=f"order {message.body}", message_id=str(message.id))
        send_message(PREFIX + ".mail", message.body, headers={"tenant": key})
        send_message(PREFIX + ".refresh", message.body, unique=f"{PREFIX} {key}",
                     on_conflict="replace")
        if message.delivery_attempt == 1 and message.id.int % 7 == 0:
            raise ValueError

    @stage(PREFIX + ".mail", rate="20/s", per="tenant", concurrency=2)
    def mail(message):
        Effect.objects.create(name=f"mail {message.body}", message_id=str(message.id))

    @stage(PREFIX + ".refresh", rate="50/s")
    def refresh(message):
        name = f"refresh {message.body}"
        Effect.objects.create(name=name, message_id=str(message.id))
"""
KEYS = 4


@pytest.mark.parametrize(
    ("each", "kills"),
    [
        pytest.param(30, 6, marks=pytest.mark.matrix),
        pytest.param(250, 60, marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("broker", ["database", "rabbitmq", "activemq"])
def test_features_together_survive_kills_of_children_and_parent(
    broker: str,
    each: int,
    kills: int,
    manage: Callable[..., ManageProcess],
    destination: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    url = "database://?poll=0.01&lease=2"
    if broker != "database":
        server: StompServer = request.getfixturevalue(broker)
        url = server.url()
    (tmp_path / "stages_together.py").write_text(STAGES)
    settings = {
        **IMPATIENT,
        "BROKERS": {"default": {"URL": url}},
        "RELAY": {"POLL_INTERVAL": 0.05, "LEASE": 2, "BREAKER_MAX_PAUSE": 1.0},
        "REDELIVERY": {"INITIAL_DELAY": 0.0, "MAX_DELAY": 0.0, "MAX_REDELIVERIES": 50},
    }

    def start() -> ManageProcess:
        return manage(
            *("txmsg", "run", "--processes", "2"),
            txmsg=settings,
            hook="stages_together.declare",
            env={
                "PYTHONPATH": str(tmp_path),
                "PYTHONDONTWRITEBYTECODE": "1",
                "TESTS_PREFIX": destination,
            },
        )

    def reach(wanted: int) -> None:
        wait_until(
            lambda: Effect.objects.filter(name__startswith="order ").count() >= wanted,
            deadline=300,
            message=parent_said(parent),
        )

    chance = random.Random(kills)
    parent = start()
    with txmsg(**settings):
        for number in range(each):
            for key in range(KEYS):
                body = f"{key}:{number}"
                with transaction.atomic():
                    send_message(f"{destination}.orders", body, key=f"key {key}")
    for kill in range(kills):
        reach(KEYS * each * (kill + 1) // (kills + 1))
        children = psutil.Process(parent.pid).children()
        if kill % 5 == 4:
            parent.kill()
            parent = start()
        elif children:
            os.kill(chance.choice(children).pid, signal.SIGKILL)

    # The claims of a killed process have a lease. End them instead of waiting.
    InboxMessage.objects.filter(lease_until__isnull=False).update(
        lease_until="2000-01-01T00:00:00+00:00"
    )
    wait_until(lambda: not unfinished(), deadline=600, message=parent_said(parent))
    parent.terminate()
    parent.succeed()

    assert not DeadLetter.objects.exists()
    found: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for name in Effect.objects.order_by("id").values_list("name", flat=True):
        kind, _, body = name.partition(" ")
        key, _, number = body.partition(":")
        found[kind][key].append(int(number))
    complete = {str(key): list(range(each)) for key in range(KEYS)}
    assert dict(found["order"]) == complete
    assert {key: sorted(each) for key, each in found["mail"].items()} == complete
    # Of the requests to refresh a page, the last is never replaced.
    assert {key: max(each) for key, each in found["refresh"].items()} == {
        str(key): each - 1 for key in range(KEYS)
    }
    sent = OutboxMessage.objects.exclude(dispatched_at=None)
    effects = Effect.objects.values_list("message_id", flat=True)
    assert sorted(effects) == sorted(
        str(one) for one in sent.values_list("message_id", flat=True)
    )


def unfinished() -> list[str]:
    """Return texts about unfinished work: messages that wait to be sent or processed,
    at most five of each, and the number of effects if it differs from the number of
    sent messages."""
    left = OutboxMessage.objects.filter(dispatched_at=None, cancelled_at=None)
    names = [f"outbox {one}" for one in left.values_list("message_id", flat=True)[:5]]
    rows = InboxMessage.objects.filter(processed_at=None)
    names += [f"inbox {one}" for one in rows.values_list("message_id", flat=True)[:5]]
    sent = OutboxMessage.objects.exclude(dispatched_at=None).count()
    if (effects := Effect.objects.count()) != sent:
        names.append(f"{sent} sent, {effects} effects")
    return names


def parent_said(parent: ManageProcess) -> Callable[[], str]:
    """Return a function for the message of a failure. The function returns a text with
    the unfinished work and the end of the parent's output."""
    return lambda: f"{unfinished()}\n{parent.output[-3000:]}"
