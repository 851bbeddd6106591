"""Requests whose answers together continue a run: the requests of a `gather()` in a
flow, or of a flow batch.

Each answer is written to its own row, and no lock is shared, so answers do not wait for
each other. Two checks find out whether all requests are answered. The transaction that
writes an answer calls `may_have_ended()`, which also counts the answers that other
transactions are still writing. If that returns True, a later transaction calls
`has_ended()`, which first waits for those other transactions.
"""

from __future__ import annotations

import uuid
from typing import NamedTuple

from django.db import models, transaction
from django.db.models import Count, Q
from django.db.models.functions import Now

from .run import Run

# One request of a batch, and its answer.


class Branch(models.Model):
    """One request of a batch. `number` counts from 0 in the order of the requests."""

    batch = models.ForeignKey(
        "Batch", models.CASCADE, related_name="branches", db_index=False
    )
    number = models.PositiveIntegerField()
    destination = models.CharField(max_length=255)
    request_id = models.UUIDField()
    answer = models.BinaryField(default=b"")
    content_type = models.CharField(max_length=255, default="")
    answer_type = models.CharField(max_length=255, default="")
    failed = models.BooleanField(default=False)
    #: The batch has ended without its answer.
    left = models.BooleanField(default=False)
    answered_at = models.DateTimeField(null=True)

    class Meta:
        verbose_name = "branch of a batch"
        verbose_name_plural = "branches of batches"
        constraints = [
            models.UniqueConstraint(
                fields=["batch", "number"], name="txmsg_branch_number"
            )
        ]
        indexes = [
            models.Index(
                fields=["batch", "number"],
                condition=Q(answered_at__isnull=True),
                name="txmsg_branch_open",
            ),
            models.Index(
                fields=["batch"], condition=Q(failed=True), name="txmsg_branch_failed"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.number} to {self.destination}"


#: More transactions than ever write answers of one batch at the same time.
CONCURRENT = 1000

_OPEN = Q(answered_at=None)
_FAILED = Q(failed=True)
_LEFT = Q(left=True)


class Progress(NamedTuple):
    """How many branches a batch has, and how many of them have each outcome."""

    total: int
    #: Those with an answer.
    answered: int
    #: Those whose request was given up, or whose flow failed by a deadline or a cancel.
    failed: int
    #: Those without an answer when the batch ended.
    left: int

    @property
    def open(self) -> int:
        """The number of branches that have no outcome yet."""
        return self.total - self.answered - self.failed - self.left


class Batch(models.Model):
    """A group of requests whose run waits until the whole group has ended."""

    run = models.ForeignKey(Run, models.CASCADE, related_name="batches")
    #: The turn of its run until the end.
    turn = models.UUIDField(unique=True)
    total = models.PositiveIntegerField()
    #: How many answers end it.
    enough = models.PositiveIntegerField()
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        verbose_name_plural = "batches"

    def __str__(self) -> str:
        return f"{self.total} requests of {self.run}"

    @property
    def progress(self) -> Progress:
        """Count the branches by outcome (answered, failed, left without an answer), in
        one query."""
        found = self.rows().aggregate(
            answered=Count("pk", filter=~_OPEN & ~_FAILED & ~_LEFT),
            failed=Count("pk", filter=_FAILED),
            left=Count("pk", filter=_LEFT),
        )
        return Progress(self.total, **found)

    def rows(self) -> models.QuerySet[Branch]:
        """Return a queryset of the branches, in the database from which the batch was
        read."""
        return Branch.objects.using(self._state.db).filter(batch=self)

    def record(
        self,
        number: int,
        answer: bytes,
        content_type: str,
        answer_type: str,
        *,
        failed: bool,
    ) -> uuid.UUID | None:
        """Write a branch's answer. Returns the id of the branch's request, or None if
        the branch has an answer already or the batch has ended."""
        branch = self.rows().filter(number=number)
        written = branch.filter(_OPEN).update(
            answer=answer,
            content_type=content_type,
            answer_type=answer_type,
            failed=failed,
            answered_at=Now(),
        )
        return branch.values_list("request_id", flat=True).get() if written else None

    def may_have_ended(self) -> bool:
        """Return True if the batch has ended. Also return True if other transactions
        are now writing the batch's last answers, so that the batch ends when these
        transactions commit.

        On PostgreSQL, a branch counts as answered if another transaction has locked its
        row. That transaction is writing the branch's answer, or is making this check
        too. So if two transactions write the last answers at the same time, the later
        check returns True. A check may also return True too early, so the caller must
        confirm this result with `has_ended()` in a later transaction.
        """
        failed = self.enough < self.total and self.rows().filter(_FAILED).count()
        spare = max(self.total - failed - self.enough, 0)
        # Those asked last: they mostly are the last to be answered.
        open_rows = self.rows().filter(_OPEN).order_by("-number").values_list("pk")
        # Far from the end, do not lock so many rows at each answer.
        if spare > CONCURRENT // 10 and open_rows[spare + CONCURRENT :][:1]:
            return False
        with transaction.atomic(using=open_rows.db):
            free = open_rows.select_for_update(skip_locked=True, no_key=True)
            ended = len(free[: spare + 1]) <= spare
            # No other transaction waits for these rows until this transaction ends.
            transaction.set_rollback(True, using=open_rows.db)
        return ended

    def has_ended(self) -> bool:
        """Return whether the batch has ended. First waits for transactions that are
        writing answers. If the batch has ended, no answer can be written before this
        transaction ends."""
        list(self.rows().filter(_OPEN).select_for_update().values_list("pk"))
        now = self.progress
        return now.answered >= self.enough or not now.open

    def close(self) -> None:
        """End the batch, so that no branch can be answered any more."""
        self.rows().filter(_OPEN).update(left=True, answered_at=Now())
