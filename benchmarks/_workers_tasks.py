"""The task of `benchmarks.workers`, for each backend. It inserts a row in a
transaction."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from django.db import connection, transaction

from benchmarks._workers_project import AMQP, BACKEND

COMPUTE = int(os.environ.get("BENCH_COMPUTE", "0"))
RATE = os.environ.get("BENCH_RATE")


def insert(number: int) -> None:
    """Compute 100,000 steps for each unit of COMPUTE, then insert a row. The database
    adds the time to the row."""
    for _ in range(COMPUTE):
        sum(one * one for one in range(100_000))
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("INSERT INTO bench_effect (task) VALUES (%s)", [number])


def begin(number: int) -> None:
    """Insert a row for the call, in the caller's transaction."""
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO bench_call (task) VALUES (%s)", [number])


if BACKEND in ("txmsg", "django-tasks-db", "dj-queue", "steady-queue"):
    django_5 = find_spec("django.tasks") is None
    task: Any = import_module("django_tasks" if django_5 else "django.tasks").task

    @task
    def effect(number: int) -> None:
        """The task: insert a row."""
        insert(number)

    def call(number: int) -> Any:
        """Enqueue the task."""
        return effect.enqueue(number)

    if RATE:
        from django_txmsg import Message, send_message, stage

        @stage("bench.rated", rate=RATE)
        def rated(message: Message) -> None:
            """The handler of a stage with a rate: insert a row."""
            insert(message.body)

        def call(number: int) -> Any:
            """Send a message to the stage."""
            return send_message("bench.rated", number)

elif BACKEND == "procrastinate":
    from procrastinate.contrib.django import app

    deferred = app.task(name="effect")(insert)

    def call(number: int) -> Any:
        """Defer the task."""
        return deferred.defer(number=number)

elif BACKEND == "dramatiq":
    dramatiq: Any = import_module("dramatiq")

    actor = dramatiq.actor(insert)

    def call(number: int) -> Any:
        """Send a message to the actor after the transaction has committed."""
        transaction.on_commit(lambda: actor.send(number))

else:
    from celery import Celery

    celery = Celery("bench", broker=AMQP, set_as_current=True)
    celery.conf.update(
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        task_default_queue="bench.workers",
        worker_prefetch_multiplier=4,
    )
    celery_task = celery.task(name="effect")(insert)

    def call(number: int) -> Any:
        """Call the task after the transaction has committed."""
        transaction.on_commit(lambda: celery_task.delay(number))
