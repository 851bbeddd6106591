"""The data pipeline's own rows: its runs, the archive's ledger, and staged replays.

The Spark jobs read and write them through plain SQL, since they run without Django;
the tables belong to the migrations all the same.
"""

from __future__ import annotations

from pathlib import Path

from django.db import DEFAULT_DB_ALIAS, connections, models
from django.db.models import Q
from django.db.models.functions import Now


class RunState(models.TextChoices):
    """How a run of the pipeline ended."""

    RUNNING = "running", "running"
    CLEAN = "clean", "clean"
    FINDINGS = "findings", "with findings"
    REFUSED = "refused", "verification refused"
    FAILED = "failed", "failed"


class PipelineRun(models.Model):
    """One run of one job: who, when, over what, and what came of it."""

    id = models.UUIDField(primary_key=True)
    job = models.CharField(max_length=32)
    service = models.CharField(max_length=255)
    state = models.CharField(
        max_length=16, choices=RunState.choices, default=RunState.RUNNING
    )
    run_by = models.CharField(max_length=255, default="", blank=True)
    lake = models.CharField(max_length=1024, default="", blank=True)
    options = models.JSONField(default=dict, blank=True)
    rows = models.BigIntegerField(default=0)
    counts = models.JSONField(default=dict, blank=True)
    error = models.TextField(default="", blank=True)
    started_at = models.DateTimeField(db_default=Now())
    finished_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        verbose_name = "pipeline run"
        indexes = [models.Index(fields=["-started_at"], name="txmsg_run_started")]

    def __str__(self) -> str:
        return f"{self.job} of {self.service} ({self.state})"

    @property
    def interrupted(self) -> bool:
        """Whether its process has ended without a word: nobody holds the lock that a
        run holds for as long as it lives (`spark/runs.py`)."""
        if self.state != RunState.RUNNING:
            return False
        connection = connections[self._state.db or DEFAULT_DB_ALIAS]
        with connection.cursor() as cursor:
            if connection.vendor == "postgresql":
                cursor.execute(
                    "SELECT pg_try_advisory_xact_lock_shared(hashtextextended(%s, 0))",
                    [f"django_txmsg/run/{self.pk}"],
                )
                return bool(cursor.fetchone()[0])
            if connection.vendor != "sqlite":
                return False
            cursor.execute("SELECT file FROM pragma_database_list WHERE name = 'main'")
            path = Path(f"{cursor.fetchone()[0]}.run-{self.pk}.lock")
        import fcntl  # where there is one: not on Windows

        try:
            with path.open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return True
        except BlockingIOError:
            return False
        return True


class BatchState(models.TextChoices):
    """Where a batch of rows is on its way into the lake."""

    PLANNED = "planned", "planned"
    COMMITTED = "committed", "in the lake, not yet deleted here"
    PURGED = "purged", "in the lake only"
    ABANDONING = "abandoning", "being withdrawn from the lake"
    ABANDONED = "abandoned", "withdrawn"


class ArchiveBatch(models.Model):
    """A frozen range of settled rows of one table: the unit of commit and of purge.

    States: `planned → committed → purged`, and `committed → abandoning → abandoned`
    for a batch whose rows changed on the way. The row is the proof: rows are deleted
    in the transaction that has compared them with `rows` and `checksum`.
    """

    id = models.BigAutoField(primary_key=True)
    source = models.CharField(max_length=32, help_text="outbox, inbox, …")
    lake = models.CharField(max_length=1024)
    first_id = models.BigIntegerField()
    last_id = models.BigIntegerField()
    cutoff = models.DateTimeField(help_text="Rows settled before it belong to this.")
    horizon = models.BigIntegerField(
        null=True,
        blank=True,
        help_text="Rows last changed by an older transaction belong to this.",
    )
    state = models.CharField(
        max_length=16, choices=BatchState.choices, default=BatchState.PLANNED
    )
    token = models.CharField(max_length=36, help_text="Its name in the lake.")
    attempt = models.CharField(max_length=36, default="", blank=True)
    lake_version = models.BigIntegerField(null=True, blank=True)
    rows = models.BigIntegerField(default=0)
    checksum = models.CharField(max_length=40, default="", blank=True)
    run_by = models.CharField(max_length=255, default="", blank=True)
    error = models.TextField(default="", blank=True)
    started_at = models.DateTimeField(db_default=Now())
    finished_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        verbose_name = "archive batch"
        verbose_name_plural = "archive batches"
        indexes = [
            models.Index(
                fields=["source", "id"],
                condition=Q(state__in=["planned", "committed", "abandoning"]),
                name="txmsg_batch_unfinished",
            )
        ]

    def __str__(self) -> str:
        return f"{self.source} {self.first_id} to {self.last_id} ({self.state})"


class StagedMessage(models.Model):
    """A message that a Spark task has brought, not yet merged into the outbox."""

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
    dead_letter = models.BigIntegerField(null=True, blank=True)

    class Meta:
        verbose_name = "staged message"
        indexes = [models.Index(fields=["run", "task"], name="txmsg_staged_run")]

    def __str__(self) -> str:
        return f"{self.message_id} of run {self.run}"
