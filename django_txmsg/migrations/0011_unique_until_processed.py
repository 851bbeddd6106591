"""A message may hold its unique key until it was processed."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("django_txmsg", "0010_acts_on_runs"),
    ]

    operations = [
        migrations.AddField(
            model_name="outboxmessage",
            name="unique_until_processed",
            field=models.BooleanField(
                db_default=False,
                help_text="Whether it holds its key until a stage here has processed "
                "it.",
            ),
        ),
        migrations.AlterField(
            model_name="outboxmessage",
            name="unique_key",
            field=models.CharField(
                blank=True,
                help_text="Held by this message until a relay claims it, or longer.",
                max_length=255,
                null=True,
            ),
        ),
        migrations.AddConstraint(
            model_name="outboxmessage",
            constraint=models.UniqueConstraint(
                condition=models.Q(
                    ("dead_at__isnull", True), ("unique_key__isnull", False)
                ),
                fields=("unique_key",),
                name="txmsg_outbox_holds_key",
            ),
        ),
        migrations.RemoveConstraint(
            model_name="outboxmessage",
            name="txmsg_outbox_unique_key",
        ),
    ]
