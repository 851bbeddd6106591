"""Counts the tasks that are lost or executed twice when web processes, workers and the
broker are killed.

    python -m benchmarks.celery_killed [--processes 100] [--life 0.3]

The benchmark runs a project with Celery alone, and the same project with this package.
Each web process repeats one transaction, which stores an order and calls a task for the
order, until the process is killed with SIGKILL. Meanwhile the worker is killed several
times, and RabbitMQ once. At the end, each order should have been charged exactly once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORKER = ("worker", "--concurrency", "2", "--without-gossip", "--without-mingle",
          "--without-heartbeat", "--loglevel", "ERROR")  # fmt: skip
#: By name: the app, how its task is called, and what else runs.
PROJECTS = {
    "Celery, delay_on_commit()": ("plain", "charge_before", False),
    "the same, acks_late": ("plain", "charge_late", False),
    "one line changed": ("ours", "charge_plain", True),
    "two lines changed: OnceTask": ("ours", "charge_once", True),
}


def main() -> None:
    """Run each project, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=100)
    parser.add_argument("--life", type=float, default=0.3, help="mean seconds")
    options = parser.parse_args()
    from tests import services
    from tests.services.stomp_server import PASSWORD, USER

    rabbitmq = services.shared(services.RabbitMQ)
    server = services.shared(services.PostgreSQL)
    server.create_database("test_killed")
    os.environ |= {
        "BENCH_CELERY_URL": f"amqp://{USER}:{PASSWORD}@127.0.0.1:{rabbitmq.amqp_port}//",
        "C_FORCE_ROOT": "1",
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
        "TXMSG_TEST_DATABASE_URL": server.url("killed"),
        "TXMSG_TEST_DIR": tempfile.mkdtemp(prefix="txmsg-bench-"),
        "TXMSG_TEST_SETTINGS": json.dumps(
            {
                "BROKERS": {
                    "default": {"URL": "database://"},
                    "celery": {"URL": "celery://benchmarks._celery_apps:ours"},
                },
                "RELAY": {"BREAKER_MAX_PAUSE": 2.0, "LEASE": 5.0},
            }
        ),
    }
    import django

    django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
    print(f"{'':30} {'orders':>8} {'never charged':>14} {'more than once':>15}")
    for name, (app, task, outbox) in PROJECTS.items():
        seen = play(app, task, outbox, rabbitmq, options)
        print(f"{name:30} {seen[0]:8,} {seen[1]:14,} {seen[2]:15,}", flush=True)


def play(
    app: str, task: str, outbox: bool, rabbitmq: Any, options: Any
) -> tuple[int, int, int]:
    """Run one project. Returns three numbers: all orders, orders never charged, and
    orders charged more than once."""
    from tests.app.models import Effect, Order

    Order.objects.all().delete()
    Effect.objects.all().delete()
    luck = random.Random(1)
    with contextlib.ExitStack() as stack:
        worker = started("celery", "-A", f"benchmarks._celery_apps:{app}", *WORKER)
        stack.callback(lambda: kill(worker))
        if outbox:
            relay = started(str(Path("tests/manage.py")), "relay", module=False)
            stack.callback(lambda: kill(relay))
        for number in range(options.processes):
            if number == options.processes // 2:
                rabbitmq.kill()
            web = in_a_child(lambda: serve(task))
            time.sleep(luck.uniform(0, 2 * options.life))
            os.kill(web, signal.SIGKILL)
            os.waitpid(web, 0)
            if number == options.processes // 2 + 3:
                rabbitmq.start()
            if number % 10 == 9:
                kill(worker)
                worker = started(
                    "celery", "-A", f"benchmarks._celery_apps:{app}", *WORKER
                )
                stack.callback(kill, worker)
        settle()
        orders = {str(pk) for pk in Order.objects.values_list("pk", flat=True)}
        charged = Counter(Effect.objects.values_list("message_id", flat=True))
    twice = sum(count > 1 for count in charged.values())
    return len(orders), len(orders - charged.keys()), twice


def settle() -> None:
    """Wait until the number of charged orders has not changed for ten seconds."""
    from tests.app.models import Effect

    last, since = -1, time.monotonic()
    while time.monotonic() - since < 10:
        now = Effect.objects.count()
        if now != last:
            last, since = now, time.monotonic()
        time.sleep(0.5)


def serve(task: str) -> None:
    """Work like a web process: store orders and call the task, in a loop."""
    from django.db import transaction

    from benchmarks import _celery_apps
    from tests.app.models import Order

    charge = getattr(_celery_apps, task)
    for number in range(10**9):
        with contextlib.suppress(Exception), transaction.atomic():
            order = Order.objects.create(number=f"{os.getpid()}-{number}")
            charge.delay_on_commit(order.pk)


def in_a_child(work: Callable[[], None]) -> int:
    """Fork a process that works until it is killed. Returns its id."""
    from django.db import connections

    connections.close_all()
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(1)
    return pid


def started(*command: str, module: bool = True) -> subprocess.Popen[bytes]:
    """Start a Python process in a new process group."""
    return subprocess.Popen(
        [sys.executable, *(["-m"] if module else []), *command],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and all its children with SIGKILL."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    main()
