"""When the mute of an error ends."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("django_txmsg", "0004_flows"),
    ]

    operations = [
        migrations.AddField(
            model_name="failurenote",
            name="muted_until",
            field=models.DateTimeField(
                blank=True, help_text="When the mute ends; empty: never.", null=True
            ),
        ),
    ]
