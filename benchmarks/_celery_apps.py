"""Two Celery apps of one project: one uses Celery's class, the other the class of this
package."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery as PlainCelery

from django_txmsg.celery import Celery, OnceTask

URL = os.environ.get("BENCH_CELERY_URL", "amqp://")
SETTINGS: dict[str, Any] = {"broker_url": URL, "worker_hijack_root_logger": False}

DJANGOS = "celery.contrib.django.task:DjangoTask"

plain = PlainCelery("before", set_as_current=False, task_cls=DJANGOS)
plain.conf.update(SETTINGS, task_default_queue="bench.before")
ours = Celery("after", set_as_current=False)
ours.conf.update(SETTINGS, task_default_queue="bench.after")


def charge(order: int) -> int:
    """Charge an order: insert a row. At the end, each order should have exactly one
    such row."""
    from tests.app.models import Effect

    Effect.objects.create(name="charge", message_id=str(order))
    return order


@plain.task(name="charge", shared=False)
def charge_before(order: int) -> int:
    """Charge an order. This is Celery's default: the task is acknowledged before it is
    executed."""
    return charge(order)


@plain.task(
    name="charge_late", shared=False, acks_late=True, reject_on_worker_lost=True
)
def charge_late(order: int) -> int:
    """Charge an order. As Celery's documentation advises, the task is acknowledged
    after it is executed."""
    return charge(order)


@ours.task(name="charge", shared=False)
def charge_plain(order: int) -> int:
    """Charge an order. The task is called through the outbox."""
    return charge(order)


@ours.task(name="charge_once", shared=False, base=OnceTask)
def charge_once(order: int) -> int:
    """Charge an order, with an OnceTask that is called through the outbox."""
    return charge(order)
