"""Whether the alert `lost` has counted a finding."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("txmsg_spark", "0003_sequence")]
    operations = [
        migrations.AddField(
            model_name="finding",
            name="counted",
            field=models.BooleanField(
                db_default=False, help_text="Whether the alert `lost` has counted it."
            ),
        ),
    ]
