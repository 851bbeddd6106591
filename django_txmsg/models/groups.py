"""An operator's note on all dead letters of one fingerprint."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now


class FailureNote(models.Model):
    """What somebody found out about an error: a ticket, a cause, a plan."""

    id = models.BigAutoField(primary_key=True)
    fingerprint = models.CharField(max_length=64, unique=True)
    note = models.TextField(default="", blank=True)
    noted_by = models.CharField(max_length=255, default="", blank=True)
    noted_at = models.DateTimeField(db_default=Now())

    def __str__(self) -> str:
        return self.note.partition("\n")[0] or self.fingerprint
