"""The cost of calling a Celery task through the outbox, and of executing an OnceTask,
compared with plain Celery.

    python -m benchmarks.celery_outbox [--calls 1000] [--rounds 5]

A call is a transaction that stores an order and calls a task, on PostgreSQL and
RabbitMQ. No message is dispatched during the measurement. An execution runs the task as
a worker process does, without the broker.
"""

from __future__ import annotations

import argparse
import importlib
import os
import time
import uuid
from collections.abc import Callable
from typing import Any

from . import stand


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    from tests import services
    from tests.services.stomp_server import PASSWORD, USER

    rabbitmq = services.shared(services.RabbitMQ)
    url = f"amqp://{USER}:{PASSWORD}@127.0.0.1:{rabbitmq.amqp_port}//"
    os.environ["BENCH_CELERY_URL"] = url
    brokers = {
        "default": {"URL": "database://"},
        "celery": {"URL": "celery://benchmarks._celery_apps:ours"},
    }
    txmsg = {"SERVICE": "bench", "BROKERS": brokers, "DISPATCH_ON_COMMIT": "off"}
    stand.django(stand.postgresql(), txmsg)
    apps = importlib.import_module("benchmarks._celery_apps")
    count = options.calls

    def confirmed(confirm: bool) -> Callable[[], float]:
        def run() -> float:
            apps.plain.conf.broker_transport_options = {"confirm_publish": confirm}
            apps.plain._after_fork()
            return calls(apps.charge_before.delay_on_commit, count)

        return run

    figures = stand.turns(
        {
            "without a Celery task": lambda: calls(lambda order: None, count),
            "with Celery's delay_on_commit()": confirmed(False),
            "with delay_on_commit() and publisher confirms": confirmed(True),
            "with .delay(), which stores a row": lambda: calls(
                apps.charge_plain.delay, count
            ),
        },
        options.rounds,
    )
    stand.table(
        "time to store an order",
        figures,
        "with Celery's delay_on_commit()",
        "microseconds a transaction",
    )
    figures = stand.turns(
        {
            "a task with its own transaction": lambda: work(apps.charge_plain, count),
            "OnceTask": lambda: work(apps.charge_once, count),
        },
        options.rounds,
    )
    stand.table(
        "working on a Celery task",
        figures,
        "a task with its own transaction",
        "microseconds a task",
    )


def calls(call: Callable[[int], Any], count: int) -> float:
    """Return the duration of a transaction with an order and a call, in
    microseconds."""
    from django.db import connection, transaction

    from tests.app.models import Order

    with connection.cursor() as cursor:
        cursor.execute(f"TRUNCATE {Order._meta.db_table}, django_txmsg_outboxmessage")
    began = time.perf_counter()
    for number in range(count):
        with transaction.atomic():
            order = Order.objects.create(number=str(number), total=1)
            call(order.pk)
    return (time.perf_counter() - began) / count * 1e6


def work(task: Any, count: int) -> float:
    """Return the duration of executing a task that stores one row, in microseconds."""
    from celery.app.trace import build_tracer

    trace = build_tracer(task.name, task, app=task.app)
    ids = [str(uuid.uuid4()) for _ in range(count)]
    began = time.perf_counter()
    for number, one in enumerate(ids):
        trace(one, (number,), {}, {"id": one, "retries": 0, "delivery_info": {}})
    return (time.perf_counter() - began) / count * 1e6


if __name__ == "__main__":
    main()
