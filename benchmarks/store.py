"""The cost of storing a message, compared with `Model.objects.create()` of a row of the
same size.

    python -m benchmarks.store [--rows 2000] [--rounds 5]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from . import stand

BODY = {"order": "A-1", "text": "x" * 270}


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    stand.django(stand.postgresql(), {"SERVICE": "bench", "DISPATCH_ON_COMMIT": "off"})
    rows = options.rows
    contenders: dict[str, Callable[[], float]] = {
        "Model.objects.create": lambda: create(rows),
        "send_message": lambda: one_by_one(rows),
        "send_messages of 1,000": lambda: in_bulk(rows),
    }
    figures = stand.turns(contenders, options.rounds)
    stand.table(
        "store",
        figures,
        next(iter(contenders)),
        "microseconds a message",
        goals={"send_message": 1.3},
    )


def create(rows: int) -> float:
    """Return the microseconds per row for a plain model of the same size."""
    from django.db import transaction

    from tests.app.models import Order

    Order.objects.all().delete()
    began = time.perf_counter()
    with transaction.atomic():
        for number in range(rows):
            Order.objects.create(number=str(number), total=1, note="x" * 400)
    return (time.perf_counter() - began) / rows * 1e6


def one_by_one(rows: int) -> float:
    """Return the microseconds per message for `send_message()`."""
    from django.db import transaction

    from django_txmsg import send_message

    clean()
    began = time.perf_counter()
    with transaction.atomic():
        for _ in range(rows):
            send_message("bench.store", BODY)
    return (time.perf_counter() - began) / rows * 1e6


def in_bulk(rows: int) -> float:
    """Return the microseconds per message for `send_messages()` with 1,000 messages."""
    from django.db import transaction

    from django_txmsg import send_messages

    clean()
    batch = [{"destination": "bench.store", "body": BODY} for _ in range(1000)]
    began = time.perf_counter()
    with transaction.atomic():
        for _ in range(0, rows, 1000):
            send_messages(batch)
    return (time.perf_counter() - began) / rows * 1e6


def clean() -> None:
    """Empty the outbox."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE django_txmsg_outboxmessage")


if __name__ == "__main__":
    main()
