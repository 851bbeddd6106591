"""The undos of a run, in case it fails.

A row is written in the transaction that sends the request: after a time-out it is
unknown whether the request was executed.
"""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from .run import Run


class FlowUndo(models.Model):
    """One undo of a run. The highest number is undone first."""

    id = models.BigAutoField(primary_key=True)
    run = models.ForeignKey(Run, models.CASCADE, related_name="undo_rows")
    number = models.PositiveIntegerField()
    destination = models.CharField(max_length=255)
    body = models.BinaryField()
    body_type = models.CharField(max_length=255, default="", blank=True)
    request_id = models.UUIDField(
        null=True,
        blank=True,
        help_text="The request that it undoes; empty: a step's own work.",
    )
    created_at = models.DateTimeField(db_default=Now())
    cancels = models.BooleanField(
        default=False, help_text="Whether it cancels the run of a flow that was asked."
    )
    answered = models.BooleanField(
        default=False, help_text="Whether the answer to the request has come."
    )
    confirmed_at = models.DateTimeField(null=True, blank=True)

    objects: models.Manager[FlowUndo] = models.Manager()

    class Meta:
        verbose_name = "undo of a run"
        verbose_name_plural = "undos of runs"
        constraints = [
            models.UniqueConstraint(fields=["run", "number"], name="txmsg_undo_number"),
        ]
        indexes = [
            models.Index(
                fields=["request_id"],
                condition=Q(request_id__isnull=False),
                name="txmsg_undo_request",
            ),
        ]

    def __str__(self) -> str:
        return f"undo {self.number} by {self.destination}"
