"""Hop 8 for a task: calls the task's function, stores the return value, and creates
the task's result.

In mode "outbox", the stage's transaction contains the task's work and the return value.
In mode "none", the task runs without a transaction, and runs again if its worker dies
before the end. In both modes, a task that has finished does not run again.

The result combines the task's outbox row, the task's inbox row, the failed attempts,
and the stored return value.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from django.db import transaction
from django.utils import timezone
from django.utils.module_loading import import_string

from .. import wire
from ..brokers.database import ask
from ..envelope import serializers
from ..envelope.message import Message
from ..errors import BrokerUnavailable, DecodeError, TxmsgError
from ..models import Attempt, InboxMessage, OutboxMessage, TaskRun
from ..sending.scope import current_scope, enter_scope
from ..stages import Stage
from .framework import (
    DEFAULT_TASK_PRIORITY,
    DEFAULT_TASK_QUEUE_NAME,
    AnyResult,
    AnyTask,
    InvalidTask,
    Task,
    TaskContext,
    TaskError,
    TaskResult,
    TaskResultDoesNotExist,
    TaskResultStatus,
    normalize_json,
    task_finished,
    task_started,
)

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
#: Replaces the exception if there was none: a worker was lost, say.
NO_EXCEPTION = "django_txmsg.errors.TxmsgError"


class Backend(Protocol):
    """The interface of a task backend that this module uses."""

    alias: str

    def runs(self, path: str) -> bool:
        """Return whether this backend runs the task with this dotted path."""

    def imports(self, path: str) -> bool:
        """Return whether the settings name the module of this task."""

    def stage(self, destination: str) -> Stage:
        """Return the stage that runs the tasks of one queue."""


def result_of(backend: Backend, row: OutboxMessage, *, trusted: bool) -> AnyResult:
    """Return the result of the task in an outbox row.

    Raises TaskResultDoesNotExist if the row is not a task, or if the task's function no
    longer exists.
    """
    try:
        args, kwargs = arguments(serializers.decode(bytes(row.body), row.content_type))
        task = task_of(backend, row.headers, trusted=trusted)
    except (DecodeError, InvalidTask) as error:
        raise TaskResultDoesNotExist(str(error)) from error
    stage = backend.stage(row.destination)
    using, own = stage.definition.using, {"message_id": row.message_id}
    run = TaskRun.objects.using(using).filter(**own).first()
    seen = InboxMessage.objects.using(using).filter(**own, stage=stage.name)
    inbox = seen.defer("headers", "body").first()
    tried: Sequence[Attempt] = ()
    if inbox is not None and (inbox.last_error or inbox.attempts > 1):
        tried = attempts(row.message_id, stage)
    status = _status(row, inbox, run)
    errors = [error_of(one) for one in tried]
    finished_at = None
    if status == TaskResultStatus.SUCCESSFUL:
        assert run is not None
        finished_at = run.finished_at
    elif status == TaskResultStatus.FAILED:
        finished_at = row.dead_at if inbox is None else inbox.dead_at
        last = row.last_error if inbox is None else inbox.last_error
        if not tried or tried[-1].exception != last:
            errors.append(TaskError(exception_class_path=NO_EXCEPTION, traceback=last))
    count = 0
    if inbox is not None:
        count = min(inbox.attempts, stage.policy.max_begun)
    workers = run.workers if run is not None else workers_of(tried, count)
    begun = bool(workers)
    started = inbox.first_received_at if inbox else run.created_at if run else None
    last_started = inbox.started_at if inbox else started
    result: AnyResult = TaskResult(
        task=task,
        id=str(row.message_id),
        status=status,
        enqueued_at=row.created_at,
        started_at=started if begun else None,
        last_attempted_at=last_started if begun else None,
        finished_at=finished_at,
        args=args,
        kwargs=kwargs,
        backend=backend.alias,
        errors=errors,
        worker_ids=workers,
    )
    if status == TaskResultStatus.SUCCESSFUL and run is not None:
        object.__setattr__(result, "_return_value", run.result)
    return result


def _status(
    row: OutboxMessage, inbox: InboxMessage | None, run: TaskRun | None
) -> TaskResultStatus:
    if run is not None and run.finished_at is not None:
        return TaskResultStatus.SUCCESSFUL
    if (row.dead_at if inbox is None else inbox.dead_at) is not None:
        return TaskResultStatus.FAILED
    if inbox is None:
        return TaskResultStatus.READY if run is None else TaskResultStatus.RUNNING
    waits = inbox.due_at is not None and inbox.lease_until is None
    if waits or not inbox.attempts:
        return TaskResultStatus.READY
    return TaskResultStatus.RUNNING


def task_of(
    backend: Backend, headers: Mapping[str, str], *, trusted: bool = False
) -> AnyTask:
    """Return the task that the headers name, with the options with which it was
    enqueued. Raises InvalidTask if there is no such task.

    Headers that are not `trusted` come from a broker. They must not make this process
    import another package.
    """
    path = headers.get(wire.TASK, "")
    if not backend.runs(path):
        raise InvalidTask(f"{path[:200]!r} is in none of the backend's MODULES.")
    if not _PATH.fullmatch(path):
        raise InvalidTask(f"{path[:200]!r} is not the path of a task.")
    package = path.partition(".")[0]
    if not (trusted or package in sys.modules or backend.imports(path)):
        raise InvalidTask(
            f"The task {path[:200]!r} is not looked for, since nothing of {package!r} "
            f"is imported here. {name_it(backend.alias, path)}"
        )
    try:
        found = import_string(path)
    except ImportError as error:
        raise InvalidTask(f"There is no task {path!r} here: {error}") from error
    if not isinstance(found, Task):
        raise InvalidTask(f"{path!r} is not a task.")
    try:
        priority = int(headers.get(wire.TASK_PRIORITY, DEFAULT_TASK_PRIORITY))
        run_after = wire.parse_instant(headers[wire.TASK_RUN_AFTER])
    except KeyError:
        run_after = None
    except ValueError as error:
        raise InvalidTask(f"The headers of {path!r} are wrong: {error}") from error
    wanted: dict[str, Any] = {
        "priority": priority,
        "queue_name": headers.get(wire.TASK_QUEUE, DEFAULT_TASK_QUEUE_NAME),
        "run_after": run_after,
        "backend": backend.alias,
    }
    if all(getattr(found, name) == value for name, value in wanted.items()):
        return found
    return found.using(**wanted)


def name_it(alias: str, path: str) -> str:
    """Return advice on how to make a worker import a task's module."""
    module = path.rpartition(".")[0]
    return (
        f'Name its module in TASKS["{alias}"]["OPTIONS"]["MODULES"], as in '
        f'["{module[:200]}"] beside those of your other tasks, or move it into an '
        f"installed app."
    )


def arguments(body: object) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments in a task's body. Raises DecodeError if the body has another
    form."""
    if isinstance(body, dict):
        args, kwargs = body.get("args"), body.get("kwargs")
        if isinstance(args, list) and isinstance(kwargs, dict):
            return args, kwargs
    raise DecodeError("invalid_body", 'no {"args": […], "kwargs": {…}}')


def attempts(message_id: uuid.UUID, stage: Stage) -> list[Attempt]:
    """Return the failed attempts to run a task, in order."""
    rows = Attempt.objects.using(stage.definition.using)
    return list(rows.filter(message_id=message_id, stage=stage.name).order_by("pk"))


def workers_of(tried: Sequence[Attempt], count: int) -> list[str]:
    """Return the names of the workers of the first `count` attempts. The name is "" for
    a worker that was lost or that is still running."""
    known = {one.number: one.worker for one in tried}
    return [known.get(number, "") for number in range(1, count + 1)]


def error_of(attempt: Attempt) -> TaskError:
    """Return the `TaskError` of the tasks framework for a failed attempt."""
    path = attempt.exception.partition("\n")[0].partition(": ")[0]
    if "." not in path:
        path = f"builtins.{path}"
    return TaskError(exception_class_path=path, traceback=attempt.traceback)


T = TypeVar("T")

#: The message and the error of the last failed task in this thread, for the log.
_failed = threading.local()


@dataclass(frozen=True)
class Handler:
    """The handler of a stage that runs the tasks of one queue."""

    backend: Backend
    transactional: bool

    def __call__(self, message: Message) -> None:
        """Run one task."""
        scope = current_scope()
        worker = "" if scope is None else scope.worker
        stage = self.backend.stage(message.destination)
        _failed.last = None
        try:
            if self.transactional:
                self._run(message, stage, worker)
            else:
                # What it sends in its own blocks belongs to those, not to the broker's
                # transaction.
                enter_scope(None)
                self._run_without(message, stage, worker)
        except BaseException as error:
            _failed.last = message.id, error
            raise
        finally:
            enter_scope(scope)

    def _run(self, message: Message, stage: Stage, worker: str) -> None:
        using = stage.definition.using
        tried = []
        if message.delivery_attempt > 1:
            tried = attempts(message.id, stage)
        workers = [*workers_of(tried, message.delivery_attempt - 1), worker]
        result = self._begin(message, workers, tried)
        value = call(result)
        TaskRun.objects.db_manager(using).finish(message.id, workers, value)

        def tell() -> None:
            self._finished(result, value)

        transaction.on_commit(tell, using=using, robust=True)

    def _run_without(self, message: Message, stage: Stage, worker: str) -> None:
        runs = TaskRun.objects.db_manager(stage.definition.using)
        run = _query(runs.db, lambda: runs.begin(message.id, worker))
        if run is None:
            return
        workers = run.workers
        tried = attempts(message.id, stage) if len(workers) > 1 else []
        result = self._begin(message, workers, tried)
        value = call(result)
        _query(runs.db, lambda: runs.finish(message.id, workers, value))
        self._finished(result, value)

    def _begin(self, message: Message, workers: list[str], tried: Any) -> AnyResult:
        args, kwargs = arguments(message.body)
        now = timezone.now()
        result: AnyResult = TaskResult(
            task=task_of(self.backend, message.headers),
            id=str(message.id),
            status=TaskResultStatus.RUNNING,
            enqueued_at=message.created_at,
            started_at=now,
            last_attempted_at=now,
            finished_at=None,
            args=args,
            kwargs=kwargs,
            backend=self.backend.alias,
            errors=[error_of(one) for one in tried],
            worker_ids=workers,
        )
        task_started.send_robust(type(self.backend), task_result=result)
        return result

    def _finished(self, result: AnyResult, value: Any) -> None:
        object.__setattr__(result, "finished_at", timezone.now())
        object.__setattr__(result, "status", TaskResultStatus.SUCCESSFUL)
        object.__setattr__(result, "_return_value", value)
        task_finished.send_robust(type(self.backend), task_result=result)


def _query(using: str, query: Callable[[], T]) -> T:
    """Query the database before or after a task. If the idle connection was closed,
    query again on a new connection.

    Raises BrokerUnavailable if the database does not answer or refuses the query. The
    broker then delivers the task's message again. No attempt is counted for a refusal
    that may soon end, such as a lock's time-out. A trigger, a constraint or a missing
    privilege may refuse for ever, so its refusal counts as an attempt.
    """
    try:
        return ask(using, query)
    except BrokerUnavailable:
        return ask(using, query)


def call(result: AnyResult) -> Any:
    """Call the function of a task, and return its return value as a JSON value. Raises
    ValueError for NaN, infinities, and text that PostgreSQL cannot store."""
    task: AnyTask = result.task
    args: list[Any] = [TaskContext(task_result=result)] if task.takes_context else []
    value = normalize_json(task.call(*args, *result.args, **result.kwargs))
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise ValueError(
            f"The task {task.module_path} returned NaN or an infinity, or a value "
            "that contains one, and JSON has neither. Let it return None or text "
            "instead."
        ) from None
    if not serializers.is_storable(value):
        raise ValueError(
            f"The task {task.module_path} returned text with a NUL or half of a "
            "surrogate pair, which PostgreSQL cannot store."
        )
    return value


def tell_failed(backend: Backend, result: AnyResult, error: str) -> None:
    """Send the signal `task_finished` for a task that has failed for good. `error` is
    the text of its error."""
    last = getattr(_failed, "last", None)
    _failed.last = None
    raised: BaseException = TxmsgError(error)
    if last is not None and str(last[0]) == result.id:
        raised = last[1]
    try:
        raise raised
    except BaseException:
        # Like the framework: receivers find the error by sys.exc_info().
        task_finished.send_robust(type(backend), task_result=result)
