"""One failed attempt of a stage at a message: when, by which worker, how long, and
why."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now


class Attempt(models.Model):
    """A failed execution. Successful ones need no row: the inbox records them."""

    id = models.BigAutoField(primary_key=True)
    message_id = models.UUIDField()
    stage = models.CharField(max_length=255)
    number = models.PositiveIntegerField()
    worker = models.CharField(max_length=255, default="", blank=True)
    failed_at = models.DateTimeField(db_default=Now())
    duration = models.FloatField(null=True, blank=True, help_text="seconds")
    exception = models.TextField(default="", blank=True)
    traceback = models.TextField(default="", blank=True)
    fingerprint = models.CharField(max_length=64, default="", blank=True)

    class Meta:
        indexes = [
            models.Index(fields=["message_id", "stage"], name="txmsg_attempt_message")
        ]

    def __str__(self) -> str:
        return f"attempt {self.number} of {self.message_id} at {self.stage}"
