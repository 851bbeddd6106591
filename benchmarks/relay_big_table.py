"""The relay on tables that have grown, and while an old snapshot stays open.

    python -m benchmarks.relay_big_table            all of these
    python -m benchmarks.relay_big_table grown  [--dispatched 2000000]
    python -m benchmarks.relay_big_table pinned [--messages 200000]
    python -m benchmarks.relay_big_table waiting [--delayed 200000 --parked 100000]

The broker is simulated: it confirms every batch immediately, so that only the
database's part is measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from . import stand

#: SQL for an id of version 7 that was made `at` an instant, as `send_message` makes it.
NEW_ID = (
    "overlay(replace(gen_random_uuid()::text, '-', '') PLACING lpad(to_hex((extract("
    "epoch FROM {at}) * 1000)::bigint), 12, '0') || '7' FROM 1)::uuid"
)
#: SQL for one of a stage's message: it begins as that of the message behind it.
STAGE_ID = NEW_ID.replace("'7'", "'8'").replace(
    "{at}", "({at} - random() * interval '5 seconds')"
)
#: SQL for one that says nothing of time, as others may give.
OTHER_ID = "gen_random_uuid()"


def main() -> None:
    """Run the chosen measurements, and print their results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", nargs="?", choices=["grown", "pinned", "waiting"])
    parser.add_argument("--dispatched", type=int, default=2_000_000)
    parser.add_argument("--pending", type=int, default=500_000)
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--delayed", type=int, default=200_000)
    parser.add_argument("--parked", type=int, default=100_000)
    options = parser.parse_args()
    database = stand.postgresql()
    stand.django(database, {"SERVICE": "bench", "DISPATCH_ON_COMMIT": "off"})
    if options.case in ("grown", None):
        grown(options.dispatched, options.pending)
    if options.case in ("pinned", None):
        empty()
        pinned(database, options.messages)
    if options.case in ("waiting", None):
        empty()
        waiting(options.dispatched, options.delayed, options.parked)


def empty() -> None:
    """Empty the tables."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE django_txmsg_outboxmessage, django_txmsg_inboxmessage")


def lane() -> Any:
    """Return a lane whose simulated broker accepts everything immediately."""
    from django_txmsg.brokers.base import Outgoing
    from django_txmsg.relaying.lane import Lane

    class Instant:
        def send(self, batch: Sequence[Outgoing], *, isolate: bool = False) -> Any:
            return [None] * len(batch)

        def close(self) -> None: ...

    made = Lane("default", "default")
    made._session = Instant()  # type: ignore[assignment]  # all of Session it needs
    return made


def fill(
    count: int,
    *,
    dispatched: bool,
    due: str = "clock_timestamp()",
    new_id: str = NEW_ID,
) -> None:
    """Insert `count` rows into the outbox, with dispatched or pending messages."""
    from django.db import connection

    message_id = new_id.format(at="clock_timestamp()")

    when = "now() - interval '1 day'" if dispatched else "NULL"
    with connection.cursor() as cursor:
        cursor.execute(
            f"""
            INSERT INTO django_txmsg_outboxmessage (message_id, replay_id, broker,
                destination, key, correlation_id, headers, content_type, body,
                attempts, last_error, created_at, due_at, dispatched_at)
            SELECT {message_id}, '', 'default', 'bench.big', '', '', '{{}}',
                'application/octet-stream', convert_to(repeat('x', 300), 'UTF8'), 0, '',
                now(), {due}, {when}
            FROM generate_series(1, %s)
            """,
            [count],
        )


def vacuum() -> None:
    """Vacuum and analyze the outbox, like autovacuum."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("VACUUM ANALYZE django_txmsg_outboxmessage")
        cursor.execute("CHECKPOINT")


def rate(count: int, working: Any) -> float:
    """Return the rate at which the lane `working` dispatches `count` messages."""
    began, done = time.perf_counter(), 0
    while done < count:
        claimed = working.dispatch()
        assert claimed, "the outbox ran dry"
        done += claimed
    return done / (time.perf_counter() - began)


def memory() -> float:
    """Return the resident memory of this process in megabytes."""
    import psutil

    return float(psutil.Process().memory_info().rss / 1e6)


def grown(dispatched: int, pending: int) -> None:
    """Compare an almost empty table with one that has a long history and a backlog."""
    fill(20_000, dispatched=False)
    vacuum()
    small = rate(20_000, lane())
    empty()
    fill(dispatched, dispatched=True)
    fill(pending, dispatched=False)
    vacuum()
    working = lane()
    rate(1000, working)
    before = memory()
    large = rate(20_000, working)
    rest = rate(min(100_000, pending // 2), working)
    print(f"\nempty table: {small:,.0f} messages/s")
    print(
        f"{dispatched:,} dispatched and {pending:,} pending: {large:,.0f} messages/s,"
    )
    stand.note(
        f"claims and settlements, with {dispatched:,} dispatched and {pending:,}"
        " pending messages",
        "an empty table",
        [large / small],
        "≥ 0.9",
    )
    print(f"ratio {large / small:.2f}; the next 100,000: {rest:,.0f} messages/s")
    print(f"memory {before:.0f} MB before, {memory():.0f} MB after")


def pinned(database: str, count: int) -> None:
    """Relay while an old snapshot is open, and compare the rate of the last messages
    with that of the first."""
    import psycopg

    fill(count, dispatched=False)
    vacuum()
    holder = psycopg.connect(database)
    holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    holder.execute("SELECT count(*) FROM django_txmsg_outboxmessage")
    working = lane()
    rate(1000, working)
    first = rate(20_000, working)
    middle = rate(count - 42_000, working)
    last = rate(20_000, working)
    print(f"\n{count:,} messages under one old snapshot")
    print(f"first 20,000: {first:,.0f}/s   middle: {middle:,.0f}/s")
    print(f"last 20,000: {last:,.0f}/s   ratio {last / first:.2f}")
    what = f"the last 20,000 of {count:,} messages under an old snapshot"
    stand.note(what, "the first 20,000", [last / first])
    holder.close()


def waiting(dispatched: int, delayed: int, parked: int) -> None:
    """Measure the search for due messages among many rows that are not due yet."""
    import statistics
    import uuid
    from collections.abc import Callable

    from django.db import connection

    from django_txmsg import conf
    from django_txmsg.models import InboxMessage, OutboxMessage

    def milliseconds(work: Callable[[], object]) -> float:
        taken = []
        for _ in range(200):
            began = time.perf_counter()
            assert not work()
            taken.append((time.perf_counter() - began) * 1000)
        return statistics.median(taken)

    def claim() -> object:
        return OutboxMessage.objects.claim(
            broker="default",
            services=conf.get().services,
            token=uuid.uuid4(),
            lease=60,
            limit=500,
        )

    inbox = InboxMessage.objects
    looks: dict[str, Callable[[], object]] = {
        "a claim that finds no due message": claim,
        "the query for due stages": lambda: inbox.due_stages({"bench.big": None}),
        "a claim that finds no due parked message": lambda: inbox.claim_parked(
            "bench.big", uuid.uuid4(), 60
        ),
    }
    vacuum()
    before = {name: milliseconds(look) for name, look in looks.items()}
    fill(dispatched, dispatched=True)
    fill(delayed, dispatched=False, due="now() + interval '30 days'")
    with connection.cursor() as cursor:
        cursor.execute(
            """
            INSERT INTO django_txmsg_inboxmessage (stage, message_id, destination,
                deliveries, attempts, correlation_id, first_received_at,
                last_received_at, service, last_error, headers, body, due_at)
            SELECT 'bench.big', gen_random_uuid(), 'bench.big', 1, 1, '', now(), now(),
                '', 'failed', '{}', 'x', now() + interval '1 hour'
            FROM generate_series(1, %s)
            """,
            [parked],
        )
        cursor.execute("VACUUM ANALYZE django_txmsg_inboxmessage")
    vacuum()

    rows = (
        f"{dispatched:,} dispatched, {delayed:,} delayed and {parked:,} parked messages"
    )
    print(f"\n{rows}")
    for name, look in looks.items():
        took = milliseconds(look)
        print(f"{name}: {took:.2f} ms; with empty tables {before[name]:.2f} ms")
        stand.note(f"{name}, with {rows}", "empty tables", [took / before[name]])


if __name__ == "__main__":
    main()
