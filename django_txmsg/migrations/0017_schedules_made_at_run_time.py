"""Recurring messages that are made at run time have their arguments in their rows."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("django_txmsg", "0016_signal"),
    ]

    operations = [
        migrations.AddField(
            model_name="schedule",
            name="made",
            field=models.JSONField(
                blank=True,
                help_text="The arguments of a message that was made at run time.",
                null=True,
            ),
        ),
        migrations.AlterModelOptions(
            name="schedule",
            options={
                "permissions": [
                    ("pause_schedule", "Can pause and resume recurring messages"),
                    ("make_schedule", "Can make and remove recurring messages"),
                ],
                "verbose_name": "recurring message",
            },
        ),
    ]
