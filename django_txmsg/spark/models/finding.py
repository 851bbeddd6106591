"""Findings of `reconcile`, with operators' acknowledgements."""

from __future__ import annotations

from django.db import models


class Finding(models.Model):
    """A message that a run of `reconcile` has judged lost, doubled, dead or late.

    It is new until an operator acknowledges it with a note. If a later run no longer
    finds it, it is deleted; acknowledged findings stay, as a record.
    """

    id = models.UUIDField(primary_key=True, help_text="A digest of what is found.")
    service = models.CharField(max_length=255)
    verdict = models.CharField(max_length=32)
    message_id = models.UUIDField()
    destination = models.CharField(max_length=255, default="", blank=True)
    sender = models.CharField(max_length=255, default="", blank=True)
    consumer = models.TextField(default="", blank=True)
    sent_at = models.DateTimeField(null=True, blank=True)
    found_at = models.DateTimeField(help_text="When a run first came to it.")
    seen_at = models.DateTimeField(help_text="When a run last came to it.")
    acknowledged_at = models.DateTimeField(null=True, blank=True)
    acknowledged_by = models.CharField(max_length=255, default="", blank=True)
    note = models.TextField(default="", blank=True)

    class Meta:
        db_table = "django_txmsg_finding"
        verbose_name = "finding"
        permissions = [("acknowledge_finding", "Can acknowledge findings")]
        indexes = [
            models.Index(fields=["message_id"], name="txmsg_finding_message"),
        ]

    def __str__(self) -> str:
        return f"{self.verdict}: {self.message_id}"
