"""A pending message holds its unique key alone: the index, built beside the traffic."""

from __future__ import annotations

from typing import Any

from django.db import migrations, models

TABLE, INDEX = "django_txmsg_outboxmessage", "txmsg_outbox_unique_key"


class AddUniqueConcurrently(migrations.AddConstraint):
    """On PostgreSQL, without a lock that writers wait for; again after a failure."""

    def database_forwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        if schema_editor.connection.vendor != "postgresql":
            super().database_forwards(app_label, schema_editor, from_state, to_state)
            return
        model = to_state.apps.get_model(app_label, self.model_name)
        if self.allow_migrate_model(schema_editor.connection.alias, model):
            schema_editor.execute(f"DROP INDEX IF EXISTS {INDEX}")
            schema_editor.execute(
                f"CREATE UNIQUE INDEX CONCURRENTLY {INDEX} ON {TABLE} (unique_key)"
                " WHERE dead_at IS NULL AND dispatched_at IS NULL"
                " AND unique_key IS NOT NULL"
            )


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("django_txmsg", "0009_pending")]
    operations = [
        AddUniqueConcurrently(
            model_name="outboxmessage",
            constraint=models.UniqueConstraint(
                condition=models.Q(
                    ("dead_at__isnull", True),
                    ("dispatched_at__isnull", True),
                    ("unique_key__isnull", False),
                ),
                fields=("unique_key",),
                name=INDEX,
            ),
        ),
    ]
