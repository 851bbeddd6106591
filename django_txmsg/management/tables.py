"""Preconditions of a command: a database, and the package's tables in it."""

from __future__ import annotations

from django.core.management.base import CommandError
from django.db import DatabaseError, InterfaceError, connections

from ..models import OutboxMessage

#: The exit code of a command whose database does not answer.
AWAY = 3


def require_tables(*aliases: str, waits: bool = False) -> None:
    """Raise CommandError if a database is unknown, does not answer (exit code AWAY), or
    has not been migrated. A command that `waits` for its database goes on without one
    that does not answer."""
    for alias in aliases:
        if alias not in connections:
            known = ", ".join(connections)
            raise CommandError(f"No database {alias!r} in DATABASES; known: {known}.")
        try:
            names = connections[alias].introspection.table_names()
        except (DatabaseError, InterfaceError) as error:
            if waits:
                continue
            first = str(error).strip().partition("\n")[0]
            raise CommandError(
                f"Database {alias!r} does not answer: {first}", returncode=AWAY
            ) from error
        if OutboxMessage._meta.db_table not in names:
            where = "" if alias == "default" else f" --database {alias}"
            raise CommandError(
                f"The tables of django_txmsg are not in database {alias!r}. Run "
                f"manage.py migrate{where}."
            )
