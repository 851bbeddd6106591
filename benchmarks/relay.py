"""The rate at which the relay sends 10,000 stored messages to a broker, with a receipt
for each.

    python -m benchmarks.relay [--messages 10000] [--rounds 3] [--broker activemq]
        [--lanes N]  # instead of the setting's default
        [--peer]     # compared with django-outbox-pattern 3.2.1
        [--apart]    # the broker on a processor of its own

The bare producer sends the same bytes from memory, in the same batches, over the same
number of connections and with the same client. It uses neither Django nor the database.
Before the measurement, the relay and the bare producer send some rounds alternately, so
that the broker's JVM compiles its code. These rounds take minutes. While the JVM
compiles, the relay and the bare producer get less processor time. Afterwards the broker
is faster.

The peer runs in a separate environment, which is created on demand. It neither makes
its messages persistent nor requests receipts. With several processes, a line shows
which programs used the processors. If no processor is idle, a second relay cannot be
faster.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
import uuid
from typing import Any

from django_txmsg.conf.schema import RelaySettings

from . import stand

BATCH = 500
LANES = RelaySettings().LANES
#: Rounds that are not measured; after them the broker compiles next to nothing.
WARMING = 6
BODY = b"x" * 300


def main() -> None:
    """Measure and print the table."""
    global LANES
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--broker", default="activemq", choices=["activemq", "rabbitmq"]
    )
    parser.add_argument("--lanes", type=int, default=LANES)
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--apart", action="store_true")
    options = parser.parse_args()
    LANES = options.lanes
    from tests import services

    kinds = {"activemq": services.ActiveMQ, "rabbitmq": services.RabbitMQ}
    broker: Any = services.shared(kinds[options.broker])
    if options.apart:
        stand.set_apart(broker.process.pid)
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
    count, activemq = options.messages, options.broker == "activemq"
    ours, title = "this package's relay", f"relay to {options.broker}"
    contenders = {
        "bare producer, the same batches": lambda: bare(broker.url(), count, activemq),
        ours: lambda: relay(broker, count),
    }
    if options.peer:
        contenders["django-outbox-pattern 3.2.1"] = lambda: stand.peer(
            "relay", broker.url(), count
        )
    for _ in range(WARMING):
        bare(broker.url(), count, activemq)
        relay(broker, count)
    figures = stand.turns(contenders, options.rounds)
    stand.table(
        title + ", the broker apart" * options.apart,
        figures,
        next(iter(contenders)),
        goals={ours: 0.85},
    )
    if options.apart:
        return
    if options.peer:
        peer = "django-outbox-pattern 3.2.1"
        pair = {name: figures[name] for name in (peer, ours)}
        stand.table(title, pair, peer)
    many = 4 * count
    figures = stand.turns(
        {
            "relay, one process": lambda: processes(broker, many, 1, database),
            "relay, two processes": lambda: processes(broker, many, 2, database),
            "bare producer, two processes": lambda: bare_processes(
                broker.url(), many, activemq
            ),
        },
        options.rounds,
    )
    stand.table(f"sending {many:,} messages", figures, "relay, one process")


def store(count: int) -> str:
    """Store `count` messages to a new destination, and return the destination."""
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


def relay(broker: Any, count: int) -> float:
    """Return the rate at which the relay empties the outbox."""
    from django_txmsg.relaying.relay import Relay

    destination = store(count)
    began = time.perf_counter()
    Relay(["default"], ["default"]).run(once=True)
    seconds = time.perf_counter() - began
    drain(broker.url(), destination, count)
    return count / seconds


def processes(broker: Any, count: int, number: int, database: str) -> float:
    """Return the rate of `number` relay processes together. Their start is not
    measured."""
    destination = store(count)
    url = broker.url()
    seconds = together(
        number,
        "from benchmarks import stand;"
        f"stand.django({database!r}, {{'SERVICE': 'bench', 'DISPATCH_ON_COMMIT': 'off',"
        f" 'BROKERS': {{'default': {{'URL': {url!r}}}}},"
        f" 'RELAY': {{'BATCH_SIZE': {BATCH}, 'LANES': {LANES}}}}});"
        "from django_txmsg.relaying.relay import Relay;"
        "work = lambda: Relay(['default'], ['default']).run(once=True)",
    )
    drain(url, destination, count)
    return count / seconds


def bare_processes(url: str, count: int, activemq: bool) -> float:
    """Return the rate of two bare producers together. This is the limit of the
    broker."""
    destination = f"bench.bare.{uuid.uuid4().hex[:8]}"
    seconds = together(
        2,
        f"from benchmarks import relay; relay.LANES = {LANES};"
        "work = lambda: relay.produce"
        f"({url!r}, {destination!r}, {count // 2}, {activemq})",
    )
    drain(url, destination, count)
    return count / seconds


def together(number: int, code: str) -> float:
    """Start `number` processes that run `code`, which defines `work()`. Then make all
    of them call `work()` at the same time. Returns the seconds until the last process
    has ended."""
    running = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"import sys, time; {code}; print('ready', flush=True);"
                "sys.stdin.readline(); work(); print(time.time(), flush=True)",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(number)
    ]
    for one in running:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
    before, began = stand.processor_time(), time.time()
    for one in running:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
    ended = [float(one.stdout.readline()) for one in running if one.stdout]
    had = stand.shares(before, stand.processor_time())
    print(f"  {number} at work: {had}", file=sys.stderr, flush=True)
    for one in running:
        one.communicate()
    assert not any(one.returncode for one in running)
    return max(ended) - began


def bare(url: str, count: int, activemq: bool) -> float:
    """Return the rate of a producer without a database."""
    destination = f"bench.bare.{uuid.uuid4().hex[:8]}"
    began = time.perf_counter()
    produce(url, destination, count, activemq)
    seconds = time.perf_counter() - began
    drain(url, destination, count)
    return count / seconds


def produce(url: str, destination: str, count: int, activemq: bool) -> None:
    """Send messages from memory over as many connections as the relay has lanes."""
    from django_txmsg import jms, wire

    headers = {
        "content-type": "application/octet-stream",
        "txmsg-service": "bench",
        "txmsg-created": "2026-01-01T00:00:00.000000+00:00",
    }
    # What a JMS client selects by, which only ActiveMQ is sent.
    twins = dict(wire.TWINS if activemq else {})
    own_id = ("txmsg-id", *([twins["txmsg-id"]] if twins else ()))
    headers |= {twin: headers[name] for name, twin in twins.items() if name in headers}

    def message() -> jms.Message:
        return jms.Message(BODY, headers | dict.fromkeys(own_id, str(uuid.uuid4())))

    batches = iter(range(0, count, BATCH))

    def share() -> None:
        with (
            jms.ConnectionFactory(url).create_connection() as connection,
            connection.create_session() as session,
        ):
            for start in batches:
                outcomes = session.send_batch(
                    [(destination, message()) for _ in range(min(BATCH, count - start))]
                )
                assert not any(outcomes)

    threads = [threading.Thread(target=share) for _ in range(LANES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def drain(url: str, destination: str, count: int) -> None:
    """Receive all messages, and check that none is missing."""
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
