"""How fast the relay serves one destination while the broker refuses another.

    python -m benchmarks.refused [--messages 20000] [--rounds 3]

A running relay gets messages for a working destination. Its rate is measured without
other messages, and while 500 messages wait for a second destination that is full or
forbidden. The measurement starts after the first refusal, so it includes the first
retries, which are frequent.
"""

from __future__ import annotations

import argparse
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from . import stand

#: Messages that wait for the destination that refuses.
WAITING = 500
#: A state of a broker: yields its URL, and the destination that refuses.
Way = Callable[[Any, str], AbstractContextManager[tuple[str, str]]]
_FULL = '{"max-length": 3, "overflow": "reject-publish"}'


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    from tests import services

    stand.django(stand.postgresql(), {"SERVICE": "bench", "DISPATCH_ON_COMMIT": "off"})
    rabbitmq = services.shared(services.RabbitMQ)

    class Roomy(services.SmallActiveMQ):
        """A broker with a large store. It refuses a message only if the message's queue
        is full."""

        store, journal = "4 gb", ""

    activemq = services.shared(Roomy)
    brokers: dict[str, tuple[Any, list[Way]]] = {
        "RabbitMQ by AMQP": (services.ByAmqp(rabbitmq), [full, forbidden]),
        "RabbitMQ by STOMP": (rabbitmq, [full, forbidden]),
        "ActiveMQ": (activemq, [full_memory]),
    }
    for name, (broker, refusals) in brokers.items():
        contenders = {"alone": partial(rate, broker, nothing, options.messages)}
        for way in refusals:
            what = f"while another destination is {way.__name__.split('_')[0]}"
            contenders[what] = partial(rate, broker, way, options.messages)
        figures = stand.turns(contenders, options.rounds)
        goals = dict.fromkeys(list(figures)[1:], 0.9)
        stand.table(f"relay to {name}", figures, "alone", goals=goals)


def rate(broker: Any, way: Way, count: int) -> float:
    """Return the rate of messages to the working destination. `way` prepares the
    destination that the broker refuses."""
    from django.db import connection
    from django.test import override_settings

    from django_txmsg.relaying.relay import Relay

    free = f"bench.free.{uuid.uuid4().hex[:8]}"
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE django_txmsg_outboxmessage")
    user = "bench" + uuid.uuid4().hex[:8]
    with way(broker, user) as (url, refused):
        settings = {
            "SERVICE": "bench",
            "DISPATCH_ON_COMMIT": "off",
            "BROKERS": {"default": {"URL": url}},
        }
        with override_settings(TXMSG=settings):
            relay = Relay(["default"], ["default"])
            thread = threading.Thread(target=relay.run)
            thread.start()
            try:
                if refused:
                    store(refused, WAITING, "x" * 2000)
                    met()
                began = store(free, count, "x" * 300)
                while waits(free):
                    time.sleep(0.02)
                seconds = time.perf_counter() - began
                assert not refused or waits(refused), "it was not refused"
                assert dispatched(free) == count
            finally:
                relay.stop()
                thread.join()
        drain(url, free, count)
    return count / seconds


def store(destination: str, count: int, body: str) -> float:
    """Store messages in one transaction. Returns the time of its commit."""
    from django.db import transaction

    from django_txmsg import send_messages

    with transaction.atomic():
        for _ in range(0, count, 1000):
            send_messages(
                {"destination": destination, "body": body}
                for _ in range(min(1000, count))
            )
    return time.perf_counter()


def waits(destination: str) -> bool:
    """Return whether any message to this destination is not dispatched yet."""
    from django_txmsg.models import OutboxMessage

    rows = OutboxMessage.objects.filter(dispatched_at=None, destination=destination)
    return rows.exists()


def dispatched(destination: str) -> int:
    """Return the number of dispatched messages to this destination."""
    from django_txmsg.models import OutboxMessage

    rows = OutboxMessage.objects.exclude(dispatched_at=None)
    return rows.filter(destination=destination).count()


def met() -> None:
    """Wait until the broker has refused a message of the relay."""
    from django_txmsg.runtime import breaker

    end = time.monotonic() + 60
    while not any(one.kind == "destination" for one in breaker.outages()):
        assert time.monotonic() < end, breaker.outages()
        time.sleep(0.02)


@contextmanager
def nothing(broker: Any, user: str) -> Iterator[tuple[str, str]]:
    """Yield the broker's URL, and "" because no destination refuses messages."""
    yield broker.url(), ""


@contextmanager
def full(broker: Any, user: str) -> Iterator[tuple[str, str]]:
    """Yield the broker's URL, and a RabbitMQ queue that takes only three messages."""
    queue = f"bench.full.{user}"
    broker.control("set_policy", user, f"^{queue}$", _FULL, "--apply-to", "queues")
    yield broker.url(), queue
    broker.control("clear_policy", user)


@contextmanager
def forbidden(broker: Any, user: str) -> Iterator[tuple[str, str]]:
    """Yield a URL with a new user, and a queue to which this user may not write."""
    from tests.services.stomp_server import PASSWORD

    some = "^(bench[.]free.*|amq[.]default)$"
    broker.control("add_user", user, PASSWORD)
    broker.control("set_permissions", user, some, some, some)
    yield broker.url(user=user), f"bench.forbidden.{user}"
    broker.control("delete_user", user)


@contextmanager
def full_memory(broker: Any, user: str) -> Iterator[tuple[str, str]]:
    """Yield the broker's URL, and an ActiveMQ queue with little memory."""
    from tests.services.activemq import CRAMPED

    yield broker.url(), f"{CRAMPED}bench.{user}"


def drain(url: str, destination: str, count: int) -> None:
    """Receive all messages, and check that none is missing."""
    from django.test import override_settings

    from django_txmsg.brokers import get_broker

    settings = {"SERVICE": "bench", "BROKERS": {"default": {"URL": url}}}
    with override_settings(TXMSG=settings), get_broker("default").open() as session:
        session.subscribe(destination, prefetch=500)
        ids: set[str] = set()
        while len(ids) < count:
            one = session.receive(20)
            assert one is not None, f"{count - len(ids)} of {count} never arrived"
            ids.add(one.headers["txmsg-id"])
            session.ack([one])


if __name__ == "__main__":
    main()
