"""Changing one's mind: a pending row is cancelled, or leaves at another time.

Nobody takes a row away from the relay that holds it: it may be on the wire.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Collection
from typing import Any

from django.db import connections, models

from .fields import ids_sql, later_sql, later_value, now_sql, prepared
from .outbox_claim import PENDING_OTHERWISE

#: How `last_error` of a row begins that was cancelled: dead, and by intent.
CANCELLED = "cancelled: "

#: The primary key and the broker of each row that was changed.
Changed = list[tuple[int, str]]


class PendingManager(models.Manager):  # type: ignore[type-arg]  # not generic at run time
    """The transitions of pending rows that no relay holds, by their message id."""

    def cancel(self, message_id: uuid.UUID, *, why: str) -> Changed:
        """End rows without a dead letter: nobody has to look after them. Not those
        that have a place in the order of their key: the next one waits for them."""
        now = now_sql(connections[self.db])
        assign = (
            f"dead_at = {now}, last_error = %s, lease_until = NULL, lease_token = NULL"
        )
        note = f"{CANCELLED}{why}"[:2000]
        return self._change(message_id, assign, [note], also="linked_at IS NULL")

    def make_due(
        self,
        message_id: uuid.UUID,
        *,
        delay: float | None = None,
        at: dt.datetime | None = None,
    ) -> Changed:
        """Let rows leave at an instant, or in so many seconds from now."""
        connection: Any = connections[self.db]
        if at is not None:
            value = prepared(self.model, "due_at", at, connection)
            return self._change(message_id, "due_at = %s", [value])
        value = later_value(connection, delay or 0.0)
        return self._change(message_id, f"due_at = {later_sql(connection)}", [value])

    def hold(self, unique_keys: Collection[str]) -> list[int]:
        """Keep the rows with these unique keys from leaving before the open transaction
        ends, and return their primary keys. What has expired loses its key."""
        connection, table = connections[self.db], self.model._meta.db_table
        having, keys = ids_sql(connection, "unique_key", unique_keys)
        # In the words of the index.
        pending = f"{having} AND dispatched_at IS NULL AND dead_at IS NULL"
        # A claim skips the row then, and who else wants to hold it does not wait.
        lock = "FOR KEY SHARE" if connection.vendor == "postgresql" else ""
        with connection.cursor() as cursor:
            cursor.execute(
                f"UPDATE {table} SET unique_key = NULL WHERE {pending}"  # noqa: S608 - constants only
                f" AND expires_at <= {now_sql(connection)}",
                keys,
            )
            cursor.execute(f"SELECT id FROM {table} WHERE {pending} {lock}", keys)  # noqa: S608 - constants only
            return [pk for (pk,) in cursor.fetchall()]

    def _change(
        self, message_id: uuid.UUID, assign: str, values: list[Any], also: str = "TRUE"
    ) -> Changed:
        connection, table = connections[self.db], self.model._meta.db_table
        pending, now = PENDING_OTHERWISE.format(""), now_sql(connection)
        with connection.cursor() as cursor:
            cursor.execute(
                f"UPDATE {table} SET {assign} WHERE message_id = %s AND {pending}"  # noqa: S608 - constants only
                f" AND (lease_until IS NULL OR lease_until < {now}) AND {also}"
                f" RETURNING id, broker",
                [*values, prepared(self.model, "message_id", message_id, connection)],
            )
            return list(cursor.fetchall())
