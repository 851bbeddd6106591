"""The order of staged messages that were stored at one instant."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("txmsg_spark", "0002_index")]
    operations = [
        migrations.AddField(
            model_name="stagedmessage",
            name="sequence",
            field=models.BigIntegerField(
                help_text="The order of messages with the same position.", null=True
            ),
        ),
    ]
