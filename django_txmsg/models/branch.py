"""One request of a batch, and its answer."""

from __future__ import annotations

from django.db import models
from django.db.models import Q


class Branch(models.Model):
    """One request of a batch. `number` counts from 0 in the order asked."""

    id = models.BigAutoField(primary_key=True)
    batch = models.ForeignKey(
        "Batch", models.CASCADE, related_name="branches", db_index=False
    )
    number = models.PositiveIntegerField()
    destination = models.CharField(max_length=255)
    request_id = models.UUIDField(help_text="The id of its message.")
    answer = models.BinaryField(default=b"")
    content_type = models.CharField(max_length=255, default="", blank=True)
    answer_type = models.CharField(max_length=255, default="", blank=True)
    failed = models.BooleanField(
        default=False, help_text="Whether its request was given up."
    )
    left = models.BooleanField(
        default=False, help_text="Whether the batch has ended without its answer."
    )
    answered_at = models.DateTimeField(null=True, blank=True)

    objects: models.Manager[Branch] = models.Manager()

    class Meta:
        verbose_name = "branch of a batch"
        verbose_name_plural = "branches of batches"
        constraints = [
            models.UniqueConstraint(
                fields=["batch", "number"], name="txmsg_branch_number"
            ),
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
