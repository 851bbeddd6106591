"""Messages on their way from Spark tasks into the outbox."""

from __future__ import annotations

from django.db import models


class StagedMessage(models.Model):
    """A message that a Spark task has staged, not yet merged into the outbox."""

    id = models.BigAutoField(primary_key=True)
    run = models.CharField(max_length=64)
    task = models.CharField(max_length=64, help_text="Which attempt of which task.")
    message_id = models.UUIDField()
    broker = models.CharField(max_length=64)
    destination = models.CharField(max_length=255)
    key = models.CharField(max_length=255, default="", blank=True)
    correlation_id = models.CharField(max_length=255, default="", blank=True)
    headers = models.JSONField(default=dict)
    content_type = models.CharField(max_length=255)
    body = models.BinaryField()
    position = models.DateTimeField(
        null=True, blank=True, help_text="The order in which held messages leave."
    )

    class Meta:
        db_table = "django_txmsg_stagedmessage"
        verbose_name = "staged message"
        indexes = [models.Index(fields=["run", "task"], name="txmsg_staged_run")]

    def __str__(self) -> str:
        return f"{self.message_id} of run {self.run}"
