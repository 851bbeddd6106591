"""Tasks of django.tasks, for its backend's tests."""

from __future__ import annotations

import ast
import os
import signal
import uuid
from typing import Any

from asgiref.sync import sync_to_async
from django.db import transaction

from django_txmsg import Redeliver, Refuse, send_message
from django_txmsg.models import QueueMessage
from tests.hostile_errors import SilentError

from .models import Effect

try:
    from django.tasks import task
except ModuleNotFoundError:
    from django_tasks import task


@task
def nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


@task
async def nothing_async(*args: Any, **kwargs: Any) -> None:
    """Do nothing, in an event loop."""


@task
def meaning_of_life() -> int:
    """Return the answer to everything."""
    return 42


@task
def lose_delivery() -> str:
    """Change the message's lease token before the task returns, as if another worker
    had claimed the message during a long pause of this worker."""
    QueueMessage.objects.update(lease_token=uuid.uuid4())
    return "done"


@task
def fail() -> None:
    """Fail with an exception."""
    raise ValueError("This Task failed due to ValueError")


@task
def leave() -> None:
    """Raise SystemExit, which is not a subclass of Exception."""
    raise SystemExit("This Task failed due to SystemExit")


@task
def fail_without_text() -> None:
    """Fail with an exception whose `str()` raises."""
    raise SilentError


@task
def interrupt() -> None:
    """Raise KeyboardInterrupt although nobody has pressed Ctrl-C."""
    raise KeyboardInterrupt("its own")


@task
def fail_within() -> None:
    """Fail with an exception that has a cause."""
    raise ValueError(ValueError("This task failed"))


@task
def return_object() -> Any:
    """Return an object that JSON cannot express."""
    return object()


@task
def return_decoded(text: str) -> Any:
    """Return a list with a text that is given as a Python literal."""
    return {"names": ["a", ast.literal_eval(text)]}


@task
def return_number(text: str) -> Any:
    """Return a list with a number that JSON cannot express."""
    return {"rates": [1.0, float(text)]}


@task(takes_context=True)
def own_id(context: Any) -> str:
    """Return the id of this task's result."""
    return str(context.task_result.id)


@task(takes_context=True)
def look_around(context: Any, number: int) -> dict[str, Any]:
    """Return what the task's context contains."""
    found = context.task_result.task.get_backend().get_result(context.task_result.id)
    return {
        "number": number,
        "attempt": context.attempt,
        "status": context.task_result.status,
        "stored": found.status,
        "args": context.task_result.args,
    }


@task
def note(text: str) -> str:
    """Do some work in the database, and send a message."""
    Effect.objects.create(name=text)
    if transaction.get_connection().in_atomic_block:
        send_message("tests.noted", {"text": text})
    return text


@task
async def note_async(text: str) -> str:
    """Do some work in the database from an event loop, and enqueue another task."""
    await sync_to_async(Effect.objects.create)(name=text)
    await meaning_of_life.aenqueue()
    return text


@task(takes_context=True)
def fail_until(context: Any, attempt: int, text: str) -> int:
    """Do work. Fail at each attempt before the one with the number `attempt`."""
    Effect.objects.create(name=text)
    if context.attempt < attempt:
        raise ValueError(f"attempt {context.attempt}")
    return int(context.attempt)


@task
def refuse() -> None:
    """Refuse the task: another attempt is pointless."""
    raise Refuse("of no use")


@task
def ask_again() -> None:
    """Request another attempt without delay."""
    raise Redeliver(after=0.0)


@task
def die_once(text: str, marker: str) -> str:
    """Kill this task's process in the middle of its work, but only the first time."""
    Effect.objects.create(name=text)
    if not os.path.exists(marker):
        with open(marker, "w") as file:
            file.write("here")
        os.kill(os.getpid(), signal.SIGKILL)
    return text


@task
def lose_connection() -> str:
    """Make the server end this task's database connection."""
    import psycopg

    connection = transaction.get_connection()
    with psycopg.connect(**connection.get_connection_params()) as other:
        pid = connection.connection.info.backend_pid
        other.execute("SELECT pg_terminate_backend(%s)", [pid])
    return "done"


def no_task() -> None:
    """A function that is not a task, and must not be run."""
