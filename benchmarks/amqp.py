"""The rates of the relay and of a stage over AMQP and over STOMP, on one RabbitMQ.

    python -m benchmarks.amqp [--messages 10000] [--rounds 3] [--lanes 4]

The first bare producer is py-amqp without a database. It sends messages from memory
over as many connections as the relay has lanes, and with as many unconfirmed messages
at a time as the relay. The second one waits for the confirm of each message, like
py-amqp's `basic_publish_confirm`.
"""

from __future__ import annotations

import argparse
import threading
import time
import uuid
from functools import partial
from typing import Any

import amqp

from . import stand

BATCH = 500
BODY = b"x" * 300
HEADERS = {
    "txmsg-service": "bench",
    "txmsg-created": "2026-01-01T00:00:00.000000+00:00",
}


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--only", default="", choices=["", "relay", "consume"])
    options = parser.parse_args()
    from tests import services

    server = services.shared(services.RabbitMQ)
    by_amqp = services.ByAmqp(server)
    stand.django(
        stand.postgresql(),
        {
            "SERVICE": "bench",
            "BROKERS": {
                "default": {"URL": by_amqp.url(queue_type="classic")},
                "quorum": {"URL": by_amqp.url()},
                "stomp": {"URL": server.url()},
            },
            "DISPATCH_ON_COMMIT": "off",
            "RELAY": {"BATCH_SIZE": BATCH, "LANES": options.lanes},
        },
    )
    count, lanes = options.messages, options.lanes
    port = by_amqp.port
    if options.only != "consume":
        bare(port, count, lanes)  # the first run meets a cold server
        figures = stand.turns(
            {
                "bare py-amqp, confirms in a window": lambda: bare(port, count, lanes),
                "bare py-amqp, one confirm at a time": lambda: waiting(
                    port, count // 20
                ),
                "relay by AMQP": lambda: relay("default", count),
                "relay by AMQP, quorum queue": lambda: relay("quorum", count),
                "relay by STOMP": lambda: relay("stomp", count),
            },
            options.rounds,
        )
        ours = "relay by AMQP"
        for against, goal in (
            ("relay by STOMP", 1.0),
            ("bare py-amqp, confirms in a window", 0.7),
            ("bare py-amqp, one confirm at a time", 10.0),
        ):
            stand.table("relay to RabbitMQ", figures, against, goals={ours: goal})
    if options.only != "relay":
        from .consume import consume

        some = count // 4
        figures = stand.turns(
            {
                f"outbox stage by {name}, concurrency {threads}": (
                    partial(consume, some, concurrency=threads, broker=alias)
                )
                for name, alias in (
                    ("STOMP", "stomp"),
                    ("AMQP", "default"),
                    ("AMQP, quorum queue", "quorum"),
                )
                for threads in (1, 4)
            },
            options.rounds,
        )
        for threads in (1, 4):
            of_these = {k: v for k, v in figures.items() if k.endswith(f" {threads}")}
            stand.table(
                "consume from RabbitMQ",
                of_these,
                f"outbox stage by STOMP, concurrency {threads}",
                goals={f"outbox stage by AMQP, concurrency {threads}": 1.0},
            )


def store(alias: str, count: int) -> str:
    """Create a new queue at the broker `alias`, and return the queue's destination.
    Empty the outbox, and then store `count` messages to this destination in it."""
    from django.db import connection, transaction

    from django_txmsg import send_messages
    from django_txmsg.brokers import get_broker

    destination = f"bench.amqp.{uuid.uuid4().hex[:8]}"
    with get_broker(alias).open() as session:
        session.subscribe(destination, prefetch=1)
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE django_txmsg_outboxmessage")
    for _ in range(0, count, 1000):
        with transaction.atomic():
            send_messages(
                [{"destination": destination, "body": BODY} for _ in range(1000)],
                broker=alias,
            )
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE django_txmsg_outboxmessage")
        cursor.execute("CHECKPOINT")
    return destination


def relay(alias: str, count: int) -> float:
    """Return the rate at which the relay empties the outbox."""
    from django_txmsg.relaying.relay import Relay

    destination = store(alias, count)
    began = time.perf_counter()
    Relay(["default"], [alias]).run(once=True)
    seconds = time.perf_counter() - began
    drain(alias, destination, count)
    return count / seconds


def drain(alias: str, destination: str, count: int) -> None:
    """Receive all messages, and check that none is missing."""
    from django_txmsg.brokers import get_broker

    with get_broker(alias).open() as session:
        session.subscribe(destination, prefetch=1000)
        for number in range(count):
            delivery = session.receive(20)
            assert delivery is not None, f"{count - number} of {count} never arrived"
            session.ack([delivery])


def bare(port: int, count: int, lanes: int) -> float:
    """Return the rate of py-amqp if many messages wait for their confirms at a time."""
    queue = f"bench.bare.{uuid.uuid4().hex[:8]}"
    with connected(port) as link:
        link.channel().queue_declare(queue, durable=True, auto_delete=False)
    batches = iter(range(0, count, BATCH))

    def share() -> None:
        with connected(port) as link:
            channel = link.channel()
            channel.confirm_select()
            confirmed = sent = 0

            def on_ack(tag: int, multiple: bool) -> None:
                nonlocal confirmed
                confirmed = tag if multiple else confirmed + 1

            channel.events["basic_ack"].add(on_ack)
            for _ in batches:
                for _ in range(BATCH):
                    channel.basic_publish(message(), routing_key=queue, mandatory=True)
                    sent += 1
                while confirmed < sent:
                    link.drain_events(timeout=30)

    began = time.perf_counter()
    threads = [threading.Thread(target=share) for _ in range(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rate = count / (time.perf_counter() - began)
    with connected(port) as link:
        left = link.channel().queue_delete(queue)
    assert left == count, f"{left} of {count}"
    return rate


def waiting(port: int, count: int) -> float:
    """Return the rate of py-amqp if it waits for each confirm."""
    queue = f"bench.bare.{uuid.uuid4().hex[:8]}"
    with connected(port, confirm_publish=True) as link:
        channel = link.channel()
        channel.queue_declare(queue, durable=True, auto_delete=False)
        began = time.perf_counter()
        for _ in range(count):
            channel.basic_publish_confirm(message(), routing_key=queue, mandatory=True)
        seconds = time.perf_counter() - began
        channel.queue_delete(queue)
    return count / seconds


def message() -> amqp.Message:
    """Return a message like those of the relay."""
    headers = {**HEADERS, "txmsg-id": str(uuid.uuid4())}
    return amqp.Message(
        BODY,
        application_headers=headers,
        content_type="application/octet-stream",
        delivery_mode=2,
    )


def connected(port: int, **options: Any) -> amqp.Connection:
    """Return a plain py-amqp connection."""
    from tests.services.stomp_server import PASSWORD, USER

    return amqp.Connection(f"127.0.0.1:{port}", USER, PASSWORD, **options)


if __name__ == "__main__":
    main()
