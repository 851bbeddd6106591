"""A project's Celery application, with the schedule of docs/how-to/celery.md."""

from __future__ import annotations

import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")

app = Celery("tests")
app.conf.update(
    broker_url=os.environ["TXMSG_TEST_CELERY_URL"],
    task_default_queue=os.environ["TXMSG_TEST_CELERY_QUEUE"],
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
