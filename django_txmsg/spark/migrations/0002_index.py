"""The index for streams that read from PostgreSQL.

It is a separate migration, because the tables may be large: the index is created
concurrently, and PostgreSQL does that only outside a transaction.
"""

from __future__ import annotations

from typing import Any

from django.db import migrations

from ...django_internals import in_block

INDEX = """
    {create} {table}_xid ON {table} USING brin ((created_xid::text::bigint))
        WITH (pages_per_range = 32, autosummarize = on)
"""
MARKED = ("django_txmsg_outboxmessage", "django_txmsg_inboxmessage")


def index_marks(apps: Any, schema_editor: Any) -> None:
    """Create the indexes. Outside a transaction, other sessions can write meanwhile."""
    connection = schema_editor.connection
    if connection.vendor != "postgresql":
        return
    create = "CREATE INDEX IF NOT EXISTS"
    if not in_block(connection):
        create = "CREATE INDEX CONCURRENTLY IF NOT EXISTS"
    for table in MARKED:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT 1 FROM pg_index WHERE indexrelid = to_regclass(%s)"
                " AND NOT indisvalid",
                [f"{table}_xid"],
            )
            if cursor.fetchone():  # an attempt that was stopped has left it
                cursor.execute(f"DROP INDEX {table}_xid")
        schema_editor.execute(INDEX.format(create=create, table=table))


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("txmsg_spark", "0001_initial")]
    # They go with their columns.
    operations = [migrations.RunPython(index_marks, migrations.RunPython.noop)]
