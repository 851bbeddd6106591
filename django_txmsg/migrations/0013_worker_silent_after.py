import datetime as dt

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("django_txmsg", "0012_idempotency_session")]

    operations = [
        # Processes of the release before leave it out, and have lived by this limit.
        migrations.AddField(
            model_name="worker",
            name="silent_after",
            field=models.DurationField(
                db_default=dt.timedelta(seconds=30),
                default=dt.timedelta(seconds=30),
                help_text="Age of the last heartbeat from which the worker counts as "
                "dead.",
            ),
        ),
    ]
