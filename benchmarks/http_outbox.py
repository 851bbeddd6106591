"""The cost of the HTTP outbox for a request that stores one row and two messages.

    python -m benchmarks.http_outbox [--seconds 6] [--rounds 5]
        [--apart]  # the broker on a processor of its own
        [--only atomic,outbox,bulk]

gunicorn, PostgreSQL, ActiveMQ and the client run on this machine.

"Two additional rows" is the minimum that any outbox must do in a request: one INSERT of
two rows as large as the messages, without a receipt and with fewer indexes. "Two
additional rows and one stomp.py send" is the minimum of an outbox with control
messages: the same INSERT, and one receipt. The rows of these two contenders are never
claimed, sent or settled.

"Sustained" is the request rate at which the outbox does not grow: it includes the time
until all messages are dispatched. After each contender, its messages are removed from
the broker, because a full heap would slow down the next contender.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from . import relay, stand

CLIENTS = 8
#: Where what is sent goes.
DESTINATIONS = {
    "hand": ["bench.control"],
    "outbox": ["bench.pay", "bench.ship"],
    "bulk": ["bench.pay", "bench.ship"],
    "direct": ["bench.pay", "bench.ship"],
}
KINDS = {
    "no middleware, no messages": "bare",
    "ATOMIC_REQUESTS, no messages": "atomic",
    "ATOMIC_REQUESTS, two additional rows": "rows",
    "ATOMIC_REQUESTS, two additional rows and one stomp.py send": "hand",
    "OutboxMiddleware, two messages": "outbox",
    "OutboxMiddleware, two messages by send_messages": "bulk",
    "ATOMIC_REQUESTS, two stomp.py sends": "direct",
}
_numbers = itertools.count()


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--only", default="", help="these kinds of views, by commas")
    options = parser.parse_args()
    from tests import services

    wanted = set(filter(None, options.only.split(",")))
    kinds = {name: kind for name, kind in KINDS.items() if not wanted or kind in wanted}
    server = services.shared(services.ActiveMQ)
    broker = server.url()
    if options.apart:
        assert server.process is not None
        stand.set_apart(server.process.pid)
    apart = ", the broker apart" * options.apart
    database = stand.postgresql()
    stand.django(database, {"SERVICE": "bench", "DISPATCH_ON_COMMIT": "off"})
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    sustained: dict[str, list[float]] = {name: [] for name in kinds}
    middle: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(4):
        # A broker that has just started takes five times as long for a message.
        relay.bare(broker, 20_000, activemq=True)
    for kind in kinds.values():
        with serving(kind, database, broker) as port:
            load(port, 3.0)
            wait_for_dispatch()
        drain(broker, kind)
    for number in range(options.rounds):
        for name, kind in kinds.items():
            clean()
            with serving(kind, database, broker) as port:
                load(port, 1.5)
                began = time.perf_counter()
                count, latencies = load(port, options.seconds)
                took = time.perf_counter() - began
                rates[name].append(count / took)
                middle[name].append(sorted(latencies)[len(latencies) // 2] * 1000)
                wait_for_dispatch()
                sustained[name].append(count / (time.perf_counter() - began))
            drain(broker, kind)
            print(f"  round {number + 1}: {name}: {rates[name][-1]:,.0f}/s",
                  file=sys.stderr, flush=True)  # fmt: skip
    _, atomic, rows, _, ours, bulk, direct = KINDS

    def table(
        title: str,
        figures: dict[str, list[float]],
        names: Sequence[str],
        unit: str = "requests/s",
        goals: dict[str, float] | None = None,
    ) -> None:
        found = {name: figures[name] for name in names if name in kinds}
        if names[0] in found and found.keys() - {names[0]}:
            stand.table(f"{title}{apart}", found, names[0], unit, goals)

    everything = list(KINDS)
    table("HTTP requests", rates, everything)
    # A rate has to reach 1 / 1.6 for a request to take 1.6 times as long.
    goals = {ours: 0.625, bulk: 0.625}
    table(
        "HTTP requests in a transaction", rates, [atomic, rows, ours, bulk], goals=goals
    )
    table("the middleware, one INSERT", rates, [ours, bulk])
    stored = "storing messages instead of sending them"
    table(stored, rates, [direct, ours], goals={ours: 1.0})
    table("HTTP requests, sustained", sustained, everything)
    table("HTTP requests, median latency", middle, everything, "ms")


@contextmanager
def serving(kind: str, database: str, broker: str) -> Iterator[int]:
    """Run gunicorn with two workers of four threads for one contender, and yield its
    port."""
    from tests.services import free_port

    port = free_port()
    process = subprocess.Popen(
        [
            *[sys.executable, "-m", "gunicorn", "--workers", "2", "--threads", "4"],
            *["--bind", f"127.0.0.1:{port}", "--keep-alive", "60"],
            *["--log-level", "warning", "--no-control-socket"],
            "benchmarks._http_app:application",
        ],
        cwd=Path(__file__).resolve().parents[1],
        env={
            **os.environ,
            "TXMSG_BENCH_KIND": kind,
            "TXMSG_BENCH_BROKER": broker,
            "TXMSG_BENCH_DATABASE": database,
        },
        start_new_session=True,
    )
    try:
        until = time.monotonic() + 60
        while True:
            try:
                http.client.HTTPConnection("127.0.0.1", port).request("GET", "/")
                break
            except OSError:
                if time.monotonic() > until or process.poll() is not None:
                    raise
                time.sleep(0.1)
        yield port
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


def load(port: int, seconds: float) -> tuple[int, list[float]]:
    """Send requests from all clients for `seconds`. Returns their number, and the
    duration of each."""
    latencies: list[float] = []
    errors: list[str] = []
    until = time.perf_counter() + seconds

    def client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        while (began := time.perf_counter()) < until:
            connection.request("POST", f"/place?number={next(_numbers)}")
            response = connection.getresponse()
            response.read()
            if response.status != 201:
                errors.append(f"{response.status} {response.reason}")
                return
            latencies.append(time.perf_counter() - began)

    threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise SystemExit(f"The view failed: {errors[:3]}")
    return len(latencies), latencies


def wait_for_dispatch() -> None:
    """Wait until all messages in the outbox are dispatched."""
    from django_txmsg.models import OutboxMessage

    until = time.monotonic() + 60
    while OutboxMessage.objects.filter(dispatched_at=None).exists():
        if time.monotonic() > until:
            raise SystemExit("Messages were not dispatched within 60 s.")
        time.sleep(0.02)


def drain(broker: str, kind: str) -> None:
    """Remove this contender's messages from the broker."""
    from django_txmsg import jms

    with jms.ConnectionFactory(broker).create_connection() as connection:
        for destination in DESTINATIONS.get(kind, ()):
            with connection.create_session() as session:
                consumer = session.create_consumer(destination, prefetch=1000)
                while message := consumer.receive(timeout=1.0):
                    session.acknowledge(message)


def clean() -> None:
    """Empty the tables."""
    from django.db import connection

    from django_txmsg.models import OutboxMessage
    from tests.app.models import Order

    with connection.cursor() as cursor:
        for model in (OutboxMessage, Order):
            cursor.execute(f"TRUNCATE {model._meta.db_table} CASCADE")


if __name__ == "__main__":
    main()
