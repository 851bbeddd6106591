"""What only PostgreSQL has, and does well: change marks, BRIN, frugal vacuuming.

Everywhere else this migration does nothing.
"""

from __future__ import annotations

from typing import Any

from django.db import migrations

MARKED = ("django_txmsg_outboxmessage", "django_txmsg_inboxmessage")

FORWARDS = """
    CREATE FUNCTION django_txmsg_mark_change() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        NEW.changed_xid := pg_current_xact_id();
        RETURN NEW;
    END $$;
"""
BACKWARDS = "DROP FUNCTION django_txmsg_mark_change() CASCADE;"

# A claim leaves a dead row version behind: room for it on the same page keeps it out
# of the indexes, and an early vacuum keeps the index of pending rows short.
TABLE = """
    CREATE TRIGGER {table}_mark BEFORE UPDATE ON {table}
        FOR EACH ROW EXECUTE FUNCTION django_txmsg_mark_change();
    CREATE INDEX {table}_xid ON {table} USING brin ((created_xid::text::bigint))
        WITH (pages_per_range = 32, autosummarize = on);
    ALTER TABLE {table} SET (
        fillfactor = 50,
        autovacuum_vacuum_scale_factor = 0.02,
        autovacuum_vacuum_threshold = 1000,
        autovacuum_analyze_scale_factor = 0.05,
        autovacuum_vacuum_cost_limit = 2000
    );
"""

# The operator's pages ask what happened since some instant; they get no B-tree for it.
# The inbox has it on the last receipt and not on the end, which would cost the update
# that ends a message its place on the page.
SINCE = {
    "django_txmsg_outboxmessage": ("created_at", "dispatched_at"),
    "django_txmsg_inboxmessage": ("last_received_at",),
    "django_txmsg_deadletter": ("created_at",),
}
BRIN = """
    CREATE INDEX {table}_{column} ON {table} USING brin ({column})
        WITH (pages_per_range = 32, autosummarize = on);
"""

# A filter of the operator's lists by something rare would read the whole table.
RARE = {
    "django_txmsg_outboxmessage": ("destination", "key"),
    "django_txmsg_inboxmessage": ("stage",),
}
BLOOM = """
    CREATE INDEX {table}_{column} ON {table} USING brin ({column} text_bloom_ops)
        WITH (pages_per_range = 32, autosummarize = on);
"""

# What a crash empties is staged again by the run that staged it.
STAGED = "ALTER TABLE django_txmsg_stagedmessage SET UNLOGGED;"


def forwards(apps: Any, schema_editor: Any) -> None:
    if schema_editor.connection.vendor == "postgresql":
        schema_editor.execute(STAGED)
        schema_editor.execute(FORWARDS)
        for table in MARKED:
            schema_editor.execute(TABLE.format(table=table))
        for table, columns in SINCE.items():
            for column in columns:
                schema_editor.execute(BRIN.format(table=table, column=column))
        for table, columns in RARE.items():
            for column in columns:
                schema_editor.execute(BLOOM.format(table=table, column=column))


def backwards(apps: Any, schema_editor: Any) -> None:
    if schema_editor.connection.vendor == "postgresql":
        schema_editor.execute(BACKWARDS)
        for table in MARKED:
            schema_editor.execute(f"DROP INDEX {table}_xid")
        for table, columns in [*SINCE.items(), *RARE.items()]:
            for column in columns:
                schema_editor.execute(f"DROP INDEX {table}_{column}")


class Migration(migrations.Migration):
    dependencies = [("django_txmsg", "0001_initial")]
    operations = [migrations.RunPython(forwards, backwards)]
