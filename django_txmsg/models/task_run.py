"""The result of a task: its return value, and the workers that ran it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from django.db import models
from django.db.models.functions import Now


class TaskRunManager(models.Manager):  # type: ignore[type-arg]  # not generic at run time
    """Records when a task begins, and what it returns."""

    def begin(self, message_id: uuid.UUID, worker: str) -> TaskRun | None:
        """Record that `worker` begins a task. Call this outside any transaction.
        Returns the run, or None if the task has finished already."""
        run: TaskRun
        run, made = self.get_or_create(
            message_id=message_id, defaults={"workers": [worker]}
        )
        if run.finished_at is not None:
            return None
        if not made:
            run.workers = [*run.workers, worker]
            run.save(using=self.db, update_fields=["workers"])
        return run

    def finish(
        self, message_id: uuid.UUID, workers: Sequence[str], result: Any
    ) -> None:
        """Store a task's return value. If a transaction is open, the value commits with
        the task's work."""
        values = {"workers": list(workers), "result": result, "finished_at": Now()}
        # It exists already if an operator has the task run again by force.
        self.bulk_create(
            [self.model(message_id=message_id, **values)],
            update_conflicts=True,
            unique_fields=["message_id"],
            update_fields=values,
        )


class TaskRun(models.Model):
    """A run of a task of django.tasks. `finished_at` is set when the task succeeds.
    Failures are not recorded here, but in the inbox row, the message's attempts and its
    dead letter."""

    message_id = models.UUIDField(unique=True)
    workers = models.JSONField(default=list)
    result = models.JSONField(null=True)
    created_at = models.DateTimeField(db_default=Now())
    finished_at = models.DateTimeField(null=True)

    objects = TaskRunManager()

    def __str__(self) -> str:
        return str(self.message_id)
