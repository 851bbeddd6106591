"""A search of dead letters by key or error reads an index, not the table."""

from __future__ import annotations

from django.db import migrations, models

from django_txmsg.models.fields import MessageKey


class Migration(migrations.Migration):
    dependencies = [
        ("django_txmsg", "0007_joins"),
    ]

    operations = [
        migrations.AddIndex(
            model_name="deadletter",
            index=models.Index(fields=["fingerprint"], name="txmsg_dead_error"),
        ),
        migrations.AddIndex(
            model_name="deadletter",
            index=models.Index(MessageKey("headers"), name="txmsg_dead_key"),
        ),
    ]
