from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("django_txmsg", "0011_full_stage")]

    operations = [
        migrations.AddField(
            model_name="idempotencykey",
            name="session_id",
            field=models.UUIDField(
                blank=True,
                help_text="As which session's its messages are stored.",
                null=True,
            ),
        ),
    ]
