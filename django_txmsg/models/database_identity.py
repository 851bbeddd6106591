"""A database's identity, and since when it has it: a row for each start of its server.

A copy of a database has its original's rows, and gets an identity of its own when it is
first used: from then on the two can be told apart.
"""

from __future__ import annotations

import datetime as dt

from django.db import connections, models, transaction
from django.db.models.functions import Now

_MAY_ASK = "SELECT has_function_privilege('pg_control_system()', 'EXECUTE')"
#: All sessions of a server see the same start time. A copy of its files starts at
#: another time; so does a standby, whose value has the same part before the last "/".
_IDENTITY = """
    SELECT current_database() || '/' || oid || '@' || {system} || '/'
        || trunc(extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint
    FROM pg_database WHERE datname = current_database()
"""
_SYSTEM = "(SELECT system_identifier FROM pg_control_system())"


class DatabaseIdentityManager(models.Manager):  # type: ignore[type-arg]  # not generic at run time
    """Reads and records the identity of the database."""

    def ask(self) -> str:
        """Return the present identity; "" if the database has none (SQLite)."""
        connection = connections[self.db]
        if connection.vendor != "postgresql":
            return ""
        with connection.cursor() as cursor:
            cursor.execute(_MAY_ASK)
            (may_ask,) = cursor.fetchone()
            cursor.execute(_IDENTITY.format(system=_SYSTEM if may_ask else "''"))
            (identity,) = cursor.fetchone()
        return str(identity)[-255:]

    def note(self, identity: str) -> dt.datetime:
        """Record an identity, and return when the database was first seen with it.

        In a transaction of its own. Raises database errors, on a standby too.
        """
        with transaction.atomic(using=self.db):
            self.bulk_create([self.model(identity=identity)], ignore_conflicts=True)
        seen_at: dt.datetime = self.get(identity=identity).seen_at
        return seen_at


class DatabaseIdentity(models.Model):
    """An identity of this row's database, and when it was first seen."""

    id = models.BigAutoField(primary_key=True)
    identity = models.CharField(max_length=255, unique=True)
    seen_at = models.DateTimeField(db_default=Now())

    objects = DatabaseIdentityManager()

    class Meta:
        verbose_name_plural = "database identities"

    def __str__(self) -> str:
        return self.identity
