"""How much the pipeline's columns, triggers and index slow down relay and consume.

    python -m benchmarks.pipeline_app [--messages 10000] [--rounds 7]

Relay and consume run alternately with and without `django_txmsg.spark` in the database.
The benchmark measures messages per second, and PostgreSQL's processor time per message.
A third figure hardly depends on other work on the machine: the processor time of one
connection that stores messages, and updates each of them twice, like a relay.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
from collections.abc import Callable
from pathlib import Path

from . import consume, relay, stand

WAYS = ("with the app", "without")


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    from tests import services

    broker = services.shared(services.ActiveMQ)
    stand.django(
        stand.postgresql(),
        {
            "SERVICE": "bench",
            "BROKERS": {"default": {"URL": broker.url()}},
            "DISPATCH_ON_COMMIT": "off",
            "RELAY": {"BATCH_SIZE": relay.BATCH},
        },
        apps=["django_txmsg.spark"],
    )
    works: dict[str, tuple[Callable[[], float], int]] = {
        "relay": (lambda: relay.relay(broker, options.messages), options.messages),
        "consume, concurrency 1": (
            lambda: consume.consume(options.messages // 4),
            options.messages // 4,
        ),
    }
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(options.rounds):
        for way in WAYS if number % 2 else reversed(WAYS):
            install(way == WAYS[0])
            times[way].append(one_connection(options.messages))
    unit = "µs of the server's process a message"
    stand.table("stored and written twice by one connection", times, WAYS[0], unit)
    for name, (work, count) in works.items():
        work()  # the first run is the slowest
        rates: dict[str, list[float]] = {way: [] for way in WAYS}
        costs: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(options.rounds):
            for way in WAYS if number % 2 else reversed(WAYS):
                install(way == WAYS[0])
                before = postgres_seconds()
                rates[way].append(work())
                spent = postgres_seconds() - before
                costs[way].append(spent / count * 1e6)
        stand.table(name, rates, WAYS[0])
        unit = "µs of PostgreSQL's processors a message, storing included"
        stand.table(name, costs, WAYS[0], unit)
        pairs = [b / a for a, b in zip(*rates.values(), strict=True)]
        print(f"without / with, round by round: median {statistics.median(pairs):.3f}")


def one_connection(count: int) -> float:
    """Return the processor time to store, claim and settle a message, in
    microseconds."""
    from django.db import connection, transaction

    from django_txmsg import send_messages

    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        file = Path(f"/proc/{cursor.fetchone()[0]}/stat")
        before = seconds_of(file, slice(11, 13))
        with transaction.atomic():
            send_messages([{"destination": "d", "body": relay.BODY}] * count)
        for assigned in (
            "attempts = 1, lease_until = now(), lease_token = gen_random_uuid()",
            "dispatched_at = now(), lease_until = NULL, lease_token = NULL",
        ):
            for start in range(0, count, relay.BATCH):
                cursor.execute(
                    f"UPDATE django_txmsg_outboxmessage SET {assigned} WHERE id IN"
                    " (SELECT id FROM django_txmsg_outboxmessage ORDER BY id"
                    " LIMIT %s OFFSET %s)",
                    [relay.BATCH, start],
                )
    return (seconds_of(file, slice(11, 13)) - before) / count * 1e6


def seconds_of(file: Path, fields: slice) -> float:
    """Return the processor time in these fields of a process's `stat` file, in
    seconds."""
    after = file.read_text().rpartition(")")[2].split()
    return sum(map(int, after[fields])) / os.sysconf("SC_CLK_TCK")


def postgres_seconds() -> float:
    """Return the processor time of all server processes so far, in seconds. Ended
    processes are included."""
    used = 0.0
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if "(postgres)" in file.read_text():
                used += seconds_of(file, slice(11, 15))
    return used


def install(present: bool) -> None:
    """Add the columns of `django_txmsg.spark` to outbox and inbox, or remove them."""
    from django.core.management import call_command
    from django.db import connection

    from django_txmsg.models import InboxMessage, OutboxMessage

    call_command("migrate", "txmsg_spark", "zero", verbosity=0)
    # Freshly written, as they would be: a dropped column leaves a hole in each row.
    with connection.cursor() as cursor:
        for model in (OutboxMessage, InboxMessage):
            cursor.execute(f"TRUNCATE {model._meta.db_table}")
    if present:
        call_command("migrate", "txmsg_spark", verbosity=0)


if __name__ == "__main__":
    main()
