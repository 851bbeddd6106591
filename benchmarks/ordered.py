"""The cost of keeping messages in order. The benchmark compares ordered stages with
unordered ones, and the relay with and without links between the messages of a key.

    python -m benchmarks.ordered [--messages 3000] [--rounds 3] [--followers 1000000]
        [--only keys|relay|followers]

A stage receives the messages from ActiveMQ. For each message, its handler inserts one
row in PostgreSQL and sends one message.
"""

from __future__ import annotations

import argparse
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from . import stand
from .consume import clean, handler

INBOX = "django_txmsg_inboxmessage"
AT = "2026-01-01T00:00:00.%06d+00:00"


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--followers", type=int, default=1_000_000)
    parser.add_argument("--only", default="", help="keys, relay or followers")
    options = parser.parse_args()
    from tests import services

    broker = services.shared(services.ActiveMQ)
    stand.django(
        stand.postgresql(),
        {
            "SERVICE": "bench",
            "BROKERS": {"default": {"URL": broker.url()}},
            "DISPATCH_ON_COMMIT": "off",
        },
    )
    for name, measure in (("keys", keys), ("relay", relay), ("followers", followers)):
        if not options.only or options.only == name:
            measure(options)


def keys(options: argparse.Namespace) -> None:
    """Compare ordered stages with unordered ones, for several numbers of keys."""
    count = options.messages
    for threads in (1, 4):
        base = "unordered, all keys different"
        contenders = {base: partial(consume, count, 100_000, None, threads)}
        # With 100,000 keys, no two of the messages have the same key.
        numbers = {"all keys different": 100_000, "100 keys": 100, "one key": 1}
        for name, number in numbers.items():
            contenders[f"ordered, {name}"] = partial(
                consume, count, number, "block", threads
            )
        figures = stand.turns(contenders, options.rounds)
        title = f"{count:,} messages, {threads} thread{'s' if threads > 1 else ''}"
        stand.table(title, figures, base, goals={"ordered, all keys different": 0.8})


def relay(options: argparse.Namespace) -> None:
    """Compare three cases of the relay: messages with keys and links, messages with
    keys but without links, and messages without keys."""
    count = 3 * options.messages
    base = "no keys"
    contenders = {
        base: lambda: ship(count, 0, True),
        "all keys different, LINK_KEYS off": lambda: ship(count, 100_000, False),
        "all keys different": lambda: ship(count, 100_000, True),
        "100 keys": lambda: ship(count, 100, True),
        "1 key": lambda: ship(count, 1, True),
    }
    figures = stand.turns(contenders, options.rounds)
    stand.table(f"relay of {count:,} messages", figures, base)


def followers(options: argparse.Namespace) -> None:
    """Compare two rates at which an ordered stage processes messages: while it has no
    other messages, and while a million messages of another key are blocked there."""
    count, many = options.messages, options.followers
    base = "alone"
    behind = f"while {many:,} others wait"
    stage = f"bench.ordered.{uuid.uuid4().hex[:8]}"
    hold(stage, many)

    def beside() -> float:
        with exchanged():
            return consume(count, 100_000, "block", 1, stage)

    contenders = {
        base: lambda: consume(count, 100_000, "block", 1),
        behind: beside,
    }
    figures = stand.turns(contenders, options.rounds)
    stand.table(
        f"{count:,} messages at an ordered stage", figures, base, goals={behind: 0.95}
    )


def consume(
    count: int, keys: int, ordered: Any, concurrency: int, stage: str = ""
) -> float:
    """Return the rate at which `count` messages with `keys` different keys are
    consumed. By default, a new stage consumes them. `stage` names an existing stage, at
    which other messages wait."""
    from django_txmsg import wire
    from django_txmsg.brokers import get_broker
    from django_txmsg.brokers.base import Outgoing
    from django_txmsg.consuming.consumer import Consumer
    from django_txmsg.stages import Stage

    if not stage:
        clean()
    destination = stage or f"bench.ordered.{uuid.uuid4().hex[:8]}"
    last: dict[int, str] = {}
    batch = []
    for number in range(count):
        key, own = number * 7919 % keys, str(uuid.uuid4())
        headers = {
            wire.MESSAGE_ID: own,
            wire.CONTENT_TYPE: wire.JSON,
            wire.KEY: f"key-{key}",
        }
        if key in last:
            headers[wire.AFTER] = f"{last[key]};at={AT % number}"
        last[key] = own
        batch.append(Outgoing(destination, headers, b'{"n": 1}'))
    with get_broker().open() as session:
        for start in range(0, count, 500):
            session.send(batch[start : start + 500])
    consumer = Consumer(
        [
            Stage(
                name=destination,
                destination=destination,
                handler=handler,
                concurrency=concurrency,
                ordered=ordered,
            )
        ]
    )
    thread = threading.Thread(target=consumer.run)
    thread.start()
    while done(destination) < count * 0.05:
        time.sleep(0.01)
    first, began = done(destination), time.perf_counter()
    while (now := done(destination)) < count:
        time.sleep(0.02)
    rate = (now - first) / (time.perf_counter() - began)
    consumer.stop()
    thread.join()
    return rate


def done(stage: str) -> int:
    """Return the number of processed messages. For each message, the handler stores one
    row (`Effect`), and these rows are counted."""
    from tests.app.models import Effect

    return Effect.objects.count()


def hold(stage: str, count: int) -> None:
    """Create a second inbox table, in which `count` messages wait behind a blocked one.
    The table is created only once, because creating it takes longer than all rounds."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT array_to_string(reloptions, ', ') FROM pg_class"
            f" WHERE relname = '{INBOX}'"
        )
        (options,) = cursor.fetchone()
        cursor.execute(
            f"CREATE TABLE inbox_held (LIKE {INBOX} INCLUDING ALL)"
            + (f" WITH ({options})" if options else "")
        )
        cursor.execute(
            "INSERT INTO inbox_held (stage, message_id, destination,"
            " correlation_id, service, deliveries, attempts, first_received_at,"
            " last_received_at, due_at, headers, body, last_error, needs_type, key,"
            " waits_for, waits_since, after_at) SELECT %s, gen_random_uuid(), %s, '',"
            " '', 1, 0, now(), now(), '9000-01-01', '{}', %s, '', '', 'stuck',"
            " gen_random_uuid(), now(), now() - make_interval(secs => n)"
            " FROM generate_series(1, %s) AS n",
            [stage, stage, b"x" * 300, count],
        )
        cursor.execute("VACUUM ANALYZE inbox_held")


@contextmanager
def exchanged() -> Iterator[None]:
    """Use the second inbox table, instead of the empty one, while the block runs."""
    from django.db import connection

    clean()
    names = [(INBOX, "inbox_empty"), ("inbox_held", INBOX)]
    with connection.cursor() as cursor:
        for old, new in names:
            cursor.execute(f"ALTER TABLE {old} RENAME TO {new}")
        try:
            yield
        finally:
            cursor.execute(f"DELETE FROM {INBOX} WHERE waits_for IS NULL")
            cursor.execute(f"VACUUM {INBOX}")
            for old, new in reversed(names):
                cursor.execute(f"ALTER TABLE {new} RENAME TO {old}")


def ship(count: int, keys: int, linked: bool) -> float:
    """Return the rate at which the relay empties an outbox with `keys` different
    keys."""
    from django.conf import settings
    from django.db import connection, transaction
    from django.test import override_settings

    from django_txmsg import send_messages
    from django_txmsg.relaying.relay import Relay

    destination = f"bench.linked.{uuid.uuid4().hex[:8]}"
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE django_txmsg_outboxmessage, django_txmsg_keytail")
    for start in range(0, count, 1000):
        with transaction.atomic():
            send_messages(
                {
                    "destination": destination,
                    "body": b"x" * 300,
                    "key": f"key-{n * 7919 % keys}" if keys else None,
                }
                for n in range(start, min(start + 1000, count))
            )
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE django_txmsg_outboxmessage")
        cursor.execute("CHECKPOINT")
    relay = {**settings.TXMSG.get("RELAY", {}), "LINK_KEYS": linked}
    with override_settings(TXMSG={**settings.TXMSG, "RELAY": relay}):
        began = time.perf_counter()
        Relay(["default"], ["default"]).run(once=True)
        return count / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
