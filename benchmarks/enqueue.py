"""The cost of `enqueue()`, compared with other packages that store tasks in the same
database.

    python -m benchmarks.enqueue [--rows 2000] [--rounds 7]

It measures django-tasks-db, and procrastinate through Django's connection, if they are
installed:

    pip install django-tasks-db procrastinate
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from . import stand

OURS = "django_txmsg.tasks_backend.TransactionalBackend"
TEXT = "x" * 200


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    others = {"django_tasks_db", "procrastinate"}
    here = {name for name in others if find_spec(name)}
    for name in sorted(others - here):
        print(f"without {name}: it is not installed")
    backends = {"default": {"BACKEND": OURS}}
    apps = []
    if "django_tasks_db" in here:
        backends["db"] = {"BACKEND": "django_tasks_db.DatabaseBackend"}
        apps.append("django_tasks_db")
    if "procrastinate" in here:
        apps.append("procrastinate.contrib.django")
    stand.django(
        stand.postgresql(),
        {"SERVICE": "bench", "DISPATCH_ON_COMMIT": "off"},
        apps,
        TASKS=backends,
    )
    from tests.app import jobs

    calls: dict[str, Callable[[int], Any]] = {
        "enqueue()": lambda n: jobs.nothing.enqueue(n, text=TEXT)
    }
    if "django_tasks_db" in here:
        theirs = jobs.nothing.using(backend="db")
        calls["django-tasks-db: enqueue()"] = lambda n: theirs.enqueue(n, text=TEXT)
    if "procrastinate" in here:
        from procrastinate.contrib.django import app

        task = app.task(name="nothing")(_nothing)
        calls["procrastinate: defer()"] = lambda n: task.defer(n=n, text=TEXT)
    kinds = {"many per transaction": False, "one per transaction": True}
    for title, alone in kinds.items():
        contenders = {
            name: lambda call=call, alone=alone: measured(call, options.rows, alone)
            for name, call in calls.items()
        }
        figures = stand.turns(contenders, options.rounds)
        for other in list(calls)[1:] or ["enqueue()"]:
            pair = {name: figures[name] for name in ("enqueue()", other)}
            stand.table(f"enqueue, {title}", pair, other, "microseconds a task")


def measured(call: Callable[[int], Any], rows: int, alone: bool) -> float:
    """Return the microseconds per task. With `alone`, each call has its own
    transaction. Otherwise all calls are in one transaction."""
    from django.db import transaction

    clean()
    began = time.perf_counter()
    if alone:
        for number in range(rows):
            with transaction.atomic():
                call(number)
    else:
        with transaction.atomic():
            for number in range(rows):
                call(number)
    return (time.perf_counter() - began) / rows * 1e6


def clean() -> None:
    """Empty the tables of all packages."""
    from django.db import connection

    names = set(connection.introspection.table_names())
    with connection.cursor() as cursor:
        for name in (
            "django_txmsg_outboxmessage",
            "django_tasks_database_dbtaskresult",
            "procrastinate_jobs",
        ):
            if name in names:
                cursor.execute(f"TRUNCATE {name} CASCADE")


def _nothing(n: int, text: str) -> None:
    """The function of the deferred job. No worker runs it."""


if __name__ == "__main__":
    main()
