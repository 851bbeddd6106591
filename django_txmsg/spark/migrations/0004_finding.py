from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("txmsg_spark", "0003_alert")]

    operations = [
        migrations.CreateModel(
            name="Finding",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        help_text="A digest of what is found.",
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                ("service", models.CharField(max_length=255)),
                ("verdict", models.CharField(max_length=32)),
                ("message_id", models.UUIDField()),
                (
                    "destination",
                    models.CharField(blank=True, default="", max_length=255),
                ),
                ("sender", models.CharField(blank=True, default="", max_length=255)),
                ("consumer", models.TextField(blank=True, default="")),
                ("sent_at", models.DateTimeField(blank=True, null=True)),
                (
                    "found_at",
                    models.DateTimeField(help_text="When a run first came to it."),
                ),
                (
                    "seen_at",
                    models.DateTimeField(help_text="When a run last came to it."),
                ),
                ("acknowledged_at", models.DateTimeField(blank=True, null=True)),
                (
                    "acknowledged_by",
                    models.CharField(blank=True, default="", max_length=255),
                ),
                ("note", models.TextField(blank=True, default="")),
            ],
            options={
                "verbose_name": "finding",
                "db_table": "django_txmsg_finding",
                "permissions": [("acknowledge_finding", "Can acknowledge findings")],
                "indexes": [
                    models.Index(fields=["message_id"], name="txmsg_finding_message")
                ],
            },
        ),
    ]
