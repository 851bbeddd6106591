"""Relays, consumers, the broker or the database are killed while messages are on their
way. No message is lost, and none is processed twice."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from django.db import DatabaseError, InterfaceError, connections, transaction

from django_txmsg import stages
from django_txmsg.envelope.message import Message
from django_txmsg.models import DeadLetter, InboxMessage, OutboxMessage
from django_txmsg.sending.outbox import send_messages
from tests import services
from tests.acceptance.crash_play import Manage
from tests.app.models import Effect
from tests.faults import ManageProcess, wait_until
from tests.running import IMPATIENT, committing, txmsg
from tests.services.stomp_server import StompServer

pytestmark = [committing, pytest.mark.timeout(300)]


def declare() -> None:
    """Declare a stage that records one effect of each message."""
    options = json.loads(os.environ["BUSY_STAGE"])

    def handler(message: Message) -> None:
        Effect.objects.create(name=str(message.body), message_id=str(message.id))

    stages.stage(**options)(handler)


class Stream:
    """Messages on their way from the outbox to their effects."""

    def __init__(
        self, manage: Manage, url: str, destination: str, batch: int, **options: Any
    ) -> None:
        self._manage, self._destination = manage, destination
        self._settings: dict[str, Any] = {
            **IMPATIENT,
            "BROKERS": {"default": {"URL": url}},
            "RELAY": {"POLL_INTERVAL": 0.1, "LEASE": 5, "BREAKER_MAX_PAUSE": 1.0},
        }
        self._stage = {"destination": destination, "batch": batch, **options}
        #: What else its processes have in their environment.
        self.env: dict[str, str] = {}
        self.total = 0
        self.workers: list[ManageProcess] = []

    def start(self, *arguments: str) -> ManageProcess:
        """Start a relay or a consumer."""
        if arguments == ("consume",):
            arguments = ("consume", self._destination)
        self.workers.append(
            self._manage(
                *arguments,
                hook="tests.acceptance.test_kill_servers.declare",
                txmsg=self._settings,
                env={"BUSY_STAGE": json.dumps(self._stage), **self.env},
            )
        )
        return self.workers[-1]

    def store(self, count: int) -> None:
        """Store messages in transactions of 100."""
        with txmsg(**self._settings):
            for start in range(self.total, self.total + count, 100):
                with transaction.atomic():
                    send_messages(
                        {"destination": self._destination, "body": n}
                        for n in range(start, start + 100)
                    )
        self.total += count

    def reach(self, effects: int) -> None:
        """Wait until `effects` effects are recorded, even if the database is
        unavailable meanwhile."""

        def there() -> bool:
            try:
                return Effect.objects.count() >= effects
            except (DatabaseError, InterfaceError):
                connections.close_all()
                return False

        wait_until(
            there,
            deadline=240,
            interval=0.2,
            message=lambda: "\n".join(one.output[-3000:] for one in self.workers),
        )

    def finish(self) -> None:
        """Check that every message has had its effect exactly once."""
        self.reach(self.total)
        wait_until(
            lambda: not OutboxMessage.objects.filter(dispatched_at=None).exists()
        )
        for worker in self.workers:
            if worker.running:
                worker.terminate()
                worker.succeed()
        assert Effect.objects.count() == self.total
        bodies = Effect.objects.values_list("name", flat=True)
        assert sorted(map(int, bodies)) == list(range(self.total))
        assert not DeadLetter.objects.exists()
        assert not InboxMessage.objects.filter(processed_at=None).exists()


def through(stream: Stream, fault: Callable[[], None]) -> None:
    """Cause the fault twice while messages are on their way."""
    stream.start("relay")
    stream.start("consume")
    stream.store(200)
    for _ in range(2):
        before = stream.total
        stream.store(300)
        stream.reach(before)
        fault()
    stream.finish()


@pytest.mark.parametrize(
    "broker",
    [
        "activemq",
        pytest.param("rabbitmq", marks=pytest.mark.soak),
        pytest.param("rabbitmq_amqp", marks=pytest.mark.soak),
    ],
)
def test_killed_broker_loses_and_doubles_nothing(
    broker: str, manage: Manage, destination: str, request: pytest.FixtureRequest
) -> None:
    server: StompServer = request.getfixturevalue(broker)

    def fault() -> None:
        server.kill()
        server.start()

    through(Stream(manage, server.url(), destination, 1), fault)


@pytest.mark.postgresql
@pytest.mark.parametrize(
    "broker", ["activemq", pytest.param("embedded", marks=pytest.mark.matrix)]
)
def test_killed_postgresql_loses_and_doubles_nothing(
    broker: str,
    manage: Manage,
    destination: str,
    postgres: services.PostgreSQL,
    request: pytest.FixtureRequest,
) -> None:
    def fault() -> None:
        postgres.kill()
        connections.close_all()
        postgres.start()

    url = "database://?poll=0.05&lease=5"
    if broker == "activemq":
        url = request.getfixturevalue("activemq").url()
    through(Stream(manage, url, destination, 5), fault)


@pytest.mark.parametrize("count", [1_000, pytest.param(20_000, marks=pytest.mark.soak)])
def test_two_relays_and_four_consumers_process_each_message_once(
    count: int, manage: Manage, destination: str, activemq: services.ActiveMQ
) -> None:
    stream = Stream(manage, activemq.url(), destination, 20)
    stream.store(count)
    for _ in range(2):
        stream.start("relay", "--batch-size", "100")
    for _ in range(4):
        stream.start("consume")
    stream.finish()
