"""The names under which the pipeline has stored messages."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now


class StoredRun(models.Model):
    """A replay, a send or a write that has stored its messages, in the same
    transaction: its name stays bound to these, whatever happens to their rows."""

    name = models.CharField(max_length=64, primary_key=True)
    messages = models.BigIntegerField()
    ids = models.CharField(max_length=32, help_text="The sum of their ids.")
    stored_at = models.DateTimeField(db_default=Now())

    class Meta:
        db_table = "django_txmsg_storedrun"
        verbose_name = "stored run"

    def __str__(self) -> str:
        return f"{self.name}: {self.messages} messages"
