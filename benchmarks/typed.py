"""The cost of types: receiving and sending typed messages, compared with plain dicts.

python -m benchmarks.typed [--messages 3000] [--rounds 3]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from . import consume, stand

LINES = [{"item": f"item {number}", "amount": "9.90"} for number in range(5)]


@dataclass
class Line:
    """One line of an order."""

    item: str
    amount: Decimal


@dataclass
class Order:
    """An order of some 300 bytes."""

    number: str
    text: str
    lines: list[Line] = field(default_factory=list)
    currency: str = "EUR"


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    stand.django(
        stand.postgresql(),
        {
            "SERVICE": "bench",
            "BROKERS": {"default": {"URL": "database://?poll=0.01"}},
            "DISPATCH_ON_COMMIT": "off",
        },
    )
    from django_txmsg.models import QueueMessage

    count = options.messages

    def taken(handler: Any) -> Callable[[], float]:
        def run() -> float:
            QueueMessage.objects.all().delete()
            return consume.consume(count, handler=handler, body=BODY)

        return run

    for title, contenders in (
        (
            "a stage that inserts a row and sends a message",
            {"plain dict": taken(plain), "typed": taken(typed)},
        ),
        (
            "send_message",
            {
                "plain dict": lambda: send(count, plain_order),
                "typed": lambda: send(count, order),
            },
        ),
    ):
        figures = stand.turns(contenders, options.rounds)
        stand.table(title, figures, "plain dict", goals={"typed": 0.9})


def order() -> Order:
    """Return a new order."""
    lines = [Line(one["item"], Decimal(one["amount"])) for one in LINES]
    return Order("A-1", "x" * 100, lines)


def plain_order() -> dict[str, Any]:
    """Return a new dict with the contents of `order()`. The benchmark creates a new
    typed order for each typed message, so it also creates a new dict for each plain
    message."""
    lines = [{"item": one["item"], "amount": one["amount"]} for one in LINES]
    return {"number": "A-1", "text": "x" * 100, "lines": lines, "currency": "EUR"}


DICT = plain_order()
BODY = (
    b'{"number": "A-1", "text": "%s", "lines": [%s], "currency": "EUR"}'
    % (b"x" * 100, b", ".join([b'{"item": "item 0", "amount": "9.90"}'] * 5))
)  # fmt: skip


def plain(message: Any) -> None:
    """Insert one business row, and send one message."""
    from django_txmsg import send_message
    from tests.app.models import Effect

    Effect.objects.create(name=message.body["number"], message_id=message.id)
    send_message("bench.next", DICT)


def typed(order: Order, message: Any) -> None:
    """Insert one business row, and send one message with a typed body."""
    from django_txmsg import send_message
    from tests.app.models import Effect

    Effect.objects.create(name=order.number, message_id=message.id)
    send_message("bench.next", order)


def send(count: int, body: Callable[[], object]) -> float:
    """Return the rate at which messages are sent, with ten messages per transaction."""
    from django.db import transaction

    from django_txmsg import send_message

    consume.clean()
    began = time.perf_counter()
    for _ in range(count // 10):
        with transaction.atomic():
            for _ in range(10):
                send_message("bench.next", body())
    return count / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
