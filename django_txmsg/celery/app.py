"""The app: every way to call a task ends in `send_task()`, even for tasks that are not
registered here."""

from __future__ import annotations

from typing import Any

import celery

from .calling import call, stands_in


class Celery(celery.Celery):  # type: ignore[misc]  # published without type hints
    """A Celery app whose tasks, called inside a transaction, leave with its commit.

    Outside of a transaction they go to the broker at once, as with Celery, unless
    TXMSG["CELERY"]["REQUIRE_ATOMIC"] is set. Its tasks are `TransactionalTask`s, unless
    `task_cls` names another class.
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
        """Like Celery's, but store a row of the outbox if a transaction is open.

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
