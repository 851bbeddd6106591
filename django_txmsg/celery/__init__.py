"""Celery through the outbox: import `Celery` from here in place of `from celery import
Celery`.

`Celery` stores tasks that are called inside a transaction as rows of the outbox. The
relay sends these rows to Celery's own broker. `TransactionalTask` does the same for
apps that keep Celery's class. An `OnceTask` takes effect only once, even if its message
is delivered several times. See docs/how-to/celery-outbox.md.

Every call of a task ends in the app's `send_task()`, even if the task is not registered
in this process.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from ..lazy_imports import needs

with needs("django_txmsg.celery", "celery", "celery"):
    import celery

from celery.contrib.django.task import DjangoTask
from celery.exceptions import Ignore, Reject, Retry

from .calling import call, refuse_another_broker, requires, stands_in, stores

__all__ = ["Celery", "OnceTask", "TransactionalTask"]

log = logging.getLogger("django_txmsg.celery")


class TransactionalTask(DjangoTask):  # type: ignore[misc]  # published without type hints
    """A task whose calls inside a transaction are sent only if the transaction commits.

    If an app must be an instance of `celery.Celery` itself, pass
    `task_cls="django_txmsg.celery:TransactionalTask"` to the app. In such an app,
    `send_task()` and signatures of unregistered tasks bypass the outbox.
    """

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        producer: Any = None,
        *rest: Any,
        using: str | None = None,
        connection: Any = None,
        **options: Any,
    ) -> Any:
        """Call the task as in Celery. If a transaction is open, store the call in the
        outbox instead of sending it.

        `using` names the transaction's database. Raises TransactionRequired and
        DuplicateMessage like `send_message()`.
        """
        usual = super().apply_async

        def send(task_id: str | None, producer: Any, **more: Any) -> Any:
            given = {**options, **more}
            if connection is not None and not stands_in(producer):
                given["connection"] = connection
            return usual(args, kwargs, task_id, producer, *rest, **given)

        app = self._get_app()
        if app.conf.task_always_eager:
            return send(task_id, producer)
        # The app's send_task() chooses the database again.
        again = {"using": using} if isinstance(app, Celery) else {}
        return call(
            app,
            self.name,
            (args, kwargs),
            partial(send, **again),
            task_id=task_id,
            producer=producer,
            leads=(connection, options.get("publisher")),
            using=using,
            nesting=options.get("replaced_task_nesting", 0),
        )

    def delay_on_commit(self, *args: Any, **kwargs: Any) -> None:
        """Call the task. Its message is stored in the outbox, and sent after the commit
        even if the process dies."""
        self.apply_async_on_commit(args, kwargs)

    def apply_async_on_commit(self, *args: Any, **kwargs: Any) -> None:
        """Call the task like `delay_on_commit()`, but with the arguments of
        `apply_async()`. If no row can be stored (in another database's transaction, or
        with `task_always_eager`), Celery's own method runs."""
        eager = self._get_app().conf.task_always_eager
        if eager or not (stores(kwargs.get("using")) or requires(self._get_app())):
            super().apply_async_on_commit(*args, **kwargs)
        else:
            self.apply_async(*args, **kwargs)


class OnceTask(TransactionalTask):
    """A task whose work in the database takes effect only once.

    One transaction contains the work of the task, the record that the task is done, and
    the tasks and messages that it sends. `using` names the transaction's database, by
    default the router's database. A redelivery of the task returns the stored result,
    so that a chain continues. The task must be fast, because the transaction is open
    while the task runs.
    """

    #: Acknowledged after the commit, so that a worker that dies leaves the message with
    #: the broker.
    acks_late = True
    reject_on_worker_lost = True
    #: Set here, so that task_retry_on_worker_lost of the app does not apply.
    retry_on_worker_lost = False
    Request = "django_txmsg.celery.request:OnceRequest"
    using: str | None = None

    @classmethod
    def careless(cls) -> list[str]:
        """Return a text for each option that could cause the loss of the task, or a
        false report of its failure."""
        found = [
            f"the OnceTask {cls.name!r} has {option}=False: if its worker dies, the "
            "task is lost."
            for option in ("acks_late", "reject_on_worker_lost")
            if not getattr(cls, option)
        ]
        if cls.retry_on_worker_lost:
            found.append(
                f"the OnceTask {cls.name!r} has retry_on_worker_lost=True: if its "
                "worker dies after the commit of the last retry, Celery reports the "
                "task as failed."
            )
        return found

    @classmethod
    def on_bound(cls, app: Any) -> None:
        """Log the texts of careless(). Celery calls this when it registers the task."""
        super().on_bound(app)
        for careless in cls.careless():
            log.error("%s", careless)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.request.called_directly:
            return super().__call__(*args, **kwargs)
        from .following import report_failure
        from .once import run_once

        try:
            return run_once(self, args, kwargs)
        except (Ignore, Reject, Retry):
            raise
        except Exception as error:
            if not self.request.is_eager:
                report_failure(self, error)
            raise

    def retry(
        self,
        args: Any = None,
        kwargs: Any = None,
        exc: Any = None,
        throw: bool = True,
        *rest: Any,
        **options: Any,
    ) -> Any:
        """Retry as in Celery, but raise Retry even with `throw=False`, so that the work
        is rolled back before the retry. Raises InvalidMessage if the caller passes a
        connection to another broker than the app's."""
        leads = (options.get(name) for name in ("connection", "producer", "publisher"))
        refuse_another_broker(self._get_app(), self.name, *leads)
        return super().retry(args, kwargs, exc, True, *rest, **options)


class Celery(celery.Celery):  # type: ignore[misc]  # published without type hints
    """A Celery app. Tasks that are called inside a transaction are sent after its
    commit.

    Outside a transaction, tasks are sent to the broker immediately, as in Celery. With
    TXMSG["CELERY"]["REQUIRE_ATOMIC"], such a call raises an error. Tasks of this app
    are `TransactionalTask`s, unless `task_cls` names another class.
    """

    def __init__(self, *args: Any, task_cls: Any = None, **options: Any) -> None:
        task_cls = task_cls or "django_txmsg.celery:TransactionalTask"
        super().__init__(*args, task_cls=task_cls, **options)

    def send_task(
        self,
        name: str,
        args: Any = None,
        kwargs: Any = None,
        countdown: float | None = None,
        eta: Any = None,
        task_id: str | None = None,
        producer: Any = None,
        connection: Any = None,
        *rest: Any,
        **options: Any,
    ) -> Any:
        """Send a task as in Celery. If a transaction is open, store the task's message
        in the outbox instead of sending it.

        `using` names the transaction's database. Raises TransactionRequired and
        DuplicateMessage like `send_message()`.
        """
        usual = super().send_task

        def send(task_id: str | None, producer: Any, **more: Any) -> Any:
            own = None if stands_in(producer) else connection
            given = {**options, **more}
            known = (name, args, kwargs, countdown, eta, task_id, producer, own)
            return usual(*known, *rest, **given)

        return call(
            self,
            name,
            (args, kwargs),
            send,
            task_id=task_id,
            producer=producer,
            leads=(connection, options.get("publisher")),
            using=options.pop("using", None),
            nesting=options.get("replaced_task_nesting", 0),
        )
