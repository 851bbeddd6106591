"""A project's Celery application that calls its tasks through the outbox.

The tests call its tasks. They also start its workers, and set the workers' broker in
the environment.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from celery import chain, signals
from django.db import transaction

from django_txmsg.celery import Celery, OnceTask

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")

app = Celery("tests.shop", set_as_current=False)
app.conf.update(
    broker_url=os.environ.get("TXMSG_TEST_CELERY_URL", "amqp://127.0.0.1:1//"),
    broker_connection_timeout=2,
    broker_transport_options=(
        {"visibility_timeout": 1, "polling_interval": 0.1}
        if "redis" in os.environ.get("TXMSG_TEST_CELERY_URL", "")
        else {}
    ),
    result_backend=os.environ.get("TXMSG_TEST_CELERY_RESULTS") or None,
    task_default_queue=os.environ.get("TXMSG_TEST_CELERY_QUEUE", "tests.celery"),
    worker_hijack_root_logger=False,
)


def die_once() -> None:
    """Kill this process, or the whole worker, if the test has created a file that
    requests it. Delete the file before the kill, so that this happens only once."""
    note = Path(os.environ.get("TXMSG_TEST_CELERY_DIE", "/nowhere"))
    if note.exists():
        whole_worker = note.read_text() == "worker"
        note.unlink()
        if whole_worker:
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


@signals.task_success.connect
def die_late(sender: Any = None, **_: Any) -> None:
    """Kill this process once, after a task has called its links and before its message
    is acknowledged."""
    note = Path(os.environ.get("TXMSG_TEST_CELERY_DIE_LATE", "/nowhere"))
    if note.exists() and note.read_text() == sender.request.id:
        note.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


@signals.worker_process_init.connect
def die_in_a_chord(**_: Any) -> None:
    """Kill this process once, after a task has stored its result and before the task's
    chord counts it."""
    note = Path(os.environ.get("TXMSG_TEST_CELERY_DIE_IN_CHORD", "/nowhere"))
    if not note.exists():
        return
    backend = app.backend
    count = backend.on_chord_part_return

    def on_chord_part_return(*args: Any, **options: Any) -> Any:
        if note.exists():
            note.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return count(*args, **options)

    backend.on_chord_part_return = on_chord_part_return


@app.task
def add(x: int, y: int) -> int:
    """Add two numbers."""
    return x + y


def effect(task: Any, name: str) -> None:
    """Insert a row that shows that the task was executed. No column is unique, so each
    execution leaves a row."""
    from tests.app.models import Effect

    Effect.objects.create(name=name, message_id=str(task.request.id))


@app.task(bind=True)
def step(self: Any, *given: Any, **named: Any) -> list[Any]:
    """Insert a row at each execution, and return the argument."""
    effect(self, f"step {json.dumps(given)}")
    return list(given)


@app.task(bind=True, base=OnceTask)
def charge(self: Any, *given: Any) -> list[Any]:
    """Insert a row, and call another task. The process may be killed right after the
    commit."""
    transaction.on_commit(die_once)
    effect(self, f"charge {json.dumps(given)}")
    step.delay("called by", *given)
    return list(given)


@app.task(bind=True, base=OnceTask, default_retry_delay=0, max_retries=3)
def retried(self: Any, times: int) -> int:
    """Insert a row, then retry. Do this `times` times. Each retry must roll back the
    row of its attempt."""
    effect(self, f"retried {self.request.retries}")
    if self.request.retries < times:
        raise self.retry()
    return int(self.request.retries)


@app.task(bind=True, base=OnceTask)
def replaced(self: Any, *given: Any) -> Any:
    """Insert a row, and replace this task by another one."""
    effect(self, "replaced")
    return self.replace(chain(step.s("first", *given), step.s("second")))


@app.task(bind=True)
def replaced_inside(self: Any) -> Any:
    """Replace this task by another one inside an inner transaction."""
    with transaction.atomic():
        effect(self, "rolled back")
        return self.replace(step.s("replacement"))


@app.task(bind=True, default_retry_delay=0)
def retried_inside(self: Any) -> int:
    """Retry once inside an inner transaction."""
    with transaction.atomic():
        effect(self, f"retried inside {self.request.retries}")
        if not self.request.retries:
            raise self.retry()
        return int(self.request.retries)


@app.task(bind=True, base=OnceTask)
def failing(self: Any) -> None:
    """Insert a row, which is rolled back because the task fails."""
    effect(self, "failing")
    raise ValueError("no good")


@app.task(base=OnceTask)
def poison() -> None:
    """Kill the worker's process."""
    os.kill(os.getpid(), signal.SIGKILL)
