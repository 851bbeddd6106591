from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("django_txmsg", "0010_unique"),
    ]

    operations = [
        migrations.AddField(
            model_name="stagestate",
            name="full_since",
            field=models.DateTimeField(
                blank=True,
                help_text="Ordered, it has received nothing since: too many messages wait.",
                null=True,
            ),
        ),
    ]
