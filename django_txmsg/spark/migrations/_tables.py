"""What the pipeline has in a database: tables, and PostgreSQL's change marks.

The core's early migrations made all of it for everybody. So the pipeline's own takes
over what is there, and the core's lets go of what nobody wants to keep.
"""

from __future__ import annotations

from typing import Any

from django.apps import apps as installed
from django.db.migrations.recorder import MigrationRecorder

from ...django_internals import in_block

LABEL = "txmsg_spark"
MODELS = ("ArchiveMark", "PipelineRun", "StagedMessage", "StoredRun")
MARKED = ("django_txmsg_outboxmessage", "django_txmsg_inboxmessage")

FUNCTION = """
    CREATE OR REPLACE FUNCTION django_txmsg_mark_change() RETURNS trigger
    LANGUAGE plpgsql AS $$
    BEGIN
        NEW.changed_xid := pg_current_xact_id();
        RETURN NEW;
    END $$;
"""
# Added without a default, the columns rewrite no row. A row that is there already has
# none: it is older than every transaction that runs from here on.
MARKS = """
    ALTER TABLE {table} ADD COLUMN IF NOT EXISTS created_xid xid8,
        ADD COLUMN IF NOT EXISTS changed_xid xid8;
    ALTER TABLE {table} ALTER COLUMN created_xid SET DEFAULT pg_current_xact_id(),
        ALTER COLUMN changed_xid SET DEFAULT pg_current_xact_id();
    DROP TRIGGER IF EXISTS {table}_mark ON {table};
    CREATE TRIGGER {table}_mark BEFORE UPDATE ON {table}
        FOR EACH ROW EXECUTE FUNCTION django_txmsg_mark_change();
"""
INDEX = """
    {create} {table}_xid ON {table} USING brin ((created_xid::text::bigint))
        WITH (pages_per_range = 32, autosummarize = on)
"""
UNMARK = """
    DROP TRIGGER IF EXISTS {table}_mark ON {table};
    DROP INDEX IF EXISTS {table}_xid;
    ALTER TABLE {table} DROP COLUMN IF EXISTS created_xid,
        DROP COLUMN IF EXISTS changed_xid;
"""


def is_kept(connection: Any) -> bool:
    """Tell whether the pipeline's app is, or was, at home in this database."""
    return installed.is_installed("django_txmsg.spark") or any(
        label == LABEL
        for label, _ in MigrationRecorder(connection).applied_migrations()
    )


def is_the_cores(connection: Any) -> bool:
    """Tell whether the core still counts all of this as its own."""
    return not any(
        label == "django_txmsg" and name.endswith("_pipeline_app")
        for label, name in MigrationRecorder(connection).applied_migrations()
    )


def make_tables(apps: Any, label: str, schema_editor: Any) -> None:
    """Make the tables that are not there."""
    connection = schema_editor.connection
    there = connection.introspection.table_names()
    for name in MODELS:
        model = apps.get_model(label, name)
        if model._meta.db_table in there:
            continue
        schema_editor.create_model(model)
        if name == "StagedMessage" and connection.vendor == "postgresql":
            # What a crash empties is staged again by the run that staged it.
            schema_editor.execute(f"ALTER TABLE {model._meta.db_table} SET UNLOGGED")


def drop_tables(
    apps: Any, label: str, schema_editor: Any, *, even_if_used: bool
) -> None:
    """Drop the tables; those with rows only where that is asked for."""
    connection = schema_editor.connection
    there = connection.introspection.table_names()
    for name in MODELS:
        model = apps.get_model(label, name)
        if model._meta.db_table not in there:
            continue
        if even_if_used or not model.objects.using(connection.alias).exists():
            schema_editor.delete_model(model)


def mark_changes(schema_editor: Any) -> None:
    """Let the rows of outbox and inbox carry their transactions' ids: PostgreSQL."""
    if schema_editor.connection.vendor == "postgresql":
        schema_editor.execute(FUNCTION)
        for table in MARKED:
            schema_editor.execute(MARKS.format(table=table))


def unmark_changes(schema_editor: Any) -> None:
    """Undo `mark_changes()`, whoever did it."""
    if schema_editor.connection.vendor == "postgresql":
        for table in MARKED:
            schema_editor.execute(UNMARK.format(table=table))
        schema_editor.execute("DROP FUNCTION IF EXISTS django_txmsg_mark_change()")


def index_marks(schema_editor: Any) -> None:
    """Make the index that streams read by. Writers go on meanwhile, where no
    transaction is open."""
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


def move_content_types(connection: Any, before: str, after: str) -> None:
    """Take permissions and the admin's history along, with what they hang on."""
    if "django_content_type" not in connection.introspection.table_names():
        return
    names = [name.lower() for name in MODELS]
    places = ", ".join(["%s"] * len(names))
    with connection.cursor() as cursor:
        cursor.execute(
            f"UPDATE django_content_type SET app_label = %s WHERE app_label = %s"
            f" AND model IN ({places}) AND model NOT IN (SELECT model FROM"
            " django_content_type WHERE app_label = %s)",
            [after, before, *names, after],
        )
