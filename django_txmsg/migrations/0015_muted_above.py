"""The number of open dead letters above which a mute does not apply."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("django_txmsg", "0014_alerts"),
    ]

    operations = [
        migrations.AddField(
            model_name="failurenote",
            name="muted_above",
            field=models.PositiveIntegerField(
                blank=True,
                help_text="The mute does not apply while more dead letters are open.",
                null=True,
            ),
        ),
    ]
