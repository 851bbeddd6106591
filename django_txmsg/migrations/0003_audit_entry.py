"""A table for what operators did."""

from __future__ import annotations

import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("django_txmsg", "0002_counts_by_place"),
    ]

    operations = [
        migrations.CreateModel(
            name="AuditEntry",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                (
                    "at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now()
                    ),
                ),
                ("by", models.CharField(max_length=255)),
                ("text", models.TextField()),
            ],
            options={
                "verbose_name": "audit entry",
                "verbose_name_plural": "audit entries",
            },
        ),
    ]
