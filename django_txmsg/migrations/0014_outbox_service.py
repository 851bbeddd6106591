from django.db import migrations, models

from ._workers import refuse_beside_workers


class Migration(migrations.Migration):
    dependencies = [("django_txmsg", "0013_worker_silent_after")]

    operations = [
        # A constant default rewrites no row. Processes of the release before leave the
        # column out, and any relay sends their messages, as it did.
        migrations.AddField(
            model_name="outboxmessage",
            name="service",
            field=models.CharField(
                blank=True,
                db_default="",
                default="",
                help_text="The service that stored this message, and whose relay sends "
                "it. Empty: stored by an earlier release, sent by any.",
                max_length=100,
            ),
        ),
        migrations.RunPython(migrations.RunPython.noop, refuse_beside_workers),
    ]
