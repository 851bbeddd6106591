"""A service that sends one message after the other until its input ends. Then it prints
two figures for each message: when the message was sent (monotonic clock), and how long
its transaction took."""

from __future__ import annotations

import json
import sys
import threading
import time

from benchmarks import stand


def main(url: str) -> None:
    """Send messages, then print their times."""
    stand.django(url, {"SERVICE": "bench", "DISPATCH_ON_COMMIT": "off"})
    from django.db import transaction

    from django_txmsg import send_message

    over = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=wait).start()
    sends: list[tuple[float, float]] = []
    print("sending", flush=True)
    while not over.is_set():
        started = time.monotonic()
        with transaction.atomic():
            send_message("bench.latency", {"n": len(sends)})
        sends.append((started, time.monotonic() - started))
        time.sleep(0.005)
    print(json.dumps(sends))


if __name__ == "__main__":
    main(sys.argv[1])
