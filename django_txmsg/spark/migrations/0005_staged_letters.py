"""Dead letters are no longer staged: the app redelivers them, in a bulk operation."""

from __future__ import annotations

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("txmsg_spark", "0004_finding")]

    operations = [
        migrations.RemoveField(model_name="stagedmessage", name="dead_letter"),
    ]
