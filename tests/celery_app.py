"""A project's Celery application, with the schedule of docs/how-to/celery.md.

Its transport is a directory, so that a worker needs no server.
"""

from __future__ import annotations

import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")

letters = os.environ["TXMSG_TEST_CELERY_DIR"]

app = Celery("tests")
app.conf.update(
    broker_url="filesystem://",
    broker_transport_options={
        "data_folder_in": letters,
        "data_folder_out": letters,
        "control_folder": f"{letters}/control",
    },
    result_backend=f"file://{letters}/results",
    beat_schedule={
        "dispatch what is stored": {
            "task": "django_txmsg.relay_outbox",
            "schedule": 1.0,
        },
        "delete what is old": {
            "task": "django_txmsg.prune_messages",
            "schedule": 2.0,
        },
    },
)
app.autodiscover_tasks()
