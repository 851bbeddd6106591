"""Operators change the rate of a stage for a while, and stop messages by a button."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("django_txmsg", "0012_reads_of_runs"),
    ]

    operations = [
        migrations.AlterModelOptions(
            name="inboxmessage",
            options={
                "permissions": [
                    (
                        "stop_inboxmessage",
                        "Can stop messages that a handler is processing",
                    )
                ],
                "verbose_name": "inbox message",
            },
        ),
        migrations.AlterModelOptions(
            name="stagestate",
            options={
                "permissions": [
                    ("pause_stage", "Can pause and resume stages"),
                    ("limit_stage", "Can change the rate of a stage for a while"),
                ],
                "verbose_name": "stage",
            },
        ),
        migrations.AddField(
            model_name="stagestate",
            name="rate",
            field=models.CharField(
                blank=True,
                db_default="",
                default="",
                help_text="The rate that an operator has set, while it holds.",
                max_length=32,
            ),
        ),
        migrations.AddField(
            model_name="stagestate",
            name="rate_by",
            field=models.CharField(
                blank=True, db_default="", default="", max_length=255
            ),
        ),
        migrations.AddField(
            model_name="stagestate",
            name="rate_until",
            field=models.DateTimeField(blank=True, null=True),
        ),
    ]
