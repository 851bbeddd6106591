"""A table of alerts, and the version that a process runs."""

from __future__ import annotations

import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("django_txmsg", "0013_rates_and_stops_by_operators"),
    ]

    operations = [
        migrations.AddField(
            model_name="worker",
            name="version",
            field=models.CharField(
                blank=True, db_default="", default="", max_length=255
            ),
        ),
        migrations.CreateModel(
            name="Alert",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("service", models.CharField(max_length=255)),
                ("name", models.CharField(max_length=255)),
                ("kind", models.CharField(max_length=32)),
                ("text", models.TextField(blank=True, default="")),
                (
                    "since",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now()
                    ),
                ),
                ("ended_at", models.DateTimeField(blank=True, null=True)),
                (
                    "delivered",
                    models.CharField(
                        blank=True,
                        default="",
                        help_text="What its receivers know.",
                        max_length=16,
                    ),
                ),
                ("lease_until", models.DateTimeField(blank=True, null=True)),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(
                        condition=models.Q(("ended_at__isnull", True)),
                        fields=("service", "name"),
                        name="txmsg_alert_open",
                    )
                ],
            },
        ),
    ]
