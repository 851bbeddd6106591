"""The record of a pipeline job's run."""

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
    """One run of one job: who, when, with which options, and the result."""

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
        db_table = "django_txmsg_pipelinerun"
        verbose_name = "pipeline run"
        indexes = [models.Index(fields=["-started_at"], name="txmsg_run_started")]

    def __str__(self) -> str:
        return f"{self.job} of {self.service} ({self.state})"

    @property
    def interrupted(self) -> bool:
        """Whether its process has died: the lock that a run holds while it is alive is
        free (`runs.py`)."""
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
