"""A precondition of commands: the package's tables exist."""

from __future__ import annotations

from django.core.management.base import CommandError
from django.db import DatabaseError, InterfaceError, connections

from ...models import OutboxMessage


def require_tables(*aliases: str) -> None:
    """Raise CommandError if the migrations have not been applied; if the database does
    not answer, the command itself reports it or waits."""
    for alias in aliases:
        try:
            names = connections[alias].introspection.table_names()
        except (DatabaseError, InterfaceError):
            continue
        if OutboxMessage._meta.db_table not in names:
            where = "" if alias == "default" else f" --database {alias}"
            raise CommandError(
                f"The tables of django_txmsg are not in database {alias!r}. Run "
                f"manage.py migrate{where}."
            )
