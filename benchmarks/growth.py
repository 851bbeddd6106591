"""The relay, a stage and pruning, with millions of settled rows in the tables.

    python -m benchmarks.growth [--rows 2000000] [--body 300] [--rounds 5]

Two databases of one server are measured alternately. One is empty before each round.
The other has ten days of messages in its outbox, and as many in its inbox. The oldest
day is older than the retention. The relay's broker accepts everything immediately, and
the embedded broker feeds the stage. Then one day is pruned, the tables are vacuumed,
and the relay is measured again.

Ids made by this package begin with the time, so their index entries are next to each
other. Ids from other senders may be random. Each random id changes a different index
page. After a checkpoint, the first change of a page writes the whole page to the
write-ahead log. Half of the settled rows have random ids, and the relay is measured
with both kinds. Every round follows a checkpoint, which is the worst case. Autovacuum
is off, because it would run only during some rounds. The VACUUM after the pruning is
measured, too.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable

from . import stand
from .consume import consume
from .relay_big_table import (
    NEW_ID,
    OTHER_ID,
    STAGE_ID,
    fill,
    lane,
    rate,
    vacuum,
)
from .relay_big_table import empty as empty_tables

DAYS = 10
MESSAGES = 20_000
TABLES = ("django_txmsg_outboxmessage", "django_txmsg_inboxmessage")


def main() -> None:
    """Measure and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--body", type=int, default=300, help="bytes, of settled rows")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows, rounds = options.rows, options.rounds
    stand.django(
        stand.postgresql("empty"),
        {
            "SERVICE": "bench",
            "DISPATCH_ON_COMMIT": "off",
            "BROKERS": {"default": {"URL": "database://?poll=0.01"}},
            "RETENTION": {"OUTBOX": DAYS - 1, "INBOX": DAYS - 1},
        },
    )
    stand.postgresql("grown")
    from django.core.management import call_command

    execute("ALTER SYSTEM SET autovacuum = off", "SELECT pg_reload_conf()")
    use("grown")
    call_command("migrate", verbosity=0)
    began = time.perf_counter()
    grow(rows, options.body)
    print(f"{rows:,} rows in each table: {size()}, in {since(began)}", flush=True)
    works: dict[str, Callable[[], float]] = {
        "the relay": functools.partial(relayed, NEW_ID),
        "the relay of stages' messages": functools.partial(relayed, STAGE_ID),
        "the relay of random ids": functools.partial(relayed, OTHER_ID),
        "a stage": consumed,
    }
    for name, work in works.items():
        goal = "" if "random" in name else "≥ 0.9"
        compare(f"{name}, with {rows:,} settled rows in each table", work, rounds, goal)
    use("grown")
    began = time.perf_counter()
    pruned = prune()
    print(f"{pruned:,} rows of one day pruned in {since(began)}; left: {size()}")
    began = time.perf_counter()
    vacuum_all()
    print(f"vacuumed in {since(began)}", flush=True)
    for name in ("the relay", "the relay of stages' messages"):
        compare(f"{name} after the pruning", works[name], rounds, "≥ 0.9")


def compare(what: str, work: Callable[[], float], rounds: int, goal: str) -> None:
    """Measure the work on both databases alternately. Print the ratio, and store it for
    the table of all benchmarks."""

    def empty() -> float:
        use("empty")
        empty_tables()
        return work()

    def grown() -> float:
        use("grown")
        return work()

    contenders = {"empty tables": empty, what: grown}
    stand.turns(contenders, 1)  # warms up
    figures = stand.turns(contenders, rounds)
    pairs = zip(figures[what], figures["empty tables"], strict=True)
    ratios = [one / other for one, other in pairs]
    middle = statistics.median(figures[what])
    print(f"{what}: {middle:,.0f}/s, ratio {statistics.median(ratios):.2f}", flush=True)
    stand.note(what, "empty tables", ratios, goal)


def use(database: str) -> None:
    """Use this database from now on, in all threads."""
    from django.db import connections

    connections["default"].close()
    connections.databases["default"]["NAME"] = database


def execute(*statements: str) -> None:
    """Run statements outside a transaction."""
    from django.db import connection

    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def relayed(new_id: str) -> float:
    """Return the rate at which a relay claims and settles messages. `new_id` is the SQL
    expression for the ids of the messages."""
    fill(MESSAGES, dispatched=False, new_id=new_id)
    vacuum()
    return rate(MESSAGES, lane())


def consumed() -> float:
    """Return the rate of a stage that inserts a row and sends a message."""
    vacuum_all()
    return consume(2000, empty=False)


def grow(rows: int, body: int) -> None:
    """Insert ten days of settled rows."""
    new, other = NEW_ID.format(at="at"), OTHER_ID
    source = f"""
        (SELECT CASE WHEN number % 2 = 0 THEN {new} ELSE {other} END AS message_id, at
         FROM (SELECT number, now() - interval '{DAYS} days' * (1 - number / {rows}.0)
               FROM generate_series(1, {rows}) AS number) AS numbers (number, at)
        ) AS settled
    """
    inserts = (
        f"""
        INSERT INTO django_txmsg_outboxmessage (message_id, replay_id, broker,
            destination, key, correlation_id, headers, content_type, body,
            attempts, last_error, created_at, due_at, dispatched_at)
        SELECT message_id, '', 'default', 'bench.big', '', '', '{{}}',
            'application/octet-stream', convert_to(repeat('x', {body}), 'UTF8'), 0,
            '', at, at, at
        FROM {source}
        """,
        f"""
        INSERT INTO django_txmsg_inboxmessage (stage, message_id, destination,
            deliveries, attempts, correlation_id, first_received_at,
            last_received_at, processed_at, service, last_error)
        SELECT 'bench.big', message_id, 'bench.big', 1, 1, '', at, at, at, '', ''
        FROM {source}
        """,
    )
    for table, insert in zip(TABLES, inserts, strict=True):
        drop, create = indexes(table)
        # Random ids would take hours to enter an index of many millions one by one.
        execute(*drop, insert, "SET maintenance_work_mem = '1GB'", *create)
    vacuum_all()


def indexes(table: str) -> tuple[list[str], list[str]]:
    """Return two lists of statements for the indexes of a table: one drops them, the
    other creates them again."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT i.indexrelid::regclass::text, pg_get_indexdef(i.indexrelid),"
            " c.conname, pg_get_constraintdef(c.oid) FROM pg_index i"
            " LEFT JOIN pg_constraint c ON c.conindid = i.indexrelid"
            " WHERE i.indrelid = %s::regclass",
            [table],
        )
        found = cursor.fetchall()
    drop, create = [], []
    for index, definition, constraint, key in found:
        alter = f"ALTER TABLE {table}"
        drop.append(
            f"{alter} DROP CONSTRAINT {constraint}"
            if constraint
            else f"DROP INDEX {index}"
        )
        create.append(
            f"{alter} ADD CONSTRAINT {constraint} {key}" if constraint else definition
        )
    return drop, create


def prune() -> int:
    """Delete the rows that are older than their retention, like `prune_messages`.
    Returns their number."""
    from django_txmsg.monitoring import retention

    kinds = [kind for kind in retention.kinds() if kind.logged]
    return sum(sum(retention.prune(kind, "default")) for kind in kinds)


def vacuum_all() -> None:
    """Vacuum all tables, like autovacuum."""
    execute("VACUUM ANALYZE django_txmsg_inboxmessage")
    vacuum()


def size() -> str:
    """Return the size of the two tables and their indexes, as text."""
    from django.db import connection

    sizes = []
    with connection.cursor() as cursor:
        for table in TABLES:
            cursor.execute(
                "SELECT pg_size_pretty(pg_table_size(%s)),"
                " pg_size_pretty(pg_indexes_size(%s))",
                [table, table],
            )
            heap, of_indexes = cursor.fetchone()
            sizes.append(f"{table} {heap} and {of_indexes} of indexes")
    return ", ".join(sizes)


def since(began: float) -> str:
    """Return the time since `began`, as text."""
    return f"{time.perf_counter() - began:.0f} s"


if __name__ == "__main__":
    main()
