"""The history of a run: a row for each committed step."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now

from .run import Run


class FlowStep(models.Model):
    """One step of a run, and the state after it."""

    id = models.BigAutoField(primary_key=True)
    run = models.ForeignKey(Run, models.CASCADE, related_name="steps")
    step = models.CharField(max_length=200)
    message_id = models.UUIDField(help_text="The message that continued the run.")
    created_at = models.DateTimeField(db_default=Now())
    version = models.PositiveIntegerField()
    state = models.TextField(help_text="JSON, after the step.")
    then = models.CharField(
        max_length=300, default="", blank=True, help_text="What the run waits for next."
    )
    undos = models.PositiveIntegerField(
        default=0, db_default=0, help_text="How many undos were registered by then."
    )
    left = models.BooleanField(
        default=False,
        db_default=False,
        help_text="Whether the run has gone back to before this step.",
    )

    objects: models.Manager[FlowStep] = models.Manager()

    class Meta:
        verbose_name = "step of a run"
        verbose_name_plural = "steps of runs"

    def __str__(self) -> str:
        return self.step
