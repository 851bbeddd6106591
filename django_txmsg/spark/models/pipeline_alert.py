"""The last measurements of `pipeline follow`."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now


class PipelineAlert(models.Model):
    """One measure of `pipeline follow`, and whether it is above its bound."""

    id = models.BigAutoField(primary_key=True)
    service = models.CharField(max_length=255)
    name = models.CharField(max_length=32)
    value = models.FloatField(default=0)
    bound = models.FloatField(default=0)
    firing = models.BooleanField(default=False)
    since = models.DateTimeField(
        null=True, blank=True, help_text="When it began to fire, the last time."
    )
    summary = models.TextField(default="", blank=True)
    told = models.CharField(
        max_length=16, default="", blank=True, help_text="What the webhook knows."
    )
    checked_at = models.DateTimeField(db_default=Now())

    class Meta:
        db_table = "django_txmsg_pipelinealert"
        verbose_name = "pipeline alert"
        constraints = [
            models.UniqueConstraint(
                fields=["service", "name"], name="txmsg_pipeline_alert"
            )
        ]

    def __str__(self) -> str:
        return f"{self.name} of {self.service}"
