"""One module for each supported database, with the SQL that reads a message log from
it."""

from __future__ import annotations

from ..spec import SourceSpec
from .base import Database


def open_database(spec: SourceSpec) -> Database:
    """Return the database of a service, without connecting."""
    if spec.vendor == "postgresql":
        from .postgres import Postgres

        return Postgres(spec.conninfo())
    from .sqlite import Sqlite

    return Sqlite(spec.path)
