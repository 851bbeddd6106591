"""The tables of the pipeline. The jobs access them in plain SQL, because they do not
use Django."""

from __future__ import annotations

from pathlib import Path

from django.db import DEFAULT_DB_ALIAS, connections, models
from django.db.models.functions import Now


class ArchiveMark(models.Model):
    """The last settled batch of one table in one lake. Rows of batches up to
    `purged_through` are only in the lake. The transaction that deletes a batch's rows
    advances this number.

    Batch n is entry n of the lake's log. If the log ends before `purged_through`, the
    lake has lost batches, for example because an old backup of it was restored. If the
    log has later batches, an archive run was interrupted or the database was restored
    from a backup. The next archive run settles these batches.
    """

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
        constraints = [
            models.UniqueConstraint(
                fields=["source", "lake_id"], name="txmsg_archive_mark"
            )
        ]

    def __str__(self) -> str:
        return f"{self.source} in {self.lake} through {self.purged_through}"


class Finding(models.Model):
    """A message that `reconcile` has judged lost, doubled, dead or late.

    A finding is open until an operator acknowledges it with a note. If a later run does
    not find it again, an open finding is deleted, and an acknowledged one stays.
    """

    id = models.UUIDField(primary_key=True, help_text="A digest of what is found.")
    service = models.CharField(max_length=255)
    verdict = models.CharField(max_length=32)
    message_id = models.UUIDField()
    destination = models.CharField(max_length=255, default="")
    sender = models.CharField(max_length=255, default="")
    consumer = models.TextField(default="")
    sent_at = models.DateTimeField(null=True)
    found_at = models.DateTimeField(help_text="When a run first came to it.")
    seen_at = models.DateTimeField(help_text="When a run last came to it.")
    acknowledged_at = models.DateTimeField(null=True)
    acknowledged_by = models.CharField(max_length=255, default="")
    note = models.TextField(default="")
    counted = models.BooleanField(
        db_default=False, help_text="Whether the alert `lost` has counted it."
    )

    class Meta:
        db_table = "django_txmsg_finding"
        permissions = [
            ("acknowledge_finding", "Can acknowledge findings"),
            ("replay_finding", "Can request replays of findings"),
        ]
        indexes = [
            models.Index(fields=["message_id"], name="txmsg_finding_message"),
        ]

    def __str__(self) -> str:
        return f"{self.verdict}: {self.message_id}"


class PipelineAlert(models.Model):
    """A value that `pipeline follow` measures, with its bound. The alert fires while
    the value is above the bound."""

    service = models.CharField(max_length=255)
    name = models.CharField(max_length=32)
    value = models.FloatField(default=0)
    bound = models.FloatField(default=0)
    firing = models.BooleanField(default=False)
    since = models.DateTimeField(
        null=True, help_text="When it began to fire, the last time."
    )
    summary = models.TextField(default="")
    told = models.CharField(
        max_length=16, default="", help_text="What the webhook knows."
    )
    checked_at = models.DateTimeField(db_default=Now())

    class Meta:
        db_table = "django_txmsg_pipelinealert"
        constraints = [
            models.UniqueConstraint(
                fields=["service", "name"], name="txmsg_pipeline_alert"
            )
        ]

    def __str__(self) -> str:
        return f"{self.name} of {self.service}"

    @property
    def unit(self) -> str:
        """The unit of the value and of its bound: "seconds" or "number"."""
        ages = {"database", "lag", "lake", "standstill"}
        return "seconds" if self.name in ages else "number"


class RunState(models.TextChoices):
    """The state of a run of the pipeline."""

    REQUESTED = "requested", "requested"
    RUNNING = "running", "running"
    CLEAN = "clean", "clean"
    FINDINGS = "findings", "with findings"
    REFUSED = "refused", "verification refused"
    FAILED = "failed", "failed"


class PipelineRun(models.Model):
    """One run of a job, with its user, its options and its result.

    The admin can only request a run. `pipeline follow` or `replay --request` carries it
    out.
    """

    id = models.UUIDField(primary_key=True)
    job = models.CharField(max_length=32)
    service = models.CharField(max_length=255)
    state = models.CharField(
        max_length=16, choices=RunState.choices, default=RunState.RUNNING
    )
    run_by = models.CharField(max_length=255, default="")
    lake = models.CharField(max_length=1024, default="")
    options = models.JSONField(default=dict)
    rows = models.BigIntegerField(default=0)
    counts = models.JSONField(default=dict)
    error = models.TextField(default="")
    started_at = models.DateTimeField(db_default=Now())
    finished_at = models.DateTimeField(null=True)

    class Meta:
        db_table = "django_txmsg_pipelinerun"
        indexes = [models.Index(fields=["-started_at"], name="txmsg_run_started")]

    def __str__(self) -> str:
        return f"{self.job} of {self.service} ({self.state})"

    @property
    def interrupted(self) -> bool:
        """Whether the process of a run has died before the run's end. A run holds a
        lock until its process ends (`runs.py`), so a free lock shows that the process
        is gone."""
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


class StagedMessage(models.Model):
    """A message that a Spark task has written, and that is not in the outbox yet."""

    run = models.CharField(max_length=64)
    task = models.CharField(max_length=64, help_text="Which attempt of which task.")
    message_id = models.UUIDField()
    broker = models.CharField(max_length=64)
    destination = models.CharField(max_length=255)
    key = models.CharField(max_length=255, default="")
    correlation_id = models.CharField(max_length=255, default="")
    headers = models.JSONField(default=dict)
    content_type = models.CharField(max_length=255)
    body = models.BinaryField()
    position = models.DateTimeField(
        null=True, help_text="The order in which held messages leave."
    )
    sequence = models.BigIntegerField(
        null=True, help_text="The order of messages with the same position."
    )

    class Meta:
        db_table = "django_txmsg_stagedmessage"
        indexes = [models.Index(fields=["run", "task"], name="txmsg_staged_run")]

    def __str__(self) -> str:
        return f"{self.message_id} of run {self.run}"


class StoredRun(models.Model):
    """A replay, a send or a write that has stored its messages. The row is committed
    together with the messages. The row reserves the name of the run, even after the
    messages are archived or pruned."""

    name = models.CharField(max_length=64, primary_key=True)
    messages = models.BigIntegerField()
    ids = models.CharField(max_length=32, help_text="The sum of their ids.")
    stored_at = models.DateTimeField(db_default=Now())

    class Meta:
        db_table = "django_txmsg_storedrun"

    def __str__(self) -> str:
        return f"{self.name}: {self.messages} messages"
