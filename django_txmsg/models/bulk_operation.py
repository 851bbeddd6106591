"""A bulk operation on dead letters or on runs of flows. Consumers execute the operation
batch by batch.

States: `running ⇄ paused`, then `done | cancelled`. The cursor advances in the
transaction of its batch, so a crash neither loses nor doubles a message.
"""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now


class BulkKind(models.TextChoices):
    """What the operation does to each dead letter, or to each run of a flow."""

    REDELIVER = "redeliver", "redeliver"
    DISCARD = "discard", "discard"
    RESTORE = "restore", "restore"
    GO_BACK = "go-back", "go back"


#: What an operation on dead letters has done, by its kind.
PAST = {"redeliver": "Redelivered", "discard": "Discarded", "restore": "Restored"}


class BulkState(models.TextChoices):
    """The state of the operation."""

    RUNNING = "running", "running"
    PAUSED = "paused", "paused"
    CANCELLED = "cancelled", "cancelled"
    DONE = "done", "done"


class BulkManager(models.Manager):  # type: ignore[type-arg]  # not generic at run time
    """The changes of state that an operator can request. Each method returns whether
    the state has changed."""

    def pause(self, pk: int) -> bool:
        """Pause the operation after its current batch."""
        return self._move(pk, (BulkState.RUNNING,), state=BulkState.PAUSED)

    def resume(self, pk: int) -> bool:
        """Continue the operation with the batch after its last executed batch. If the
        operation stopped itself because messages died again, it now continues with all
        remaining dead letters and never stops itself again."""
        stopped = ~Q(stopped_why="")
        self.filter(stopped, pk=pk, state=BulkState.PAUSED).update(
            tolerates=None, watched=[], stopped_why=""
        )
        return self._move(
            pk, (BulkState.PAUSED,), state=BulkState.RUNNING, due_at=Now()
        )

    def cancel(self, pk: int) -> bool:
        """End the operation now. What the operation has already done is not undone."""
        return self._move(
            pk,
            (BulkState.RUNNING, BulkState.PAUSED),
            state=BulkState.CANCELLED,
            finished_at=Now(),
        )

    def _move(self, pk: int, states: tuple[str, ...], **values: object) -> bool:
        return bool(
            self.filter(pk=pk, state__in=states).update(changed_at=Now(), **values)
        )


class BulkOperation(models.Model):
    """An action on all dead letters, or on all runs, that match a filter.

    What matches only since after the request is excluded: dead letters that were buried
    later, and runs that reached the step later.
    """

    kind = models.CharField(max_length=16, choices=BulkKind.choices)
    filter = models.JSONField(default=dict)
    force = models.BooleanField(default=False)
    by = models.CharField(max_length=255, default="")
    why = models.CharField(max_length=255, default="")
    #: Messages a second at most; empty: no limit.
    rate = models.FloatField(null=True)
    #: If given, one message goes first, and the operation stops itself when more than
    #: this many have died again.
    tolerates = models.PositiveIntegerField(null=True)
    #: The dead letters whose outcome the next batch waits for.
    watched = models.JSONField(
        default=list, db_default=models.Value([], output_field=models.JSONField())
    )
    stopped_why = models.TextField(default="", db_default="")
    total = models.PositiveIntegerField(default=0)
    done = models.PositiveIntegerField(default=0)
    skipped = models.PositiveIntegerField(default=0)
    #: The first skipped ones, with the reason.
    skipped_why = models.JSONField(default=dict)
    cursor = models.BigIntegerField(default=0)
    up_to = models.BigIntegerField(default=0)
    batch_size = models.PositiveIntegerField(default=100)
    state = models.CharField(
        max_length=16, choices=BulkState.choices, default=BulkState.RUNNING
    )
    created_at = models.DateTimeField(db_default=Now())
    #: The earliest time of the next batch.
    due_at = models.DateTimeField(db_default=Now())
    changed_at = models.DateTimeField(db_default=Now())
    finished_at = models.DateTimeField(null=True)
    last_error = models.TextField(default="")

    objects = BulkManager()

    class Meta:
        indexes = [
            models.Index(
                fields=["due_at"], condition=Q(state="running"), name="txmsg_bulk_due"
            )
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.subject}"

    @property
    def subject(self) -> str:
        """The number of rows with their noun, for example "12 dead letters" or "1
        run"."""
        return f"{self.total:,} {self.noun}{'s' * (self.total != 1)}"

    @property
    def result(self) -> str:
        """What an operation on dead letters has done, as a sentence."""
        return f"{PAST[self.kind]} {self.done:,} message{'s' * (self.done != 1)}."

    @property
    def forced(self) -> str:
        """What `force` adds to the description of the operation."""
        if not self.force:
            return ""
        redelivers = self.kind == BulkKind.REDELIVER
        return ", even if processed in the meantime" if redelivers else ", with force"

    @property
    def noun(self) -> str:
        """The kind of row that the operation changes: "dead letter" or "run"."""
        return "run" if self.kind == BulkKind.GO_BACK else "dead letter"
