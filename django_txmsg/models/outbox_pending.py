"""Cancels pending rows, or lets them leave at another time.

A row that a relay holds is never changed: it may be on its way to the broker.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Collection, Mapping
from typing import Any

from django.db import connections, models

from ..rules import inbox, lease
from ..rules.outbox import PENDING, PENDING_OTHERWISE
from .fields import ids_sql, later_sql, later_value, now_sql, prepared
from .inbox import InboxMessage

#: The primary key and the broker of each changed row.
Changed = list[tuple[int, str]]


class PendingManager(models.Manager):  # type: ignore[type-arg]  # not generic at run time
    """The transitions of pending rows that no relay holds, by their message id."""

    def cancel(self, message_id: uuid.UUID, *, why: str) -> Changed:
        """Cancel rows, without dead letters: no operator needs to act. Not rows that
        have a place in the order of their key: the next message waits for them."""
        now = now_sql(connections[self.db])
        assign = (
            f"dead_at = {now}, cancelled_at = {now}, last_error = %s,"
            " lease_until = NULL, lease_token = NULL"
        )
        note = f"cancelled: {why}"[:2000]
        return self._change(message_id, assign, [note], also="linked_at IS NULL")

    def make_due(
        self,
        message_id: uuid.UUID,
        *,
        delay: float | None = None,
        at: dt.datetime | None = None,
    ) -> Changed:
        """Let rows leave at an instant, or in that many seconds from now."""
        connection: Any = connections[self.db]
        if at is not None:
            value = prepared(self.model, "due_at", at, connection)
            return self._change(message_id, "due_at = %s", [value])
        value = later_value(connection, delay or 0.0)
        return self._change(message_id, f"due_at = {later_sql(connection)}", [value])

    def free(self, keys: Collection[str], cause: uuid.UUID | None = None) -> None:
        """Take these unique keys from rows that hold them no longer: the message has
        expired or, if it holds its key until then, was processed or buried here, or is
        the `cause`, which is being processed by this transaction."""
        connection, table = connections[self.db], self.model._meta.db_table
        inbox_table = InboxMessage._meta.db_table
        having, values = ids_sql(connection, "unique_key", keys)
        received = (
            f"EXISTS (SELECT 1 FROM {inbox_table} i WHERE o.unique_until_processed"  # noqa: S608 - constants only
            f" AND i.message_id = o.message_id AND {{}})"
        )
        still = received.format(inbox.OPEN.sql("i"))
        ended = received.format((~inbox.OPEN).sql("i"))
        caused = ""
        if cause is not None:
            caused = " OR (o.unique_until_processed AND o.message_id = %s)"
            values = [*values, prepared(self.model, "message_id", cause, connection)]
        with connection.cursor() as cursor:
            cursor.execute(
                f"UPDATE {table} AS o SET unique_key = NULL WHERE {having}"  # noqa: S608 - constants only
                f" AND dead_at IS NULL AND ({ended}"
                f" OR (expires_at <= {now_sql(connection)} AND NOT {still}){caused})",
                values,
            )

    def hold(self, wanted: Mapping[str, float | None]) -> list[int]:
        """Lock the pending rows with these unique keys until the open transaction ends,
        and return the primary keys of all rows that hold them.

        `wanted` maps each key to the seconds after which the message that reuses the
        row expires, or None for never: the row will expire no sooner.
        """
        connection, table = connections[self.db], self.model._meta.db_table
        now, later = now_sql(connection), later_sql(connection)
        # Not those that a relay is sending: its mark would wait for us.
        pending = f"{{}} AND {PENDING.sql()} AND {lease.FREE.sql(now=now)}"
        # While the row is locked so, claims skip it, and a transaction that wants to
        # change it waits; another one that locks it like this does not.
        lock = "FOR SHARE" if connection.vendor == "postgresql" else ""
        having, keys = ids_sql(connection, "unique_key", wanted)
        by_expiry: dict[float | None, list[str]] = {}
        for key, expiry in wanted.items():
            by_expiry.setdefault(expiry, []).append(key)
        with connection.cursor() as cursor:
            for expiry, some in by_expiry.items():
                some_have, given = ids_sql(connection, "unique_key", some)
                value, sooner, seconds = "NULL", "IS NOT NULL", list[Any]()
                if expiry is not None:
                    value, sooner = later, f"< {later}"
                    seconds = [later_value(connection, expiry)]
                cursor.execute(
                    f"UPDATE {table} SET expires_at = {value}"  # noqa: S608 - constants only
                    f" WHERE {pending.format(some_have)} AND expires_at {sooner}",
                    [*seconds, *given, *seconds],
                )
            cursor.execute(
                f"SELECT id FROM {table} WHERE {pending.format(having)} {lock}",  # noqa: S608 - constants only
                keys,
            )
            held = [pk for (pk,) in cursor.fetchall()]
            cursor.execute(
                f"SELECT id FROM {table} WHERE {having} AND dead_at IS NULL"  # noqa: S608 - constants only
                " AND unique_until_processed AND (dispatched_at IS NOT NULL"
                f" OR {lease.HELD.sql(now=now)})",
                keys,
            )
            return held + [pk for (pk,) in cursor.fetchall()]

    def _change(
        self, message_id: uuid.UUID, assign: str, values: list[Any], also: str = "TRUE"
    ) -> Changed:
        connection, table = connections[self.db], self.model._meta.db_table
        pending = PENDING_OTHERWISE.sql()
        free = lease.FREE.sql(now=now_sql(connection))
        with connection.cursor() as cursor:
            cursor.execute(
                f"UPDATE {table} SET {assign} WHERE message_id = %s AND {pending}"  # noqa: S608 - constants only
                f" AND {free} AND {also}"
                f" RETURNING id, broker",
                [*values, prepared(self.model, "message_id", message_id, connection)],
            )
            return list(cursor.fetchall())
