"""How fast the relay hands 10,000 stored messages to a broker, each with proof.

    python -m benchmarks.relay [--messages 10000] [--rounds 3] [--broker activemq]
                               [--peer]     # beside django-outbox-pattern 3.2.1

The bare producer sends the same bytes from memory, by the same batches, over the same
number of connections, through the same client; what is missing in its way is Django
and the database. The peer runs in an environment of its own that is made on demand;
it neither makes its messages persistent nor asks for receipts.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
import uuid
from typing import Any

from . import stand

BATCH = 500
LANES = 2
BODY = b"x" * 300


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--broker", default="activemq", choices=["activemq", "rabbitmq"]
    )
    parser.add_argument("--peer", action="store_true")
    options = parser.parse_args()
    from tests import services

    kinds = {"activemq": services.ActiveMQ, "rabbitmq": services.RabbitMQ}
    broker: Any = services.shared(kinds[options.broker])
    database = stand.postgresql()
    stand.django(
        database,
        {
            "SERVICE": "bench",
            "BROKERS": {"default": {"URL": broker.url()}},
            "DISPATCH_ON_COMMIT": "off",
            "RELAY": {"BATCH_SIZE": BATCH, "LANES": LANES},
        },
    )
    count = options.messages
    contenders = {
        "bare producer, the same batches": lambda: bare(broker.url(), count),
        "relay, one process": lambda: relay(broker, count, 1),
        "relay, two processes": lambda: relay(broker, count, 2, database),
    }
    if options.peer:
        contenders["django-outbox-pattern 3.2.1"] = lambda: stand.peer(
            "relay", broker.url(), count
        )
    figures = stand.turns(contenders, options.rounds)
    stand.table(f"relay to {options.broker}", figures, next(iter(contenders)))
    if options.peer:
        stand.table("beside the nearest peer", figures, "django-outbox-pattern 3.2.1")


def store(count: int) -> str:
    """Store `count` messages to a fresh destination and return it."""
    from django.db import connection, transaction

    from django_txmsg import send_messages

    destination = f"bench.relay.{uuid.uuid4().hex[:8]}"
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE django_txmsg_outboxmessage")
    for _ in range(0, count, 1000):
        with transaction.atomic():
            send_messages(
                [{"destination": destination, "body": BODY} for _ in range(1000)]
            )
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE django_txmsg_outboxmessage")
        cursor.execute("CHECKPOINT")
    return destination


def relay(broker: Any, count: int, processes: int, database: str = "") -> float:
    """Return the rate at which the outbox is emptied."""
    destination = store(count)
    began = time.perf_counter()
    if processes == 1:
        from django_txmsg.relay import Relay

        Relay(["default"], ["default"]).run(once=True)
        seconds = time.perf_counter() - began
    else:
        seconds = _in_processes(broker, processes, database)
    drain(broker.url(), destination, count)
    return count / seconds


def _in_processes(broker: Any, processes: int, database: str) -> float:
    """Start relays that wait for a word, give it, and time them to the last row."""
    code = (
        "import sys; from benchmarks import stand;"
        f"stand.django({database!r}, {{'SERVICE': 'bench', 'BROKERS': {{'default':"
        f" {{'URL': {broker.url()!r}}}}}, 'RELAY': {{'BATCH_SIZE': {BATCH},"
        f" 'LANES': {LANES}}}}}); from django_txmsg.relay import Relay;"
        "print('ready', flush=True); sys.stdin.readline();"
        "Relay(['default'], ['default']).run(once=True)"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(processes)
    ]
    for one in running:
        assert one.stdout is not None
        one.stdout.readline()
    began = time.perf_counter()
    for one in running:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
    for one in running:
        one.wait()
    return time.perf_counter() - began


def bare(url: str, count: int) -> float:
    """Return the rate of a producer without a database."""
    from django_txmsg import jms

    destination = f"bench.bare.{uuid.uuid4().hex[:8]}"
    headers = {
        "content-type": "application/octet-stream",
        "txmsg-service": "bench",
        "txmsg-created": "2026-01-01T00:00:00.000000+00:00",
    }

    def produce(share: int) -> None:
        with (
            jms.ConnectionFactory(url).create_connection() as connection,
            connection.create_session() as session,
        ):
            for _ in range(0, share, BATCH):
                outcomes = session.send_batch(
                    [
                        (
                            destination,
                            jms.Message(
                                BODY, {**headers, "txmsg-id": str(uuid.uuid4())}
                            ),
                        )
                        for _ in range(BATCH)
                    ]
                )
                assert not any(outcomes)

    threads = [
        threading.Thread(target=produce, args=(count // LANES,)) for _ in range(LANES)
    ]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    drain(url, destination, count)
    return count / seconds


def drain(url: str, destination: str, count: int) -> None:
    """Take every message off the broker again, and insist that all are there."""
    from django_txmsg import jms

    with (
        jms.ConnectionFactory(url).create_connection() as connection,
        connection.create_session() as session,
    ):
        consumer = session.create_consumer(destination, prefetch=1000)
        for number in range(count):
            message = consumer.receive(timeout=20)
            assert message is not None, f"{count - number} of {count} never arrived"
            session.acknowledge(message)
        assert consumer.receive(timeout=0.2) is None, "more than were sent"


if __name__ == "__main__":
    main()
