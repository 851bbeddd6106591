"""A request executed under an Idempotency-Key, and its response."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now


class IdempotencyKey(models.Model):
    """One key of one caller. It commits with the request's effects, or not at all."""

    id = models.BigAutoField(primary_key=True)
    caller = models.CharField(max_length=255)
    key = models.CharField(max_length=255)
    fingerprint = models.CharField(
        max_length=64,
        help_text="Digest of method, path and body: a key is for one request.",
    )
    status_code = models.PositiveSmallIntegerField(null=True, blank=True)
    headers = models.JSONField(default=list)
    body = models.BinaryField(
        null=True, blank=True, help_text="Empty for a streaming response."
    )
    session_id = models.UUIDField(
        null=True,
        blank=True,
        help_text="The session under which its messages are stored.",
    )
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        verbose_name = "idempotency key"
        constraints = [
            models.UniqueConstraint(
                fields=["caller", "key"], name="txmsg_idempotency_key"
            )
        ]
        indexes = [models.Index(fields=["created_at"], name="txmsg_idempotency_when")]

    def __str__(self) -> str:
        return self.key
