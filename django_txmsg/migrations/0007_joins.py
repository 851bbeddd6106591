"""Joins: batches of requests, and a row for each of these."""

from __future__ import annotations

import django.db.models.deletion
import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("django_txmsg", "0006_rates"),
    ]

    operations = [
        migrations.AlterField(
            model_name="run",
            name="waits_for",
            field=models.CharField(
                blank=True,
                choices=[
                    ("start", "its first step"),
                    ("answer", "an answer"),
                    ("resume", "somebody's word"),
                    ("time", "an instant"),
                    ("itself", "a transaction of its own"),
                    ("join", "several answers"),
                    ("undo", "an undo"),
                    ("", "nothing"),
                ],
                default="",
                max_length=16,
            ),
        ),
        migrations.CreateModel(
            name="Batch",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                (
                    "turn",
                    models.UUIDField(
                        help_text="The turn of its run until the end.", unique=True
                    ),
                ),
                (
                    "total",
                    models.PositiveIntegerField(help_text="How many requests it has."),
                ),
                (
                    "enough",
                    models.PositiveIntegerField(help_text="How many answers end it."),
                ),
                (
                    "created_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now()
                    ),
                ),
                (
                    "run",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="batches",
                        to="django_txmsg.run",
                    ),
                ),
            ],
            options={
                "verbose_name": "batch",
                "verbose_name_plural": "batches",
            },
        ),
        migrations.CreateModel(
            name="Branch",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("number", models.PositiveIntegerField()),
                ("destination", models.CharField(max_length=255)),
                ("request_id", models.UUIDField(help_text="The id of its message.")),
                ("answer", models.BinaryField(default=b"")),
                (
                    "content_type",
                    models.CharField(blank=True, default="", max_length=255),
                ),
                (
                    "answer_type",
                    models.CharField(blank=True, default="", max_length=255),
                ),
                (
                    "failed",
                    models.BooleanField(
                        default=False, help_text="Whether its request was given up."
                    ),
                ),
                (
                    "left",
                    models.BooleanField(
                        default=False,
                        help_text="Whether the batch has ended without its answer.",
                    ),
                ),
                ("answered_at", models.DateTimeField(blank=True, null=True)),
                (
                    "batch",
                    models.ForeignKey(
                        db_index=False,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="branches",
                        to="django_txmsg.batch",
                    ),
                ),
            ],
            options={
                "verbose_name": "branch of a batch",
                "verbose_name_plural": "branches of batches",
                "indexes": [
                    models.Index(
                        condition=models.Q(("answered_at__isnull", True)),
                        fields=["batch", "number"],
                        name="txmsg_branch_open",
                    ),
                    models.Index(
                        condition=models.Q(("failed", True)),
                        fields=["batch"],
                        name="txmsg_branch_failed",
                    ),
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("batch", "number"), name="txmsg_branch_number"
                    )
                ],
            },
        ),
    ]
