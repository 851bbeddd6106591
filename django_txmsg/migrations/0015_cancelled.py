"""A cancelled message says so in a column, and no longer in its error's first word."""

from __future__ import annotations

from typing import Any

from django.db import migrations, models, router
from django.db.models import F

from ._workers import refuse_beside_workers


def fill(apps: Any, schema_editor: Any) -> None:
    """There are few: an operator or the code took each of them back by its id."""
    alias = schema_editor.connection.alias
    model = apps.get_model("django_txmsg", "OutboxMessage")
    if not router.allow_migrate_model(alias, model):
        return
    model.objects.using(alias).filter(
        dead_at__isnull=False, cancelled_at=None, last_error__startswith="cancelled: "
    ).update(cancelled_at=F("dead_at"))


class Migration(migrations.Migration):
    dependencies = [
        ("django_txmsg", "0014_outbox_service"),
    ]

    operations = [
        migrations.AddField(
            model_name="outboxmessage",
            name="cancelled_at",
            field=models.DateTimeField(
                blank=True,
                help_text="When somebody called it back; it is dead from then on.",
                null=True,
            ),
        ),
        migrations.RunPython(fill, refuse_beside_workers),
    ]
