"""Hop 8 for a task: calls the task's function and stores the return value.

In mode "outbox", the stage's transaction contains the task's work and the return value.
In mode "none", the task runs without a transaction, and runs again if its worker dies
before the end. In both modes, a task that has finished does not run again.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from django.db import transaction
from django.utils import timezone

from ..brokers.database import ask
from ..envelope import serializers
from ..envelope.message import Message
from ..errors import BrokerUnavailable, TxmsgError
from ..models import TaskRun
from ..sending.scope import current_scope, enter_scope
from ..stages import Stage
from .framework import (
    AnyResult,
    AnyTask,
    TaskContext,
    TaskResult,
    TaskResultStatus,
    normalize_json,
    task_finished,
    task_started,
)
from .results import Backend, arguments, attempts, error_of, task_of, workers_of

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
                try:
                    self._run_without(message, stage, worker)
                finally:
                    enter_scope(scope)
        except BaseException as error:
            _failed.last = message.id, error
            raise

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

    Raises BrokerUnavailable if the database does not answer. The broker then delivers
    the task's message again, and no attempt is counted.
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
