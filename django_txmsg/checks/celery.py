"""Checks for settings of Celery with which a task can be lost or executed twice."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from django.core.checks import CheckMessage, Error, Warning

from .. import brokers, stages

#: Transports that keep messages in the memory of one process.
_NOWHERE = ("memory", "memory+socket")


def check() -> Iterator[CheckMessage]:
    """Check each app that a celery:// URL names."""
    celerys = brokers.of_kind("celery")
    for alias, broker in celerys.items():
        where, app = f'TXMSG["BROKERS"]["{alias}"]', broker.app
        for message, hint in (*_lossy(app), *_once(app)):
            yield Error(f"{where}: {message}", hint=hint, id="txmsg.E020")
        yield from _plain(where, app)
    yield from _consumed(celerys)


def _lossy(app: Any) -> Iterator[tuple[str, str]]:
    settings = app.conf
    backend = str(settings.result_backend or "")
    if backend.startswith(("rpc", "amqp")):
        yield (
            f"the result backend {backend.partition('://')[0]}:// sends results to "
            "the process that sent the task, and that is the relay.",
            "Use a backend that stores results, such as Redis or a database, or none.",
        )
    if settings.task_protocol != 2:
        yield (
            f"task_protocol is {settings.task_protocol}, but messages are stored in "
            f"the form of protocol 2.",
            "Leave task_protocol at 2.",
        )
    transport = str(settings.broker_url or "").partition("://")[0]
    if transport in _NOWHERE and not settings.task_always_eager:
        yield (
            f"the transport {transport}:// keeps tasks in the memory of one process.",
            "Set broker_url to a broker that the workers share.",
        )
    if settings.task_default_delivery_mode in ("transient", 1):
        yield (
            "task_default_delivery_mode is transient: the broker forgets tasks when it "
            "is restarted, after the relay has its confirm for them.",
            'Leave task_default_delivery_mode at "persistent".',
        )


def _once(app: Any) -> Iterator[tuple[str, str]]:
    from ..celery import OnceTask

    # Tasks found by autodiscovery log the same in their worker.
    for _, task in sorted(app.tasks.items()):
        if isinstance(task, OnceTask):
            for careless in task.careless():
                yield careless, "Leave it to OnceTask."


def _plain(where: str, app: Any) -> Iterator[CheckMessage]:
    from ..celery import Celery, TransactionalTask

    lossy = [
        name
        for name, task in sorted(app.tasks.items())
        if hasattr(task, "delay_on_commit") and not isinstance(task, TransactionalTask)
    ]
    if isinstance(app, Celery) and lossy:
        yield Warning(
            f"{where}: delay_on_commit() of {', '.join(lossy[:5])} is Celery's own, "
            f"and loses the task if the process dies right after its commit.",
            hint="Give the task, or its class, django_txmsg.celery.TransactionalTask "
            "as its base.",
            id="txmsg.W020",
        )
    if not isinstance(app, Celery) and not issubclass(app.Task, TransactionalTask):
        yield Warning(
            f"{where}: the app is a plain Celery app, and so are its tasks: a call "
            f"inside a transaction goes to the broker at once, not through the outbox.",
            hint="Write `from django_txmsg.celery import Celery`, or give the app "
            'task_cls="django_txmsg.celery:TransactionalTask".',
            id="txmsg.W020",
        )


def _consumed(celerys: Collection[str]) -> Iterator[CheckMessage]:
    for stage in stages.all_stages():
        if stage.broker in celerys:
            yield Error(
                f"Stage {stage.name!r} consumes from the broker {stage.broker!r}, "
                f"whose messages are tasks for Celery's workers.",
                hint="Give the stage another broker, or make it a Celery task.",
                id="txmsg.E021",
            )
    if "default" in celerys:
        yield Error(
            'TXMSG["BROKERS"]["default"] is a Celery app\'s broker, which carries '
            "tasks only: messages and control messages have nowhere to go.",
            hint='Name it "celery", and leave "default" at database:// if there is no '
            "other broker.",
            id="txmsg.E021",
        )
