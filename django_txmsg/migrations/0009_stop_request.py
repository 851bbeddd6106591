"""Requests of operators to stop a message while its handler runs."""

from __future__ import annotations

import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("django_txmsg", "0008_search_of_dead_letters"),
    ]

    operations = [
        migrations.CreateModel(
            name="StopRequest",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                (
                    "at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now()
                    ),
                ),
                ("stage", models.CharField(max_length=255)),
                ("message_id", models.UUIDField()),
                ("why", models.CharField(max_length=255)),
            ],
        ),
    ]
