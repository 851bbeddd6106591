"""Relays, consumers, brokers and the database are killed, or unavailable for a while.
Each message is processed once. The messages of each key are processed in order."""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from django.db import DatabaseError, InterfaceError, connections, transaction

from django_txmsg import stages
from django_txmsg.envelope.message import Message
from django_txmsg.models import InboxMessage
from django_txmsg.sending.outbox import send_message
from tests.acceptance.crash_play import Manage
from tests.acceptance.test_database_faults import all_connections_ended, demoted
from tests.app.models import Effect
from tests.faults import ManageProcess, wait_until
from tests.running import IMPATIENT, committing, txmsg
from tests.services.stomp_server import StompServer

pytestmark = [committing, pytest.mark.postgresql, pytest.mark.timeout(300)]

HOOK = f"{__name__}.declare"
STAGE = "TESTS_ORDERED_STAGE"
KEYS = 4
COMMANDS = ("relay", "relay", "consume", "consume")


def declare() -> None:
    """Declare an ordered stage in a worker that the test kills."""
    stages.stage(os.environ[STAGE], ordered="block", concurrency=2)(note)


def note(message: Message) -> None:
    """Record an effect, and fail at the first attempt of some messages."""
    Effect.objects.create(name=str(message.body), message_id=str(message.id))
    if message.delivery_attempt == 1 and message.id.int % 7 == 0:
        raise ValueError


class Traffic:
    """Messages of some keys, on their way through two relays and two consumers."""

    def __init__(self, manage: Manage, url: str, destination: str) -> None:
        self._manage, self._destination = manage, destination
        self.settings: dict[str, Any] = {
            **IMPATIENT,
            "BROKERS": {"default": {"URL": url}},
            "RELAY": {
                **{"POLL_INTERVAL": 0.05, "LEASE": 2, "BATCH_SIZE": 5, "LANES": 1},
                "BREAKER_MAX_PAUSE": 1.0,
            },
            "REDELIVERY": {
                **{"INITIAL_DELAY": 0.0, "MAX_DELAY": 0.0, "MAX_REDELIVERIES": 50}
            },
        }
        self.each = 0
        self.workers = [self._start(command) for command in COMMANDS]

    def _start(self, command: str) -> ManageProcess:
        return self._manage(
            command, txmsg=self.settings, hook=HOOK, env={STAGE: self._destination}
        )

    def kill(self, place: int) -> None:
        """Kill a worker, and start another like it."""
        self.workers[place].kill()
        self.workers[place] = self._start(COMMANDS[place])

    def store(self, each: int) -> None:
        """Store `each` messages of each key."""
        for number in range(self.each, self.each + each):
            for key in range(KEYS):
                with transaction.atomic():
                    send_message(self._destination, f"{key}:{number}", key=f"key-{key}")
        self.each += each

    def reach(self, effects: int) -> None:
        """Wait until `effects` effects are recorded, even if the database is
        unavailable meanwhile."""
        wait_until(
            lambda: asked(Effect.objects.count) >= effects,
            deadline=120,
            message=lambda: "\n".join([str(open_rows()), *self._outputs()]),
        )

    def _outputs(self) -> list[str]:
        return [one.output[-2000:] for one in self.workers]

    def finish(self) -> None:
        """Check that each message was processed once, and the messages of each key in
        order."""
        # The claim of a killed worker has a lease. End it instead of waiting.
        asked(
            lambda: InboxMessage.objects.filter(lease_until__isnull=False).update(
                lease_until="2000-01-01T00:00:00+00:00"
            )
        )
        self.reach(KEYS * self.each)
        found: dict[str, list[int]] = defaultdict(list)
        for name in Effect.objects.order_by("id").values_list("name", flat=True):
            key, _, number = name.partition(":")
            found[key].append(int(number))
        assert dict(found) == {str(key): list(range(self.each)) for key in range(KEYS)}
        ids = Effect.objects.values_list("message_id", flat=True)
        assert len(set(ids)) == KEYS * self.each


def asked(query: Callable[[], int]) -> int:
    """Return the result of a database query, or 0 if the database is unavailable."""
    try:
        return query()
    except (DatabaseError, InterfaceError):
        connections.close_all()
        return 0


def open_rows() -> list[dict[str, Any]]:
    """Return the inbox rows that are not processed."""
    rows = InboxMessage.objects.filter(processed_at=None)
    names = ("message_id", "key", "waits_for", "due_at", "attempts", "lease_until")
    return list(rows.values(*names))


@pytest.mark.parametrize(
    "broker", ["activemq", pytest.param("rabbitmq", marks=pytest.mark.soak)]
)
def test_killed_workers_keep_the_order_of_each_key(
    broker: str, manage: Manage, destination: str, request: pytest.FixtureRequest
) -> None:
    server: StompServer = request.getfixturevalue(broker)
    chance, kills, each = random.Random(11), 6, 15
    traffic = Traffic(manage, server.url(), destination)
    with txmsg(**traffic.settings):
        traffic.store(each)
        # Spread over the way: one dies each time that some more have arrived.
        for number in range(kills):
            traffic.reach(number * KEYS * each // (kills + 2))
            traffic.kill(chance.randrange(len(COMMANDS)))
        traffic.finish()


@pytest.mark.parametrize(
    ("broker", "kills"),
    [
        pytest.param("activemq", 1, marks=pytest.mark.matrix),
        pytest.param("activemq", 5, marks=pytest.mark.soak),
        pytest.param("rabbitmq", 5, marks=pytest.mark.soak),
        pytest.param("rabbitmq_amqp", 5, marks=pytest.mark.soak),
    ],
)
def test_killed_broker_keeps_the_order_of_each_key(
    broker: str,
    kills: int,
    manage: Manage,
    destination: str,
    request: pytest.FixtureRequest,
) -> None:
    server: StompServer = request.getfixturevalue(broker)

    def fault() -> None:
        server.kill()
        server.start()

    through(Traffic(manage, server.url(), destination), fault, kills)


@pytest.mark.soak
@pytest.mark.parametrize(("fault", "times"), [(demoted, 4), (all_connections_ended, 8)])
def test_read_only_database_keeps_the_order_of_each_key(
    fault: Callable[[], None], times: int, manage: Manage, destination: str
) -> None:
    """The server becomes read-only or ends all connections, as in a failover, while
    messages are on their way. Each key is still processed in order."""
    traffic = Traffic(manage, "database://?poll=0.05&lease=5", destination)
    through(traffic, fault, times)


def through(traffic: Traffic, fault: Callable[[], None], times: int) -> None:
    """Cause the fault `times` times while messages are on their way."""
    with txmsg(**traffic.settings):
        traffic.store(3)
        for _ in range(times):
            before = KEYS * traffic.each
            traffic.store(8)
            traffic.reach(before)
            fault()
        traffic.finish()
