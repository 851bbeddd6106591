"""The relay, a stage and the pruning beside millions of settled rows.

    python -m benchmarks.growth [--rows 2000000]

Ten days of messages lie in the outbox and as many in the inbox, the eldest day past its
retention. The relay's broker takes everything at once; the stage is fed by the embedded
broker. Each is measured on empty tables first, in the same run; then a day is pruned,
vacuumed away, and the relay measured once more.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from . import stand
from .consume import consume
from .relay_big_table import empty as empty_tables
from .relay_big_table import fill, lane, rate, vacuum

DAYS = 10
MESSAGES = 20_000


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    options = parser.parse_args()
    rows: int = options.rows
    stand.django(
        stand.postgresql(),
        {
            "SERVICE": "bench",
            "DISPATCH_ON_COMMIT": "off",
            "BROKERS": {"default": {"URL": "database://?poll=0.01"}},
            "RETENTION": {"OUTBOX": DAYS - 1, "INBOX": DAYS - 1},
        },
    )
    works: dict[str, Callable[[], float]] = {"the relay": relayed, "a stage": consumed}
    before = {name: measured(work) for name, work in works.items()}
    empty_tables()
    began = time.perf_counter()
    grow(rows)
    print(f"{rows:,} rows in each table: {size()}, in {since(began)}")
    beside = f"{rows:,} settled rows"
    for name, work in works.items():
        compare(f"{name} beside {beside}", measured(work), before[name])
    began = time.perf_counter()
    pruned = prune()
    print(f"{pruned:,} rows of one day pruned in {since(began)}; left: {size()}")
    began = time.perf_counter()
    vacuum_all()
    print(f"vacuumed in {since(began)}")
    compare("the relay after the pruning", measured(relayed), before["the relay"])


def compare(what: str, figures: list[float], others: list[float]) -> None:
    """Print the ratio, and keep it for the table."""
    pairs = zip(figures, others, strict=True)
    ratios = [one / other for one, other in pairs]
    middle = statistics.median(figures)
    print(f"{what}: {middle:,.0f}/s, ratio {statistics.median(ratios):.2f}")
    stand.note(what, "empty tables", ratios, "≥ 0.9")


def measured(work: Callable[[], float]) -> list[float]:
    """Return three rates, after one that warms up."""
    return [work() for _ in range(4)][1:]


def relayed() -> float:
    """Return the rate at which messages are claimed and settled."""
    fill(MESSAGES, dispatched=False)
    vacuum()
    return rate(MESSAGES, lane())


def consumed() -> float:
    """Return the rate of a stage that inserts a row and sends a message."""
    return consume(2000, empty=False)


def grow(rows: int) -> None:
    """Insert what ten days have left behind."""
    from django.db import connection

    age = f"now() - interval '{DAYS} days' * (1 - number / {rows}.0)"
    with connection.cursor() as cursor:
        cursor.execute(
            f"""
            INSERT INTO django_txmsg_outboxmessage (message_id, replay_id, broker,
                destination, key, correlation_id, headers, content_type, body,
                attempts, last_error, created_at, due_at, dispatched_at)
            SELECT gen_random_uuid(), '', 'default', 'bench.big', '', '', '{{}}',
                'application/octet-stream', convert_to(repeat('x', 300), 'UTF8'), 0, '',
                {age}, {age}, {age}
            FROM generate_series(1, {rows}) AS number
            """
        )
        cursor.execute(
            f"""
            INSERT INTO django_txmsg_inboxmessage (stage, message_id, destination,
                deliveries, attempts, correlation_id, first_received_at,
                last_received_at, processed_at, service, last_error)
            SELECT 'bench.big', gen_random_uuid(), 'bench.big', 1, 1, '', {age}, {age},
                {age}, '', ''
            FROM generate_series(1, {rows}) AS number
            """
        )
    vacuum_all()


def prune() -> int:
    """Delete what is past its retention, as `prune_messages` does."""
    from django_txmsg.monitoring import retention

    kinds = [kind for kind in retention.kinds() if kind.logged]
    return sum(retention.prune(kind, "default") for kind in kinds)


def vacuum_all() -> None:
    """Do what autovacuum would have done by now."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("VACUUM ANALYZE django_txmsg_inboxmessage")
    vacuum()


def size() -> str:
    """Say how large the two tables and their indexes are."""
    from django.db import connection

    told = []
    with connection.cursor() as cursor:
        for name in ("outbox", "inbox"):
            table = f"django_txmsg_{name}message"
            cursor.execute(
                "SELECT pg_size_pretty(pg_table_size(%s)),"
                " pg_size_pretty(pg_indexes_size(%s))",
                [table, table],
            )
            heap, indexes = cursor.fetchone()
            told.append(f"{name} {heap} and {indexes} of indexes")
    return ", ".join(told)


def since(began: float) -> str:
    """Say how long that took."""
    return f"{time.perf_counter() - began:.0f} s"


if __name__ == "__main__":
    main()
