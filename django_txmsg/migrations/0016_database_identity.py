from django.db import migrations, models
from django.db.models.functions import Now

from ._workers import refuse_beside_workers


class Migration(migrations.Migration):
    dependencies = [("django_txmsg", "0015_cancelled")]

    operations = [
        migrations.CreateModel(
            name="DatabaseIdentity",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("identity", models.CharField(max_length=255, unique=True)),
                ("seen_at", models.DateTimeField(db_default=Now())),
            ],
            options={"verbose_name_plural": "database identities"},
        ),
        migrations.RunPython(migrations.RunPython.noop, refuse_beside_workers),
    ]
