"""The acts of operators on runs of flows, and the indexes by which runs are counted."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("django_txmsg", "0009_stop_request"),
    ]

    operations = [
        migrations.AlterModelOptions(
            name="run",
            options={
                "permissions": [
                    ("resume_run", "Can resume runs of flows"),
                    ("time_out_run", "Can let the deadlines of runs pass now"),
                    ("cancel_run", "Can cancel runs of flows"),
                    ("answer_run", "Can answer requests of runs as failed"),
                    ("go_back_run", "Can let runs go back to a step"),
                ],
                "verbose_name": "run of a flow",
                "verbose_name_plural": "runs of flows",
            },
        ),
        migrations.AddField(
            model_name="flowstep",
            name="left",
            field=models.BooleanField(
                db_default=False,
                default=False,
                help_text="Whether the run has gone back to before this step.",
            ),
        ),
        migrations.AddField(
            model_name="flowstep",
            name="undos",
            field=models.PositiveIntegerField(
                db_default=0,
                default=0,
                help_text="How many undos were registered by then.",
            ),
        ),
        migrations.AddField(
            model_name="run",
            name="kept_undos",
            field=models.PositiveIntegerField(
                blank=True,
                help_text="While the run goes back to a step: how many of its undos, "
                "the oldest, stay registered. The answer is then the argument of that "
                "step.",
                null=True,
            ),
        ),
        migrations.AddIndex(
            model_name="run",
            index=models.Index(
                condition=models.Q(("ended_at__isnull", True)),
                fields=["service", "flow"],
                name="txmsg_run_open",
            ),
        ),
        migrations.AddIndex(
            model_name="run",
            index=models.Index(
                condition=models.Q(("ended_at__isnull", True), ("failing", True)),
                fields=["service", "flow"],
                name="txmsg_run_undoing",
            ),
        ),
    ]
