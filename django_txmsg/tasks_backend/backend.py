"""The backend: `enqueue()` stores a task's message, and `get_result()` returns the
task's result. Each queue is a stage, which `manage.py consume` runs."""

from __future__ import annotations

import datetime as dt
import logging
import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from django.apps import apps
from django.db import connections, router, transaction

from .. import conf, signals, wire
from ..brokers import find_broker
from ..django_internals import in_block
from ..envelope.message import MAX_NAME_LENGTH, Message
from ..models import OutboxMessage
from ..models.fields import clock
from ..monitoring import databases
from ..sending.outbox import send_message
from ..sending.scope import current_scope, enter_scope
from ..stages import Stage
from . import runs
from .framework import (
    DEFAULT_TASK_PRIORITY,
    DEFAULT_TASK_QUEUE_NAME,
    AnyResult,
    AnyTask,
    BaseTaskBackend,
    InvalidTask,
    TaskResult,
    TaskResultDoesNotExist,
    TaskResultStatus,
    task_backends,
    task_enqueued,
)
from .runs import name_it, result_of


@dataclass(frozen=True)
class Options:
    """The OPTIONS of a backend in the TASKS setting."""

    #: "outbox": a task and its result commit together, once. "none": a task runs
    #: outside of any transaction, for minutes if necessary, and again if its worker is
    #: lost.
    TRANSACTION: Literal["outbox", "none"] = "outbox"
    #: How often a failed task is tried again, with the pauses of TXMSG["REDELIVERY"],
    #: before it is FAILED.
    MAX_REDELIVERIES: int = 0
    #: How many tasks of a queue one process runs at the same time.
    CONCURRENCY: int = 1
    #: How many tasks of a queue share one transaction, each in a savepoint: a commit
    #: for all, and a task that fails rolls back alone. Needs TRANSACTION "outbox".
    BATCH: int = 1
    #: The alias in TXMSG["BROKERS"] that tasks travel through.
    BROKER: str = "default"
    #: The alias of the database with tasks and results; None: the outbox's.
    USING: str | None = None
    #: The modules and packages of the tasks that may be enqueued and run here; a worker
    #: imports them. None: any package that this process has imported.
    MODULES: tuple[str, ...] | None = None


def problems(given: object, path: str) -> Iterator[conf.Problem]:
    """Yield the errors of a backend's OPTIONS."""
    yield from conf.find(Options, given, path)
    if not isinstance(given, Mapping) or given.get("TRANSACTION") != "none":
        return
    if given.get("BATCH", 1) != 1:
        why = 'needs TRANSACTION "outbox": without one, nothing can be shared.'
        yield conf.Problem(f'{path}["BATCH"]', why)


log = logging.getLogger("django_txmsg.tasks")

#: Packages that a warning has named.
_warned: set[str] = set()
_ALIAS = re.compile(r"[A-Za-z0-9_\-]+")
_NAME = re.compile(r"[A-Za-z0-9_.\-]+")


class TransactionalBackend(BaseTaskBackend):
    """Enqueues a task if and only if the transaction around the call commits.

    QUEUES means the same as in other backends: an empty list allows any name. For
    OPTIONS see the class `Options`.
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = True

    @property
    def supports_priority(self) -> bool:  # type: ignore[override]  # by the settings
        """Whether tasks of higher priority run first. This needs the embedded
        broker."""
        broker = find_broker(self._given.BROKER)
        return broker is not None and broker.kind == "database"

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        # `manage.py check` reports invalid options.
        wrong = {one.path for one in problems(self.options, "")}
        given = {} if "" in wrong else self.options
        sound = {name: given[name] for name in given if f'["{name}"]' not in wrong}
        self._given = Options(**sound)

    def enqueue(  # type: ignore[override]  # of any task
        self, task: AnyTask, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> AnyResult:
        """Store a task in the open transaction. If no transaction is open, store the
        task in a new transaction.

        Raises InvalidMessage if the arguments are too large for a message. Raises
        InvalidTask if the task's module is not in MODULES.
        """
        self.validate_task(task)
        if not self.runs(task.module_path):
            raise InvalidTask(
                f"{task.module_path!r} is in none of the modules that "
                f'TASKS["{self.alias}"]["OPTIONS"]["MODULES"] names.'
            )
        self._warn_of(task.module_path)
        result: AnyResult = TaskResult(
            task=task,
            id="",
            status=TaskResultStatus.READY,
            enqueued_at=None,
            started_at=None,
            last_attempted_at=None,
            finished_at=None,
            args=list(args),
            kwargs=dict(kwargs),
            backend=self.alias,
            errors=[],
            worker_ids=[],
        )
        message = self._store(task, {"args": result.args, "kwargs": result.kwargs})
        object.__setattr__(result, "id", str(message.id))
        object.__setattr__(result, "enqueued_at", message.created_at)
        task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> AnyResult:
        """Return the result of a task. Imports the task's module if necessary.

        Raises TaskResultDoesNotExist if the outbox has no row of the task, for example
        because the row was pruned.
        """
        return self.find_result(result_id, trusted=True)

    def find_result(self, result_id: str, *, trusted: bool) -> AnyResult:
        """Return the result of a stored task. If `trusted`, the task's module may be
        imported. Raises TaskResultDoesNotExist."""
        try:
            message_id = uuid.UUID(str(result_id))
        except ValueError:
            raise TaskResultDoesNotExist(result_id) from None
        for alias in databases.with_tables():
            rows = OutboxMessage.objects.using(alias).filter(message_id=message_id)
            # An operator may have resent one that the broker had refused.
            row = rows.order_by("pk").last()
            if row is not None and self._is_mine(row):
                return result_of(self, row, trusted=trusted)
        raise TaskResultDoesNotExist(result_id)

    def runs(self, path: str) -> bool:
        """Return whether this backend accepts the task with this dotted path."""
        return self._given.MODULES is None or self.imports(path)

    def imports(self, path: str) -> bool:
        """Return whether MODULES names the module of this task, so that this process
        may import it."""
        return any(path.startswith(f"{one}.") for one in self._given.MODULES or ())

    def _warn_of(self, path: str) -> None:
        """Log a warning if workers might not have imported the module of an enqueued
        task. Warn once for each package."""
        package = path.partition(".")[0]
        if package in _warned or self.imports(path) or package in _of_project():
            return
        _warned.add(package)
        log.warning(
            "The task %r is in no installed app. A worker that has not imported %r "
            "will fail it. %s", path, package, name_it(self.alias, path),
        )  # fmt: skip

    def stages(self) -> Iterator[Stage]:
        """Yield the stage of each queue."""
        for queue in sorted(self.queues) or [DEFAULT_TASK_QUEUE_NAME]:
            yield self.stage(self.destination(queue))

    def destination(self, queue: str) -> str:
        """Return the destination of a queue's tasks. If any queue name is allowed, all
        queues have the same destination."""
        base = _base(self.alias)
        return f"{base}.{queue}" if self.queues else base

    def problems(self) -> Iterator[conf.Problem]:
        """Yield the errors in the settings of the backend."""
        where = f'TASKS["{self.alias}"]'
        yield from problems(self.options, f'{where}["OPTIONS"]')
        for name in (self.alias, *sorted(map(str, self.queues))):
            sound = _ALIAS if name is self.alias else _NAME
            whole = len(self.destination(name))
            if not sound.fullmatch(name) or whole > MAX_NAME_LENGTH:
                yield conf.Problem(
                    where,
                    f"has {name[:40]!r} as a name: use letters, digits, '-' and '_', "
                    f"and '.' in a queue's, since it becomes part of a destination.",
                )

    def stage(self, destination: str) -> Stage:
        """Return the stage that runs the tasks of one queue."""
        given = self._given
        outbox = given.TRANSACTION == "outbox"
        stage = Stage(
            name=destination,
            destination=destination,
            handler=runs.Handler(self, outbox),
            transaction="outbox" if outbox else "broker_only",
            using=given.USING or router.db_for_write(OutboxMessage),
            concurrency=given.CONCURRENCY,
            batch=given.BATCH,
            broker=given.BROKER,
        )
        policy = replace(
            stage.policy,
            max_redeliveries=given.MAX_REDELIVERIES,
            lost_workers=conf.get().REDELIVERY.MAX_REDELIVERIES,
            # Only a row that is parked in the inbox shows that the task waits.
            mode="non_blocking",
        )
        return replace(stage, redelivery=policy)

    def _is_mine(self, row: OutboxMessage) -> bool:
        return wire.TASK in row.headers and _belongs(row.destination, self.alias)

    def _store(self, task: AnyTask, body: dict[str, Any]) -> Message:
        scope = current_scope()
        enlists = scope is not None and scope.enlist is not None
        inherited = scope.using if scope is not None and not enlists else None
        alias = self._given.USING or inherited or router.db_for_write(OutboxMessage)
        block: AbstractContextManager[Any] = nullcontext()
        if not in_block(connections[alias]):
            block = transaction.atomic(using=alias)
        if scope is not None and enlists:
            # The broker's transaction is not the one with the caller's data.
            enter_scope(scope.apart())
        try:
            with block:
                return send_message(
                    self.destination(task.queue_name),
                    body,
                    headers=_headers(task),
                    delay=_delay(task.run_after, alias),
                    using=alias,
                    broker=self._given.BROKER,
                )
        finally:
            if enlists:
                enter_scope(scope)


def _of_project() -> set[str]:
    """Return the packages that each process of the project imports: those of the
    installed apps and of the settings."""
    names = [app.name for app in apps.get_app_configs()]
    names.append(os.environ.get("DJANGO_SETTINGS_MODULE", ""))
    return {name.partition(".")[0] for name in names}


def _base(alias: str) -> str:
    return wire.task_destination(conf.get().SERVICE, alias)


def _belongs(destination: str, alias: str) -> bool:
    return destination == _base(alias) or destination.startswith(f"{_base(alias)}.")


def _tell_failed(*, id: Any, destination: str, error: str, **_: object) -> None:
    for alias in task_backends.settings:
        backend = task_backends[alias] if _belongs(destination, alias) else None
        if isinstance(backend, TransactionalBackend):
            with suppress(TaskResultDoesNotExist):
                found = backend.find_result(id, trusted=False)
                runs.tell_failed(backend, found, error)


signals.message_buried.connect(_tell_failed, dispatch_uid="django_txmsg.tasks_backend")


def _headers(task: AnyTask) -> dict[str, str]:
    headers = {wire.TASK: task.module_path}
    if task.queue_name != DEFAULT_TASK_QUEUE_NAME:
        headers[wire.TASK_QUEUE] = task.queue_name
    if task.priority != DEFAULT_TASK_PRIORITY:
        headers[wire.TASK_PRIORITY] = str(int(task.priority))
    if task.run_after is not None:
        headers[wire.TASK_RUN_AFTER] = wire.format_instant(task.run_after)
    return headers


def _delay(run_after: dt.datetime | None, alias: str) -> dt.timedelta | None:
    if run_after is None:
        return None
    return max(run_after - clock(alias), dt.timedelta())
