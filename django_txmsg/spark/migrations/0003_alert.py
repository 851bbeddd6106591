from django.db import migrations, models
from django.db.models.functions import Now


class Migration(migrations.Migration):
    dependencies = [("txmsg_spark", "0002_index")]

    operations = [
        migrations.CreateModel(
            name="PipelineAlert",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("service", models.CharField(max_length=255)),
                ("name", models.CharField(max_length=32)),
                ("value", models.FloatField(default=0)),
                ("bound", models.FloatField(default=0)),
                ("firing", models.BooleanField(default=False)),
                (
                    "since",
                    models.DateTimeField(
                        blank=True,
                        help_text="When it began to fire, the last time.",
                        null=True,
                    ),
                ),
                ("summary", models.TextField(blank=True, default="")),
                (
                    "told",
                    models.CharField(
                        blank=True,
                        default="",
                        help_text="What the webhook knows.",
                        max_length=16,
                    ),
                ),
                ("checked_at", models.DateTimeField(db_default=Now())),
            ],
            options={
                "verbose_name": "pipeline alert",
                "db_table": "django_txmsg_pipelinealert",
            },
        ),
        migrations.AddConstraint(
            model_name="pipelinealert",
            constraint=models.UniqueConstraint(
                fields=("service", "name"), name="txmsg_pipeline_alert"
            ),
        ),
    ]
