"""Up to which batch a table is archived into a lake."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now


class ArchiveMark(models.Model):
    """Up to which batch one table is settled in a lake: batches up to `purged_through`
    are only in the lake. It advances in the transaction that deletes their rows.

    The batches themselves are numbered entries of the lake's own log, so comparing two
    numbers detects a database or a lake restored from a backup.
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
