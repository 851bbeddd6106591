"""What the waiting step of a run took, so that a check finds what the code lacks."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("django_txmsg", "0011_unique_until_processed"),
    ]

    operations = [
        migrations.AddField(
            model_name="run",
            name="reads",
            field=models.TextField(
                blank=True,
                default="",
                help_text="The types and versions that the step took when the run "
                "began to wait, one a line.",
            ),
        ),
    ]
