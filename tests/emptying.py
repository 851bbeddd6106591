"""Empties the tables after a test that commits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.core.management.commands import flush
from django.db.backends.postgresql.operations import DatabaseOperations

#: Bytes of a table that is truncated.
LARGE = 1 << 20

#: What migrations fill, and no test changes.
FILLED = {"auth_permission", "django_content_type"}

_sql_flush = DatabaseOperations.sql_flush


def delete_where_little_is() -> None:
    """Make Django use DELETE instead of TRUNCATE for tables with few pages, under the
    same lock. TRUNCATE creates new files for each table and all its indexes, and syncs
    them."""
    DatabaseOperations.sql_flush = sql_flush


def keep_permissions() -> None:
    """Make Django keep the rows of permissions and content types. Creating them again
    took a quarter of a second in each test."""
    flush.sql_flush = flush_statements
    flush.emit_post_migrate_signal = lambda *_, **__: None


def flush_statements(style: Any, connection: Any, **how: Any) -> list[str]:
    """Return the statements that empty all tables, except permissions and content
    types."""
    names = connection.introspection.django_table_names(
        only_existing=True, include_views=False
    )
    tables = [name for name in names if name not in FILLED]
    statements: list[str] = connection.ops.sql_flush(style, tables, **how)
    return statements


def sql_flush(
    self: DatabaseOperations, style: Any, tables: Sequence[str], **how: Any
) -> list[str]:
    """Return the statements that empty these tables."""
    if not tables or not how.get("allow_cascade") or how.get("reset_sequences"):
        return _sql_flush(self, style, tables, **how)
    with self.connection.cursor() as cursor:
        cursor.execute(
            "SELECT name, pg_relation_size(quote_ident(name)) FROM"
            " unnest(%s::text[]) AS g(name)",
            [list(tables)],
        )
        sizes = {name: size for name, size in cursor.fetchall() if size}
    large = [name for name, size in sizes.items() if size > LARGE]
    small = [self.quote_name(name) for name in sizes.keys() - large]
    if not small:
        return _sql_flush(self, style, large, **how)
    # In one round trip.
    statements = [f"LOCK TABLE {', '.join(small)} IN ACCESS EXCLUSIVE MODE"]
    statements += [f"DELETE FROM {name}" for name in small]
    return ["; ".join(statements), *_sql_flush(self, style, large, **how)]
