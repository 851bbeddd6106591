"""The slots of stages with a rate, and those that parked messages wait for."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("django_txmsg", "0005_muted_until"),
    ]

    operations = [
        migrations.AddField(
            model_name="inboxmessage",
            name="slot",
            field=models.BigIntegerField(
                blank=True,
                help_text="The slot that it waits for, at a stage with a rate.",
                null=True,
            ),
        ),
        migrations.CreateModel(
            name="RateLine",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("stage", models.CharField(max_length=255)),
                (
                    "key",
                    models.CharField(
                        help_text="A digest of the header's value.", max_length=32
                    ),
                ),
                (
                    "origin",
                    models.FloatField(
                        help_text="When slot 0 is due, in seconds since 1970."
                    ),
                ),
                (
                    "period",
                    models.FloatField(help_text="Seconds from one slot to the next."),
                ),
                ("taken", models.BigIntegerField(help_text="Slots taken so far.")),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(
                        fields=("stage", "key"), name="txmsg_rate_line"
                    )
                ],
            },
        ),
    ]
