"""The embedded broker's tables: queues, and the subscriptions of its topics."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now


class QueueMessage(models.Model):
    """A message lying in a queue. Acknowledging deletes the row."""

    id = models.BigAutoField(primary_key=True)
    queue = models.CharField(max_length=511)
    headers = models.JSONField(default=dict)
    body = models.BinaryField()
    enqueued_at = models.DateTimeField(db_default=Now())
    available_at = models.DateTimeField(db_default=Now())
    deliveries = models.PositiveIntegerField(default=0)
    lease_token = models.UUIDField(null=True, blank=True)

    class Meta:
        indexes = [
            models.Index(fields=["queue", "available_at", "id"], name="txmsg_queue_due")
        ]

    def __str__(self) -> str:
        return f"{self.id} in {self.queue}"


class QueueSubscription(models.Model):
    """A durable subscriber of a topic: its queue gets a copy of every message."""

    id = models.BigAutoField(primary_key=True)
    topic = models.CharField(max_length=255)
    subscriber = models.CharField(max_length=255)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["topic", "subscriber"], name="txmsg_queue_subscription"
            )
        ]

    def __str__(self) -> str:
        return f"{self.subscriber} on {self.topic}"
