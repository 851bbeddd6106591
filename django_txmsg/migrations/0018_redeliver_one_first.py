"""Redeliver one message first, then the rest."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("django_txmsg", "0017_schedules_made_at_run_time"),
    ]

    operations = [
        migrations.AddField(
            model_name="bulkoperation",
            name="tolerates",
            field=models.PositiveIntegerField(
                blank=True,
                help_text="If given, one message goes first, and the operation stops "
                "itself when more than this many have died again.",
                null=True,
            ),
        ),
        migrations.AddField(
            model_name="bulkoperation",
            name="watched",
            field=models.JSONField(
                blank=True,
                db_default=models.Value([], output_field=models.JSONField()),
                default=list,
                help_text="The dead letters whose outcome the next batch waits for.",
            ),
        ),
        migrations.AddField(
            model_name="bulkoperation",
            name="stopped_why",
            field=models.TextField(blank=True, db_default="", default=""),
        ),
    ]
