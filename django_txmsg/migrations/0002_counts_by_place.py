"""Counts by place: what is pending, what needs newer code, what died, what was done."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("django_txmsg", "0001_initial"),
    ]

    operations = [
        migrations.RemoveConstraint(
            model_name="periodcount",
            name="txmsg_period_count",
        ),
        migrations.RemoveIndex(
            model_name="deadletter",
            name="txmsg_dead_open",
        ),
        migrations.RemoveIndex(
            model_name="deadletter",
            name="txmsg_dead_groups",
        ),
        migrations.AddField(
            model_name="periodcount",
            name="place",
            field=models.CharField(
                db_default="",
                default="",
                help_text="The destination or stage; empty: marks the period as counted.",
                max_length=255,
            ),
        ),
        migrations.AddIndex(
            model_name="deadletter",
            index=models.Index(
                condition=models.Q(("resolution", "open")),
                fields=["id"],
                name="txmsg_dead_open",
            ),
        ),
        migrations.AddIndex(
            model_name="deadletter",
            index=models.Index(
                condition=models.Q(("resolution", "open")),
                fields=[
                    "fingerprint",
                    "id",
                    "stage",
                    "destination",
                    "reason",
                    "created_at",
                    "deaths",
                ],
                name="txmsg_dead_groups",
            ),
        ),
        migrations.AddIndex(
            model_name="inboxmessage",
            index=models.Index(
                condition=models.Q(
                    ("due_at__isnull", False), ("needs_version__isnull", False)
                ),
                fields=["stage", "first_received_at"],
                name="txmsg_inbox_newer",
            ),
        ),
        migrations.AddIndex(
            model_name="outboxmessage",
            index=models.Index(
                condition=models.Q(
                    ("dead_at__isnull", True), ("dispatched_at__isnull", True)
                ),
                fields=["service", "destination", "due_at"],
                name="txmsg_outbox_place",
            ),
        ),
        migrations.AddConstraint(
            model_name="periodcount",
            constraint=models.UniqueConstraint(
                fields=("start", "series", "place"), name="txmsg_period_count"
            ),
        ),
    ]
