"""Real servers that say "not here, not now": full queues, a permission that is taken
away.

No message is blamed, all arrive in the order of their keys once the server takes them
again, and another destination loses nothing meanwhile. `make soak` keeps each state up
for TXMSG_SOAK_SECONDS (an hour, say).
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import transaction

from django_txmsg.brokers import get_broker
from django_txmsg.models import DeadLetter, OutboxMessage
from django_txmsg.relaying.relay import Relay
from django_txmsg.sending.outbox import send_messages
from django_txmsg.upkeep import breaker
from tests.faults import wait_until
from tests.running import IMPATIENT, at_work, committing, drained, txmsg
from tests.services import ByAmqp, RabbitMQ, SmallActiveMQ
from tests.services.activemq import CRAMPED
from tests.services.stomp_server import PASSWORD

pytestmark = committing

SOAK = float(os.environ.get("TXMSG_SOAK_SECONDS", "60"))
#: How long a state lasts: long enough for more trials than a message has attempts.
LASTING = [pytest.param(0.0, id="short"), pytest.param(SOAK, marks=pytest.mark.soak)]
lasting = pytest.mark.parametrize("seconds", LASTING)
PAUSES = 0.5


@contextmanager
def relayed(url: str) -> Iterator[None]:
    """Relay to a broker; a message that is blamed twice is dead."""
    relay = {**IMPATIENT["RELAY"], "MAX_ATTEMPTS": 2, "BREAKER_MAX_PAUSE": PAUSES}
    with (
        txmsg(BROKERS={"default": {"URL": url}}, RELAY=relay),
        at_work(Relay(["default"], ["default"])),
    ):
        yield


def store(destination: str, numbers: range, **more: Any) -> None:
    with transaction.atomic():
        send_messages(
            {"destination": destination, "body": n, "key": f"{destination}/{n % 5}"}
            | more
            for n in numbers
        )


def pending(destination: str) -> int:
    rows = OutboxMessage.objects.filter(destination=destination, dispatched_at=None)
    return rows.count()


def outage(kind: str, words: str) -> None:
    """Wait until this process knows of an outage, in the broker's words."""

    def known() -> bool:
        return any(one.kind == kind and words in one.error for one in breaker.outages())

    wait_until(known, deadline=60, message=lambda: f"{breaker.outages()}")


def stays(tried: Callable[[], int], seconds: float) -> None:
    """Let the state last until it has been met four times, and so many seconds."""
    end, begin = time.monotonic() + seconds, tried()
    wait_until(
        lambda: tried() >= begin + 4 and time.monotonic() > end,
        deadline=seconds + 90,
        interval=0.2,
    )


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Counts how often this process has met an outage."""
    met: list[float] = []
    failed = breaker.Breaker.failed

    def count(self: breaker.Breaker, *args: Any, **more: Any) -> None:
        if not self.remaining:
            met.append(time.monotonic())
        failed(self, *args, **more)

    monkeypatch.setattr(breaker.Breaker, "failed", count)
    return lambda: len(met)


def arrived(destination: str) -> list[int]:
    """Take what has arrived, each message once, in the order of the first copies."""
    found: dict[str, int] = {}
    for one in drained(destination):
        found.setdefault(one.headers["txmsg-id"], int(one.body))
    return list(found.values())


def in_order(destination: str, count: int) -> None:
    assert not DeadLetter.objects.exists()
    assert not OutboxMessage.objects.exclude(attempts=0).exists()
    by_key: dict[int, list[int]] = defaultdict(list)
    for number in arrived(destination):
        by_key[number % 5].append(number)
    assert sum(map(len, by_key.values())) == count
    assert all(numbers == sorted(numbers) for numbers in by_key.values())


@pytest.fixture(params=["amqp", "stomp"])
def node(request: pytest.FixtureRequest, rabbitmq: RabbitMQ) -> RabbitMQ | ByAmqp:
    """A RabbitMQ, by either protocol."""
    return ByAmqp(rabbitmq) if request.param == "amqp" else rabbitmq


@lasting
def test_a_full_queue_of_rabbitmq(
    node: Any, destination: str, trials: Callable[[], int], seconds: float
) -> None:
    full, free = f"{destination}.full", f"{destination}.free"
    policy = uuid.uuid4().hex
    node.control(
        "set_policy", policy, f"^{full}$",
        '{"max-length": 3, "overflow": "reject-publish"}', "--apply-to", "queues",
    )  # fmt: skip
    store(full, range(60))
    with relayed(node.url()):
        outage("destination", "full")
        store(free, range(300))
        wait_until(lambda: not pending(free), deadline=60)
        stays(trials, seconds)
        assert pending(full) >= 50
        node.control("clear_policy", policy)
        wait_until(lambda: not pending(full), deadline=60)
        in_order(free, 300)
        in_order(full, 60)


@lasting
def test_a_permission_that_is_taken_away_and_given_back(
    rabbitmq: RabbitMQ, destination: str, trials: Callable[[], int], seconds: float
) -> None:
    user, topic = uuid.uuid4().hex, f"topic:{destination}.forbidden"
    forbidden, free = f"{destination}.forbidden", f"{destination}.free"
    some = f"^({free}.*|amq[.]default)$"
    rabbitmq.control("add_user", user, PASSWORD)
    rabbitmq.control("set_permissions", user, ".*", ".*", ".*")
    store(forbidden, range(20))
    with relayed(rabbitmq.url(user=user)):
        wait_until(lambda: not pending(forbidden), deadline=60)
        rabbitmq.control("set_permissions", user, some, some, some)
        rabbitmq.close_all_connections()
        store(forbidden, range(20, 40))
        store(topic, range(3))
        outage("destination", "ACCESS_REFUSED")
        store(free, range(300))
        wait_until(lambda: not pending(free), deadline=60)
        stays(trials, seconds)
        rabbitmq.control("set_permissions", user, ".*", ".*", ".*")
        wait_until(lambda: not pending(forbidden) + pending(topic), deadline=60)
        in_order(free, 300)
        in_order(forbidden, 40)


@lasting
def test_a_full_queue_of_activemq(
    small_activemq: SmallActiveMQ,
    destination: str,
    trials: Callable[[], int],
    seconds: float,
) -> None:
    full, free = f"{CRAMPED}{destination}", destination
    store(full, range(100), headers={"padding": "x" * 2000})
    with relayed(small_activemq.url()):
        outage("destination", "Memory Limit reached")
        store(free, range(300))
        wait_until(lambda: not pending(free), deadline=60)
        stays(trials, seconds)
        assert pending(full)
        taken: list[int] = []
        emptied = threading.Event()

        def consume() -> None:
            with get_broker("default").open() as session:
                session.subscribe(full, prefetch=5)
                while not emptied.is_set():
                    one = session.receive(0.2)
                    if one is not None:
                        taken.append(int(one.body))
                        session.ack([one])

        consumer = threading.Thread(target=consume)
        consumer.start()
        try:
            wait_until(lambda: len(taken) == 100, deadline=90)
        finally:
            emptied.set()
            consumer.join()
        in_order(free, 300)
    for key in range(5):
        assert [n for n in taken if n % 5 == key] == list(range(key, 100, 5))
