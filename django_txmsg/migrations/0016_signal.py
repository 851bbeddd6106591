from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("django_txmsg", "0015_muted_above")]

    operations = [
        migrations.AlterField(
            "run",
            "waits_for",
            models.CharField(
                blank=True,
                choices=[
                    ("start", "its first step"),
                    ("answer", "an answer"),
                    ("resume", "a signal"),
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
    ]
