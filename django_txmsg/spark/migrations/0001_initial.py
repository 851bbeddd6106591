"""The pipeline's tables, and what it reads PostgreSQL's rows by.

An installation from before has all of it, made by the core: it is taken over as it is.
"""

from __future__ import annotations

from typing import Any

import django.db.models.functions.datetime
from django.db import migrations, models

from . import _tables


def forwards(apps: Any, schema_editor: Any) -> None:
    _tables.make_tables(apps, _tables.LABEL, schema_editor)
    _tables.mark_changes(schema_editor)
    _tables.move_content_types(schema_editor.connection, "django_txmsg", _tables.LABEL)


def backwards(apps: Any, schema_editor: Any) -> None:
    if _tables.is_the_cores(schema_editor.connection):
        return
    _tables.unmark_changes(schema_editor)
    _tables.drop_tables(apps, _tables.LABEL, schema_editor, even_if_used=True)


class Migration(migrations.Migration):
    initial = True

    dependencies = [("django_txmsg", "0003_worker_service")]
    operations = [
        migrations.SeparateDatabaseAndState(
            state_operations=[
                migrations.CreateModel(
                    name="StoredRun",
                    fields=[
                        (
                            "name",
                            models.CharField(
                                max_length=64, primary_key=True, serialize=False
                            ),
                        ),
                        ("messages", models.BigIntegerField()),
                        (
                            "ids",
                            models.CharField(
                                help_text="The sum of their ids.", max_length=32
                            ),
                        ),
                        (
                            "stored_at",
                            models.DateTimeField(
                                db_default=django.db.models.functions.datetime.Now()
                            ),
                        ),
                    ],
                    options={
                        "verbose_name": "stored run",
                        "db_table": "django_txmsg_storedrun",
                    },
                ),
                migrations.CreateModel(
                    name="ArchiveMark",
                    fields=[
                        ("id", models.BigAutoField(primary_key=True, serialize=False)),
                        (
                            "source",
                            models.CharField(
                                help_text="outbox, inbox, …", max_length=32
                            ),
                        ),
                        (
                            "lake_id",
                            models.UUIDField(
                                help_text="What the lake's table calls itself."
                            ),
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
                        "verbose_name": "archive mark",
                        "db_table": "django_txmsg_archivemark",
                        "constraints": [
                            models.UniqueConstraint(
                                fields=("source", "lake_id"), name="txmsg_archive_mark"
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
                        (
                            "run_by",
                            models.CharField(blank=True, default="", max_length=255),
                        ),
                        (
                            "lake",
                            models.CharField(blank=True, default="", max_length=1024),
                        ),
                        ("options", models.JSONField(blank=True, default=dict)),
                        ("rows", models.BigIntegerField(default=0)),
                        ("counts", models.JSONField(blank=True, default=dict)),
                        ("error", models.TextField(blank=True, default="")),
                        (
                            "started_at",
                            models.DateTimeField(
                                db_default=django.db.models.functions.datetime.Now()
                            ),
                        ),
                        ("finished_at", models.DateTimeField(blank=True, null=True)),
                    ],
                    options={
                        "verbose_name": "pipeline run",
                        "db_table": "django_txmsg_pipelinerun",
                        "indexes": [
                            models.Index(
                                fields=["-started_at"], name="txmsg_run_started"
                            )
                        ],
                    },
                ),
                migrations.CreateModel(
                    name="StagedMessage",
                    fields=[
                        ("id", models.BigAutoField(primary_key=True, serialize=False)),
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
                        (
                            "key",
                            models.CharField(blank=True, default="", max_length=255),
                        ),
                        (
                            "correlation_id",
                            models.CharField(blank=True, default="", max_length=255),
                        ),
                        ("headers", models.JSONField(default=dict)),
                        ("content_type", models.CharField(max_length=255)),
                        ("body", models.BinaryField()),
                        (
                            "position",
                            models.DateTimeField(
                                blank=True,
                                help_text="The order in which held messages leave.",
                                null=True,
                            ),
                        ),
                        ("dead_letter", models.BigIntegerField(blank=True, null=True)),
                    ],
                    options={
                        "verbose_name": "staged message",
                        "db_table": "django_txmsg_stagedmessage",
                        "indexes": [
                            models.Index(
                                fields=["run", "task"], name="txmsg_staged_run"
                            )
                        ],
                    },
                ),
            ]
        ),
        migrations.RunPython(forwards, backwards),
    ]
