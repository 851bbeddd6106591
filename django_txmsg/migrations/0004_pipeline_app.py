"""The pipeline's tables and columns leave the core: they are django_txmsg.spark's.

Where that app is installed nothing moves. Elsewhere they are dropped, but for a table
that has rows: it waits for the app.
"""

from __future__ import annotations

from typing import Any

from django.db import migrations

from ..spark.migrations import _tables
from ._workers import refuse_beside_workers


class RemoveFromSqlite(migrations.RemoveField):
    """Elsewhere the columns go with the pipeline's marks, or stay with its app."""

    def database_forwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        if schema_editor.connection.vendor != "postgresql":
            super().database_forwards(app_label, schema_editor, from_state, to_state)

    def database_backwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        if schema_editor.connection.vendor != "postgresql":
            super().database_backwards(app_label, schema_editor, from_state, to_state)


def forwards(apps: Any, schema_editor: Any) -> None:
    connection = schema_editor.connection
    kept = _tables.is_kept(connection)
    if not kept or connection.vendor != "postgresql":
        refuse_beside_workers(apps, schema_editor)
    if kept:
        _tables.move_content_types(connection, "django_txmsg", _tables.LABEL)
        return
    _tables.unmark_changes(schema_editor)
    _tables.drop_tables(apps, "django_txmsg", schema_editor, even_if_used=False)


def backwards(apps: Any, schema_editor: Any) -> None:
    _tables.make_tables(apps, "django_txmsg", schema_editor)
    _tables.mark_changes(schema_editor)
    _tables.index_marks(schema_editor)
    _tables.move_content_types(schema_editor.connection, _tables.LABEL, "django_txmsg")


class Migration(migrations.Migration):
    dependencies = [("django_txmsg", "0003_worker_service")]
    operations = [
        migrations.RunPython(forwards, backwards),
        *(
            RemoveFromSqlite(model_name=model, name=name)
            for model in ("outboxmessage", "inboxmessage")
            for name in ("created_xid", "changed_xid")
        ),
        migrations.SeparateDatabaseAndState(
            state_operations=[migrations.DeleteModel(name) for name in _tables.MODELS]
        ),
    ]
