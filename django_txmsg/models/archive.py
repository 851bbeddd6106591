"""The data pipeline's own rows: its runs, the archive's marks, and staged replays.

The Spark jobs read and write them through plain SQL, since they run without Django;
the tables belong to the migrations all the same.
"""

from __future__ import annotations

from pathlib import Path

from django.db import DEFAULT_DB_ALIAS, connections, models
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
        verbose_name = "archive mark"
        constraints = [
            models.UniqueConstraint(
                fields=["source", "lake_id"], name="txmsg_archive_mark"
            )
        ]

    def __str__(self) -> str:
        return f"{self.source} in {self.lake} through {self.purged_through}"


class StoredRun(models.Model):
    """A replay, a send or a write that has stored its messages: its name stands for
    these, for good, whatever becomes of their rows. Written with them."""

    name = models.CharField(max_length=64, primary_key=True)
    messages = models.BigIntegerField()
    ids = models.CharField(max_length=32, help_text="The sum of their ids.")
    stored_at = models.DateTimeField(db_default=Now())

    class Meta:
        verbose_name = "stored run"

    def __str__(self) -> str:
        return f"{self.name}: {self.messages} messages"


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
