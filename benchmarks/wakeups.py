"""Measures how soon another process wakes up after a commit, and the cost of idle
processes and of notifications.

    python -m benchmarks.wakeups [--messages 200] [--part latency|idle|commits]

All processes use one PostgreSQL and `database://`, with NOTIFY and with polling. There
are three parts:

- latency: the time from the commit until an idle `run` calls the handler, and until an
  idle `relay` dispatches the message
- idle: the transactions per second of an idle process
- commits: the commits per second of 32 clients
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from . import stand

#: In milliseconds: what 50 and 99 of 100 shall not exceed.
GOALS = 15.0, 60.0
CLIENTS, PROCESSES = 32, 2
NOTIFIED = "NOTIFY wakes the relay"


def main() -> None:
    """Run the measurements. Pass `--role` to act as one of the processes that the
    measurements start."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=200)
    parser.add_argument("--part", choices=["latency", "idle", "commits"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--silent", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        play(options.role, options.url, not options.silent)
        return
    url = stand.postgresql()
    stand.django(url, settings(notify=True))
    if options.part in (None, "latency"):
        latency(url, options.messages)
    if options.part in (None, "idle"):
        idle(url)
    if options.part in (None, "commits"):
        commits(url, options.rounds)


def settings(*, notify: bool, **more: Any) -> dict[str, Any]:
    """Return the TXMSG settings of all processes."""
    return {"SERVICE": "bench", "NOTIFY": notify, **more}


def start(role: str, url: str, *, notify: bool = True) -> subprocess.Popen[str]:
    """Start one of the processes, and wait until it is ready."""
    command = [sys.executable, "-m", "benchmarks.wakeups", "--role", role, "--url", url]
    process = subprocess.Popen(
        [*command, *([] if notify else ["--silent"])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "ready"
    return process


def end(process: subprocess.Popen[str]) -> None:
    """Stop the process with SIGTERM."""
    process.terminate()
    process.communicate()


def latency(url: str, count: int) -> None:
    """Measure the time from a commit until another process handles or dispatches the
    message."""
    from django.conf import settings as django_settings

    for role, what in (("run", "handler"), ("relay", "dispatch by a relay")):
        for notify in (True, False):
            # A relay has something to do where no process dispatches after its commit.
            mode = "off" if role == "relay" else "thread"
            django_settings.TXMSG = settings(notify=notify, DISPATCH_ON_COMMIT=mode)
            from django_txmsg import conf

            conf.get.cache_clear()
            process = start(role, url, notify=notify)
            figures = sorted(measured(process, count if notify else count // 4))
            end(process)
            cuts = statistics.quantiles(figures, n=100)
            goal = f"   goal: {GOALS[0]:g}, {GOALS[1]:g}" if notify else ""
            print(
                f"commit to {what}, another process, {len(figures)} messages, "
                f"{'NOTIFY' if notify else 'polling'} (milliseconds): "
                f"p50 {cuts[49]:.1f}   p95 {cuts[94]:.1f}   p99 {cuts[98]:.1f}{goal}",
                flush=True,
            )


def measured(process: subprocess.Popen[str], count: int) -> list[float]:
    """Return the milliseconds that each message took."""
    from django.db import transaction

    from django_txmsg import send_message

    took = []
    assert process.stdout is not None
    for number in range(count + 20):
        with transaction.atomic():
            message = send_message("bench.wakeups", {"n": number, "text": "x" * 260})
        committed = time.time()
        identity, instant = process.stdout.readline().split()
        assert identity == str(message.id)
        if number >= 20:
            took.append((float(instant) - committed) * 1000)
        # Idle again; some pauses outlast a connection's or a thread's patience.
        time.sleep(random.uniform(0.3, 0.4) if number % 20 else 6.0)
    return took


def idle(url: str) -> None:
    """Count the transactions that an idle process causes."""
    import psycopg

    def count() -> int:
        elsewhere = url.rpartition("/")[0] + "/postgres"
        with psycopg.connect(elsewhere) as connection:
            row = connection.execute(
                "SELECT xact_commit + xact_rollback FROM pg_stat_database"
                " WHERE datname = 'bench'"
            ).fetchone()
        assert row is not None
        return int(row[0])

    from django.db import connections

    for role in ("run", "consume", "relay"):
        process = start(role, url)
        connections.close_all()
        time.sleep(20)
        before, began = count(), time.monotonic()
        time.sleep(40)
        rate = (count() - before) / (time.monotonic() - began)
        print(f"idle {role}: {rate:.2f} transactions/s   goal: 1", flush=True)
        end(process)


def commits(url: str, rounds: int) -> None:
    """Measure the rate at which 32 clients commit. Each commit stores a message."""
    from django_txmsg.models import OutboxMessage

    def run(notify: bool) -> Callable[[], float]:
        def once() -> float:
            OutboxMessage.objects.all().delete()
            clients = [start("client", url, notify=notify) for _ in range(PROCESSES)]
            listener = start("silent relay", url, notify=notify)
            for one in clients:
                assert one.stdin is not None
                one.stdin.write("go\n")
                one.stdin.flush()
            rate = sum(float(one.communicate()[0]) for one in clients)
            end(listener)
            return rate

        return once

    figures = stand.turns({"the relay polls": run(False), NOTIFIED: run(True)}, rounds)
    stand.table(
        f"commits of {CLIENTS} clients while a relay runs",
        figures,
        "the relay polls",
        "commits/s",
        {NOTIFIED: 0.8},
    )


def play(role: str, url: str, notify: bool) -> None:
    """Act as one of the processes."""
    stand.django(url, settings(notify=notify, DISPATCH_ON_COMMIT="off"))
    from django.core.management import call_command

    from django_txmsg import Message, signals, stage
    from django_txmsg.runtime import liveness, notifications

    # An idle hour in less than a minute.
    liveness.CALM = 10.0

    @stage("bench.wakeups")
    def handle(message: Message) -> None:
        if role == "run":
            print(message.id, time.time(), flush=True)

    def dispatched(id: object, **_: Any) -> None:
        print(id, time.time(), flush=True)

    if role == "client":
        client()
        return
    if role == "relay":
        signals.message_dispatched.connect(dispatched)

    def ready() -> None:
        while notify and not notifications.has_listener("default"):
            time.sleep(0.05)
        print("ready", flush=True)

    threading.Thread(target=ready, daemon=True).start()
    command = ["txmsg", "run"] if role == "run" else [role.removeprefix("silent ")]
    call_command(*command, verbosity=0)


def client() -> None:
    """Store messages in 16 threads for a few seconds and print the rate."""
    from django.db import transaction

    from django_txmsg import send_message

    def work(number: int) -> None:
        while time.monotonic() < until:
            with transaction.atomic():
                send_message("bench.elsewhere", {"n": 1})
            counts[number] += 1

    print("ready", flush=True)
    sys.stdin.readline()
    counts, seconds = [0] * (CLIENTS // PROCESSES), 8.0
    until = time.monotonic() + seconds
    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(counts))]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    print(sum(counts) / seconds)


if __name__ == "__main__":
    main()
