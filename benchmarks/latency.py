"""The time from a commit until the broker has confirmed the message, on an idle system.

python -m benchmarks.latency [--messages 300]
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
from typing import Any

from . import stand


def main() -> None:
    """Measure and print the percentiles."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=300)
    options = parser.parse_args()
    from tests import services

    broker = services.shared(services.ActiveMQ)
    stand.django(
        stand.postgresql(),
        {"SERVICE": "bench", "BROKERS": {"default": {"URL": broker.url()}}},
    )
    from django.db import transaction

    from django_txmsg import send_message, signals

    arrived = threading.Event()

    def on_dispatched(**_: Any) -> None:
        arrived.set()

    signals.message_dispatched.connect(on_dispatched)
    milliseconds = []
    for number in range(options.messages + 20):
        arrived.clear()
        with transaction.atomic():
            send_message("bench.latency", {"n": number, "text": "x" * 260})
        began = time.perf_counter()
        assert arrived.wait(10), "no receipt in ten seconds"
        if number >= 20:
            milliseconds.append((time.perf_counter() - began) * 1000)
        # Idle again: commits that follow at once are gathered, to leave together.
        time.sleep(random.uniform(0.06, 0.1))
    cuts = statistics.quantiles(milliseconds, n=100)
    print(f"commit to receipt, {options.messages} messages, ActiveMQ (milliseconds)")
    print(f"p50 {cuts[49]:.1f}   p95 {cuts[94]:.1f}   p99 {cuts[98]:.1f}")


if __name__ == "__main__":
    main()
