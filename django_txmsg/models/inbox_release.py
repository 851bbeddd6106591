"""Releases waiting messages of an ordered stage: when their predecessor ends, when they
are rechecked, or when their wait expires.

A message that ends releases its followers in the last statement of its transaction.
Followers that this misses are rechecked at growing intervals. A predecessor that never
arrives, or blocks the others without end, is passed after a time-out or by an operator.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Collection
from typing import Any

from django.db import connections, transaction

from ..rules.inbox import OPEN
from .fields import (
    began_sql,
    ids_sql,
    later_sql,
    later_value,
    limit_waits,
    now_sql,
    skip_locked_sql,
)
from .inbox_turn import behind_sql, never_sql, passed_sql, waits_sql
from .inbox_waiting import FIRST_PAUSE, LONGEST_PAUSE, WaitingManager

#: Waiting rows rechecked, and released, in one statement.
ASKED = 1000
#: Seconds to wait for a predecessor that may never arrive, at a stage that does not
#: skip: one that is on its way arrives sooner.
ON_ITS_WAY = 120.0
#: Seconds that an operator's command waits for a message that a worker holds.
PATIENCE = 5.0


class ReleaseManager(WaitingManager):
    """The transitions of waiting messages whose turn comes, each in one statement."""

    def wake(self, stage: str, messages: Collection[uuid.UUID]) -> int:
        """Make the followers of messages that end in this transaction due. Returns how
        many there are. Must be the transaction's last statement: a message that commits
        after it began finds the ended one itself."""
        connection = connections[self.db]
        ids, values = ids_sql(connection, "waits_for", messages)
        with connection.cursor() as cursor:
            cursor.execute(
                f"UPDATE {self._table} SET due_at = {now_sql(connection)},"  # noqa: S608 - constants only
                f" waits_for = NULL WHERE stage = %s AND {ids} AND {OPEN.sql()}",
                [stage, *values],
            )
            return int(cursor.rowcount)

    def ask(self, stage: str, *, skips: bool, soon: bool = False) -> int:
        """Recheck a stage's due waiting rows, and postpone those whose turn has not
        come, by a second if they must be rechecked `soon`. Returns how many were
        postponed."""
        longest = FIRST_PAUSE if soon else LONGEST_PAUSE
        connection, table = connections[self.db], self._table
        now, waited = now_sql(connection), "clock_timestamp() - o.waits_since"
        passed = passed_sql("c.waits_for", "c.stage", skips=skips)
        if connection.vendor == "postgresql":
            pause = (
                f"{now} + greatest(make_interval(secs => {FIRST_PAUSE}),"
                f" least(make_interval(secs => {longest}), {waited}))"
            )
        else:
            waited = "(julianday('now') - julianday(o.waits_since)) * 86400"
            pause = (
                "strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('+%%.3f seconds',"
                f" max({FIRST_PAUSE}, min({longest}, {waited}))))"
            )
        # Read first, and changed only if unchanged since: a message that ended after
        # this statement began has released it already.
        with connection.cursor() as cursor:
            cursor.execute(
                f"""
                WITH found AS MATERIALIZED (
                    SELECT c.id, c.due_at, {behind_sql("c")} AS behind FROM {table} c
                    WHERE c.stage = %s AND c.due_at <= {began_sql(connection)}
                      AND {waits_sql("c")} AND NOT {passed}
                    ORDER BY c.due_at, c.id LIMIT {ASKED})
                UPDATE {table} AS o
                SET due_at = CASE WHEN o.id IN (SELECT id FROM found WHERE behind)
                                  THEN {never_sql(connection)} ELSE {pause} END
                WHERE o.id IN (
                    SELECT i.id FROM {table} i JOIN found ON found.id = i.id
                    WHERE i.due_at = found.due_at AND {waits_sql("i")}
                    {skip_locked_sql(connection) and "FOR UPDATE OF i SKIP LOCKED"})
                """,  # noqa: S608 - constants only
                [stage],
            )
            return int(cursor.rowcount)

    def despair(
        self,
        stage: str,
        *,
        skips: bool,
        patience: float,
        retention: dt.timedelta | None,
        link: str,
    ) -> int:
        """Release messages whose predecessor is missing and whose wait has expired, if
        no earlier message of their key is open here. `link` is the header that names
        the predecessor. Returns how many."""
        connection, table = connections[self.db], self._table
        held = "e.dead_at IS NULL"
        lost, parameters = "", [stage, later_value(connection, -patience)]
        if not skips:
            held = (
                f"({held} OR NOT {passed_sql('e.message_id', 'e.stage', skips=False)})"
            )
            lost = (
                " AND (c.after_at < (SELECT s.ordered_since"
                " FROM django_txmsg_stagestate s WHERE s.stage = c.stage)"
            )
            parameters[1] = later_value(connection, -min(patience, ON_ITS_WAY))
            if retention is not None:
                lost += f" OR c.after_at < {later_sql(connection)}"
                parameters.append(later_value(connection, -retention.total_seconds()))
            lost += ")"
        with connection.cursor() as cursor:
            cursor.execute(
                f"""
                UPDATE {table} SET due_at = {now_sql(connection)}, waits_for = NULL,
                    headers = {_without(connection, link)}
                WHERE id IN (
                    SELECT c.id FROM {table} c
                    WHERE c.stage = %s AND c.due_at <= {began_sql(connection)}
                      AND {waits_sql("c")}
                      AND c.waits_since <= {later_sql(connection)}
                      AND NOT EXISTS (SELECT 1 FROM {table} p
                          WHERE p.message_id = c.waits_for AND p.stage = c.stage)
                      {lost}
                      AND NOT EXISTS (SELECT 1 FROM {table} e
                          WHERE e.stage = c.stage AND e.key = c.key AND NOT e.key = ''
                            AND e.processed_at IS NULL AND {held} AND e.id <> c.id
                            AND (e.after_at IS NULL OR e.after_at < c.after_at))
                    ORDER BY c.due_at, c.id LIMIT {ASKED} {skip_locked_sql(connection)})
                """,  # noqa: S608 - constants only
                parameters,
            )
            return int(cursor.rowcount)

    def let_go(self, stage: str, key: str, *, link: str) -> int:
        """Release the first waiting message of a key on an operator's request, whatever
        it waits for. Returns how many were released: 1, or 0 if none waits, or if the
        first one was released meanwhile.

        Raises OperationalError if a worker holds it for longer than PATIENCE: it is
        running.
        """
        connection, table = connections[self.db], self._table
        # The first one is chosen once, even if a worker holds it: no other one is
        # meant. Its lease is removed, so that a worker that is about to put it back
        # changes nothing.
        with transaction.atomic(using=self.db), connection.cursor() as cursor:
            limit_waits(connection, PATIENCE)
            cursor.execute(
                f"UPDATE {table} SET due_at = {now_sql(connection)}, waits_for = NULL,"  # noqa: S608 - constants only
                " lease_until = NULL, lease_token = NULL,"
                f" headers = {_without(connection, link)} WHERE id = (SELECT c.id"
                f" FROM {table} c WHERE c.stage = %s AND c.key = %s AND NOT c.key = ''"
                " AND c.waits_for IS NOT NULL AND c.processed_at IS NULL"
                " AND c.dead_at IS NULL ORDER BY c.after_at, c.id LIMIT 1)"
                f" AND waits_for IS NOT NULL AND {OPEN.sql()}",
                [stage, key],
            )
            return int(cursor.rowcount)

    def wait_no_more(self, stage: str) -> int:
        """Release all waiting messages of a stage that is no longer ordered."""
        connection = connections[self.db]
        with connection.cursor() as cursor:
            cursor.execute(
                f"UPDATE {self._table} SET due_at = {now_sql(connection)},"  # noqa: S608 - constants only
                " waits_for = NULL WHERE stage = %s AND waits_for IS NOT NULL"
                f" AND {OPEN.sql()}",
                [stage],
            )
            return int(cursor.rowcount)


def _without(connection: Any, header: str) -> str:
    """Return SQL for the headers of a row without one of them."""
    if connection.vendor == "postgresql":
        return f"headers - '{header}'"
    return f"json_remove(headers, '$.\"{header}\"')"
