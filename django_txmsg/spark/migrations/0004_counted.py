"""Whether the alert `lost` has counted a finding."""

from __future__ import annotations

from django.db import migrations, models

#: Until now, the time of the last check decided. A run that was in progress then may
#: have stored findings after it. Without a check, all findings are new.
_COUNTED = """
    UPDATE django_txmsg_finding SET counted = TRUE WHERE EXISTS (
        SELECT 1 FROM django_txmsg_pipelinealert alert
        WHERE alert.name = 'lost' AND alert.service = django_txmsg_finding.service
        AND alert.checked_at >= django_txmsg_finding.found_at
        AND NOT EXISTS (
            SELECT 1 FROM django_txmsg_pipelinerun run
            WHERE run.job = 'reconcile' AND run.finished_at > alert.checked_at
            AND run.started_at = django_txmsg_finding.found_at
        )
    )
"""


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
        migrations.RunSQL(_COUNTED, migrations.RunSQL.noop),
    ]
