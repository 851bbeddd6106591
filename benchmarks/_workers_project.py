"""A Django project with one task, for `benchmarks.workers`. BENCH_BACKEND chooses the
task backend, and with it all settings.

Its arguments are `enqueue N`, `alone N SECONDS` (one task at a time, for the latency of
an idle system), or a command of `manage.py`.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import environ

BACKEND = os.environ.get("BENCH_BACKEND", "txmsg")
AMQP = os.environ.get("BENCH_AMQP", "amqp://")

DATABASES = {
    "default": {
        **environ.Env.db_url_config(os.environ["BENCH_DATABASE"]),
        "CONN_MAX_AGE": int(os.environ.get("BENCH_MAX_AGE", "600")),
    }
}
INSTALLED_APPS = ["django.contrib.contenttypes"]
if find_spec("django.tasks") is None:  # Django 5.2
    INSTALLED_APPS.append("django_tasks")
SECRET_KEY = "bench"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
LOGGING = {"version": 1, "root": {"level": "ERROR"}}
TASKS: dict[str, Any] = {}
if "BENCH_RATE" in os.environ:
    INSTALLED_APPS.append("benchmarks")  # its `stages`
if BACKEND == "txmsg":
    INSTALLED_APPS.append("django_txmsg")
    TASKS = {
        "default": {
            "BACKEND": "django_txmsg.tasks_backend.TransactionalBackend",
            "OPTIONS": {
                "MODULES": ["benchmarks._workers_tasks"],
                "BATCH": int(os.environ.get("BENCH_BATCH", "1")),
                "CONCURRENCY": int(os.environ.get("BENCH_CONCURRENCY", "1")),
            },
        }
    }
    TXMSG = {
        "SERVICE": os.environ.get("BENCH_SERVICE", "bench"),
        "BROKERS": {"default": {"URL": os.environ.get("BENCH_URL", "database://")}},
    }
elif BACKEND == "django-tasks-db":
    INSTALLED_APPS.append("django_tasks_db")
    TASKS = {"default": {"BACKEND": "django_tasks_db.DatabaseBackend"}}
elif BACKEND == "dj-queue":
    INSTALLED_APPS.append("dj_queue")
    TASKS = {
        "default": {
            "BACKEND": "dj_queue.backend.DjQueueBackend",
            "QUEUES": [],
            # Its five minutes would be most of the wait after a SIGKILL.
            "OPTIONS": {
                "process_heartbeat_interval": 5,
                "process_alive_threshold": 20,
            },
        }
    }
elif BACKEND == "steady-queue":
    import steady_queue

    steady_queue.process_heartbeat_interval = timedelta(seconds=5)
    steady_queue.process_alive_threshold = timedelta(seconds=20)
    INSTALLED_APPS.append("steady_queue")
    TASKS = {"default": {"BACKEND": "steady_queue.backend.SteadyQueueBackend"}}
elif BACKEND == "procrastinate":
    INSTALLED_APPS.append("procrastinate.contrib.django")
    PROCRASTINATE_IMPORT_PATHS = ["benchmarks._workers_tasks"]
elif BACKEND == "dramatiq":
    INSTALLED_APPS.append("django_dramatiq")
    DRAMATIQ_AUTODISCOVER_MODULES: list[str] = []
    DRAMATIQ_BROKER = {
        "BROKER": "dramatiq.brokers.rabbitmq.RabbitmqBroker",
        "OPTIONS": {"url": AMQP},
        "MIDDLEWARE": [
            "dramatiq.middleware.AgeLimit",
            "dramatiq.middleware.Retries",
            "django_dramatiq.middleware.DbConnectionsMiddleware",
        ],
    }


def main() -> None:
    """Run the command from the arguments."""
    os.environ["DJANGO_SETTINGS_MODULE"] = "benchmarks._workers_project"
    import django

    django.setup()
    if sys.argv[1] not in ("enqueue", "alone"):
        from django.core.management import execute_from_command_line

        execute_from_command_line(sys.argv)
        return
    from django.db import transaction

    from benchmarks import _workers_tasks as tasks

    pause = float(sys.argv[3]) if sys.argv[1] == "alone" else 0.0
    began = time.perf_counter()
    for number in range(int(sys.argv[2])):
        with transaction.atomic():
            tasks.begin(number)
            tasks.call(number)
        time.sleep(pause)
    seconds = time.perf_counter() - began
    time.sleep(1.0 if BACKEND == "txmsg" else 0.0)  # what leaves after the commit
    print(int(sys.argv[2]) / seconds)


if __name__ == "__main__":
    main()
