"""The databases of message logs, with the SQL of each."""

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
