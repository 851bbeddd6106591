"""How much the admin's counts slow down a relay and a stage.

    python -m benchmarks.counts [--messages 10000] [--rounds 7]

It runs the work of `benchmarks.relay` and `benchmarks.consume` in three ways:

- switched off: The indexes that serve only the counts are dropped before the work, and
  no period is counted.
- kept: After the work, the finished period is counted, and the time for counting is
  added to the time of the work. Here, a period has only the messages of one run. A real
  worker counts every five minutes, whatever the number of messages.
- kept and read: In addition, the counts are read every second during the work, as by an
  open overview or by a scrape. A relay that raises alerts reads them every 15 seconds.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from . import consume, relay, stand

#: The indexes that serve only the counts.
INDEXES = (
    "txmsg_outbox_place",
    "django_txmsg_outboxmessage_created_at",
    "django_txmsg_outboxmessage_dispatched_at",
    "django_txmsg_inboxmessage_last_received_at",
)
OFF, KEPT, READ = "counting switched off", "counts kept", "counts kept and read"


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--messages", type=int, default=10_000, help="thousands")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    from tests import services

    broker: Any = services.shared(services.ActiveMQ)
    stand.django(
        stand.postgresql(),
        {
            "SERVICE": "bench",
            "BROKERS": {"default": {"URL": broker.url()}},
            "DISPATCH_ON_COMMIT": "off",
        },
    )
    count = options.messages
    works: dict[str, Callable[[], float]] = {
        "relay": lambda: relay.relay(broker, count),
        "stage": lambda: consume.consume(count // 3),
    }
    for work in works.values():
        work()  # the broker compiles
    for name, work in works.items():
        contenders = {
            OFF: partial(_off, work),
            KEPT: partial(_kept, work, nullcontext),
            READ: partial(_kept, work, _reading),
        }
        figures = stand.turns(contenders, options.rounds)
        stand.table(
            f"counts during the work of a {name}", figures, OFF, goals={KEPT: 0.98}
        )


def _off(work: Callable[[], float]) -> float:
    """Return the rate of the work while no period is counted. The indexes that serve
    only the counts are dropped before the work, and created again afterwards."""
    from django.db import connection

    consume.clean()
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT indexname, indexdef FROM pg_indexes WHERE indexname = ANY(%s)",
            [list(INDEXES)],
        )
        found = dict(cursor.fetchall())
        assert found.keys() == set(INDEXES)
        for name in found:
            cursor.execute(f"DROP INDEX {name}")
    try:
        return work()
    finally:
        with connection.cursor() as cursor:
            for definition in found.values():
                cursor.execute(definition)


def _kept(
    work: Callable[[], float], beside: Callable[[], AbstractContextManager[None]]
) -> float:
    """Return the number of messages per second, for the work and the counting together.
    First the work runs, inside the context manager that `beside()` returns. Then its
    messages are counted."""
    from django.db import connection

    from django_txmsg.models.fields import clock
    from django_txmsg.models.monitoring import PERIOD
    from django_txmsg.monitoring import periods

    consume.clean()
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE django_txmsg_periodcount")
    periods.remember("default", clock("default"))  # the periods before the work
    with beside():
        rate = work()
    later = clock("default") + PERIOD + periods.GRACE
    began = time.perf_counter()
    periods.remember("default", later)
    counting = time.perf_counter() - began
    return rate / (1 + counting * rate / _counted())


def _counted() -> int:
    """Return the number of messages that were counted in the run. Fails if there is
    none."""
    from django_txmsg.models import PeriodCount

    counts = PeriodCount.objects.filter(series__in=("dispatched", "processed"))
    number = sum(counts.values_list("count", flat=True))
    assert number, "nothing was counted"
    return number


@contextmanager
def _reading() -> Iterator[None]:
    """Read the counts every second in a thread, while the block runs."""
    from django.db import connections

    from django_txmsg.monitoring import status

    done = threading.Event()

    def read() -> None:
        while not done.wait(1.0):
            status.read()
        connections.close_all()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


if __name__ == "__main__":
    main()
