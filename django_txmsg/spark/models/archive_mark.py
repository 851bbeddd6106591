"""How far the batches of a table are archived into a lake."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now


class ArchiveMark(models.Model):
    """How far a lake's batches of one table are settled: those up to `purged_through`
    are in the lake only. It moves in the transaction that deletes their rows.

    The batches themselves are numbered entries of the lake's own log, and so a database
    or a lake that comes from a backup is noticed by comparing two numbers.
    """

    id = models.BigAutoField(primary_key=True)
    source = models.CharField(max_length=32, help_text="outbox, inbox, …")
    lake_id = models.UUIDField(help_text="What the lake's table calls itself.")
    lake = models.CharField(max_length=1024)
    purged_through = models.BigIntegerField(default=0)
    begun_through = models.BigIntegerField(
        default=0, help_text="Batches up to it may be on their way into the lake."
    )
    rows = models.BigIntegerField(default=0)
    changed_at = models.DateTimeField(db_default=Now())

    class Meta:
        db_table = "django_txmsg_archivemark"
        verbose_name = "archive mark"
        constraints = [
            models.UniqueConstraint(
                fields=["source", "lake_id"], name="txmsg_archive_mark"
            )
        ]

    def __str__(self) -> str:
        return f"{self.source} in {self.lake} through {self.purged_through}"
