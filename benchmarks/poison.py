"""The cost of poison messages: 1,000 messages that always fail, stored before the good
ones.

    python -m benchmarks.poison [--good 10000] [--poison 1000] [--rounds 3]
"""

from __future__ import annotations

import argparse
import threading
import time
import uuid
from typing import Any

from . import stand
from .consume import clean


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--good", type=int, default=10_000)
    parser.add_argument("--poison", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=3)
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
    figures = stand.turns(
        {
            "good messages alone": lambda: consume(options.good, 0),
            "behind poison": lambda: consume(options.good, options.poison),
        },
        options.rounds,
    )
    stand.table(
        f"{options.good:,} good messages, {options.poison:,} poison in front",
        figures,
        "good messages alone",
    )


def handler(message: Any) -> None:
    """Fail for a poison message. Insert a business row for other messages."""
    from tests.app.models import Effect

    if message.body["poison"]:
        raise ValueError("poison")
    Effect.objects.create(name="good", message_id=message.id)


def consume(good: int, poison: int) -> float:
    """Return the rate of the good messages while the poison messages are
    redelivered."""
    from django_txmsg import signals, wire
    from django_txmsg.brokers import get_broker
    from django_txmsg.brokers.base import Outgoing
    from django_txmsg.consuming.consumer import Consumer
    from django_txmsg.stages import Stage

    clean()
    destination = f"bench.poison.{uuid.uuid4().hex[:8]}"
    bodies = [b'{"poison": true}'] * poison + [b'{"poison": false}'] * good
    with get_broker().open() as session:
        for start in range(0, len(bodies), 500):
            session.send(
                [
                    Outgoing(
                        destination,
                        {
                            wire.MESSAGE_ID: str(uuid.uuid4()),
                            wire.CONTENT_TYPE: wire.JSON,
                        },
                        body,
                    )
                    for body in bodies[start : start + 500]
                ]
            )
    done, finished, began = 0, threading.Event(), 0.0

    def count(**_: Any) -> None:
        nonlocal done, began
        began = began or time.perf_counter()
        done += 1
        if done == good:
            finished.set()

    signals.message_processed.connect(count)
    consumer = Consumer(
        [Stage(name=destination, destination=destination, handler=handler)]
    )
    thread = threading.Thread(target=consumer.run)
    thread.start()
    finished.wait()
    seconds = time.perf_counter() - began
    signals.message_processed.disconnect(count)
    consumer.stop()
    thread.join()
    return good / seconds


if __name__ == "__main__":
    main()
