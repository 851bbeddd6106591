"""The tables of the pipeline, and the columns with transaction ids by which it reads
PostgreSQL."""

from __future__ import annotations

from typing import Any

import django.db.models.functions.datetime
from django.db import migrations, models

FUNCTION = """
    CREATE FUNCTION django_txmsg_mark_change() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        NEW.changed_xid := pg_current_xact_id();
        RETURN NEW;
    END $$;
"""
# Added without a default, the columns rewrite no row. A row that is there already has
# none: it is older than every transaction that runs from here on.
MARKS = """
    ALTER TABLE {table} ADD COLUMN created_xid xid8, ADD COLUMN changed_xid xid8;
    ALTER TABLE {table} ALTER COLUMN created_xid SET DEFAULT pg_current_xact_id(),
        ALTER COLUMN changed_xid SET DEFAULT pg_current_xact_id();
    CREATE TRIGGER {table}_mark BEFORE UPDATE ON {table}
        FOR EACH ROW EXECUTE FUNCTION django_txmsg_mark_change();
"""
UNMARK = """
    DROP TRIGGER {table}_mark ON {table};
    ALTER TABLE {table} DROP COLUMN created_xid, DROP COLUMN changed_xid;
"""
MARKED = ("django_txmsg_outboxmessage", "django_txmsg_inboxmessage")
# If a crash empties it, the run that staged the rows stages them again.
STAGED = "ALTER TABLE django_txmsg_stagedmessage SET UNLOGGED"


def mark_changes(apps: Any, schema_editor: Any) -> None:
    """Store in each row of outbox and inbox the ids of the transactions that created
    and changed it. PostgreSQL only."""
    if schema_editor.connection.vendor == "postgresql":
        schema_editor.execute(STAGED)
        schema_editor.execute(FUNCTION)
        for table in MARKED:
            schema_editor.execute(MARKS.format(table=table))


def unmark_changes(apps: Any, schema_editor: Any) -> None:
    if schema_editor.connection.vendor == "postgresql":
        for table in MARKED:
            schema_editor.execute(UNMARK.format(table=table))
        schema_editor.execute("DROP FUNCTION django_txmsg_mark_change()")


class Migration(migrations.Migration):
    initial = True

    dependencies = [("django_txmsg", "0001_initial")]

    operations = [
        migrations.CreateModel(
            name="StoredRun",
            fields=[
                (
                    "name",
                    models.CharField(max_length=64, primary_key=True, serialize=False),
                ),
                ("messages", models.BigIntegerField()),
                (
                    "ids",
                    models.CharField(help_text="The sum of their ids.", max_length=32),
                ),
                (
                    "stored_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now()
                    ),
                ),
            ],
            options={
                "db_table": "django_txmsg_storedrun",
            },
        ),
        migrations.CreateModel(
            name="ArchiveMark",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True,
                        primary_key=True,
                        serialize=False,
                        verbose_name="ID",
                    ),
                ),
                (
                    "source",
                    models.CharField(help_text="outbox, inbox, …", max_length=32),
                ),
                (
                    "lake_id",
                    models.UUIDField(help_text="What the lake's table calls itself."),
                ),
                ("lake", models.CharField(max_length=1024)),
                ("purged_through", models.BigIntegerField(default=0)),
                (
                    "begun_through",
                    models.BigIntegerField(
                        default=0,
                        help_text="Batches up to it may be on their way into the lake.",
                    ),
                ),
                ("rows", models.BigIntegerField(default=0)),
                (
                    "changed_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now()
                    ),
                ),
            ],
            options={
                "db_table": "django_txmsg_archivemark",
                "constraints": [
                    models.UniqueConstraint(
                        fields=("source", "lake_id"), name="txmsg_archive_mark"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="Finding",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        help_text="A digest of what is found.",
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                ("service", models.CharField(max_length=255)),
                ("verdict", models.CharField(max_length=32)),
                ("message_id", models.UUIDField()),
                (
                    "destination",
                    models.CharField(default="", max_length=255),
                ),
                ("sender", models.CharField(default="", max_length=255)),
                ("consumer", models.TextField(default="")),
                ("sent_at", models.DateTimeField(null=True)),
                (
                    "found_at",
                    models.DateTimeField(help_text="When a run first came to it."),
                ),
                (
                    "seen_at",
                    models.DateTimeField(help_text="When a run last came to it."),
                ),
                ("acknowledged_at", models.DateTimeField(null=True)),
                (
                    "acknowledged_by",
                    models.CharField(default="", max_length=255),
                ),
                ("note", models.TextField(default="")),
            ],
            options={
                "db_table": "django_txmsg_finding",
                "permissions": [
                    ("acknowledge_finding", "Can acknowledge findings"),
                    ("replay_finding", "Can request replays of findings"),
                ],
                "indexes": [
                    models.Index(fields=["message_id"], name="txmsg_finding_message")
                ],
            },
        ),
        migrations.CreateModel(
            name="PipelineAlert",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True,
                        primary_key=True,
                        serialize=False,
                        verbose_name="ID",
                    ),
                ),
                ("service", models.CharField(max_length=255)),
                ("name", models.CharField(max_length=32)),
                ("value", models.FloatField(default=0)),
                ("bound", models.FloatField(default=0)),
                ("firing", models.BooleanField(default=False)),
                (
                    "since",
                    models.DateTimeField(
                        help_text="When it began to fire, the last time.",
                        null=True,
                    ),
                ),
                ("summary", models.TextField(default="")),
                (
                    "told",
                    models.CharField(
                        default="",
                        help_text="What the webhook knows.",
                        max_length=16,
                    ),
                ),
                (
                    "checked_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now()
                    ),
                ),
            ],
            options={
                "db_table": "django_txmsg_pipelinealert",
                "constraints": [
                    models.UniqueConstraint(
                        fields=("service", "name"), name="txmsg_pipeline_alert"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="PipelineRun",
            fields=[
                ("id", models.UUIDField(primary_key=True, serialize=False)),
                ("job", models.CharField(max_length=32)),
                ("service", models.CharField(max_length=255)),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("requested", "requested"),
                            ("running", "running"),
                            ("clean", "clean"),
                            ("findings", "with findings"),
                            ("refused", "verification refused"),
                            ("failed", "failed"),
                        ],
                        default="running",
                        max_length=16,
                    ),
                ),
                ("run_by", models.CharField(default="", max_length=255)),
                ("lake", models.CharField(default="", max_length=1024)),
                ("options", models.JSONField(default=dict)),
                ("rows", models.BigIntegerField(default=0)),
                ("counts", models.JSONField(default=dict)),
                ("error", models.TextField(default="")),
                (
                    "started_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now()
                    ),
                ),
                ("finished_at", models.DateTimeField(null=True)),
            ],
            options={
                "db_table": "django_txmsg_pipelinerun",
                "indexes": [
                    models.Index(fields=["-started_at"], name="txmsg_run_started")
                ],
            },
        ),
        migrations.CreateModel(
            name="StagedMessage",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True,
                        primary_key=True,
                        serialize=False,
                        verbose_name="ID",
                    ),
                ),
                ("run", models.CharField(max_length=64)),
                (
                    "task",
                    models.CharField(
                        help_text="Which attempt of which task.", max_length=64
                    ),
                ),
                ("message_id", models.UUIDField()),
                ("broker", models.CharField(max_length=64)),
                ("destination", models.CharField(max_length=255)),
                ("key", models.CharField(default="", max_length=255)),
                (
                    "correlation_id",
                    models.CharField(default="", max_length=255),
                ),
                ("headers", models.JSONField(default=dict)),
                ("content_type", models.CharField(max_length=255)),
                ("body", models.BinaryField()),
                (
                    "position",
                    models.DateTimeField(
                        help_text="The order in which held messages leave.",
                        null=True,
                    ),
                ),
            ],
            options={
                "db_table": "django_txmsg_stagedmessage",
                "indexes": [
                    models.Index(fields=["run", "task"], name="txmsg_staged_run")
                ],
            },
        ),
        migrations.RunPython(mark_changes, unmark_changes),
    ]
