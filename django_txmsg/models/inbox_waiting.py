"""Waiting for one's turn: messages of an ordered stage that came before their time.

A waiting row is a parked one that names its predecessor in `waits_for`. It is due when
that one ends, which says so as the last thing in its transaction; what is missed is
asked for again, further and further apart. Behind one that waits itself it is due
`NEVER`: that one's end comes later than anything which is committed by then.
"""

from __future__ import annotations

import datetime as dt
import json
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from django.db import connections

from .fields import (
    began_sql,
    later_sql,
    later_value,
    no_wait_sql,
    now_sql,
    prepared,
    skip_locked_sql,
)
from .inbox_parked import ParkedManager
from .inbox_record import OPEN
from .inbox_turn import Turn, passed_sql, read_id, uuid_value

#: Due when its predecessor says so.
NEVER = "9000-01-01 00:00:00"
#: Seconds until one that had to wait is asked again, at first and at most.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
#: Waiting rows asked, and let go, in one statement.
ASKED = 1000
#: Seconds that one waits for what has not come and may never do, where a message is not
#: passed: a predecessor on its way is here sooner.
ON_ITS_WAY = 120.0

#: Names its predecessor and is in nobody's hands. Once it is claimed, its transaction
#: may have said already that it ends.
_WAITS = (
    "{0}.waits_for IS NOT NULL AND {0}.lease_token IS NULL"
    " AND {0}.processed_at IS NULL AND {0}.dead_at IS NULL"
)


class WaitingManager(ParkedManager):
    """The transitions of messages that wait for their turn, each in one statement."""

    def has_come(self, turn: Turn) -> bool:
        """Return whether the message's predecessor lets it go."""
        if turn.after_id is None:
            return True
        return turn.after_id in self.let_go_by([turn.after_id], turn)

    def let_go_by(
        self, predecessors: Collection[uuid.UUID], turn: Turn
    ) -> set[uuid.UUID]:
        """Return those of the messages that let their followers go, at the stage of
        one of these."""
        if not predecessors:
            return set()
        connection = connections[self.db]
        table, values = _ids(connection, predecessors)
        passed = passed_sql("g.id", "%s", skips=turn.skips)
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT g.id FROM {table} WHERE {passed}",  # noqa: S608 - constants only
                [*values, turn.stage],
            )
            return {read_id(found) for (found,) in cursor.fetchall()}

    def lock_keys(self, turns: Collection[Turn]) -> set[str]:
        """Keep others from the keys of these messages until the transaction ends.
        Returns those keys that nobody else has."""
        connection = connections[self.db]
        wanted = {turn.key: turn.lock for turn in turns}
        if connection.vendor != "postgresql":
            return set(wanted)
        keys = list(wanted)
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT key FROM unnest(%s::text[], %s::bigint[]) AS g(key, lock)"
                " WHERE pg_try_advisory_xact_lock(lock)",
                [keys, [wanted[key] for key in keys]],
            )
            return {key for (key,) in cursor.fetchall()}

    def wait(
        self,
        pk: int,
        turn: Turn,
        *,
        headers: Mapping[str, str],
        body: bytes,
        token: uuid.UUID | None,
        uncounted: int,
        aside: bool = False,
    ) -> bool:
        """Park a message whose turn has not come, or, put `aside`, one whose key is in
        other hands; and take back so many attempts that were counted. Outside of any
        transaction: the next statement must see what others have done meanwhile.

        Returns whether it can be claimed at once, after all.
        """
        connection = connections[self.db]
        held, fence = self.fence(token)
        condition = held or " AND due_at IS NULL"
        waits_for = None if aside else turn.after_id
        # As it is compared again: drivers make instants of SQLite's own text.
        due = "due_at" if _native(connection) else "CAST(due_at AS TEXT)"
        with connection.cursor() as cursor:
            cursor.execute(
                f"UPDATE {self._table} SET due_at = {later_sql(connection)},"  # noqa: S608 - constants only
                f" waits_since = COALESCE(waits_since, {now_sql(connection)}),"
                " waits_for = %s, key = %s,"
                " after_at = %s, headers = COALESCE(headers, %s),"
                " body = COALESCE(body, %s), lease_until = NULL, lease_token = NULL,"
                " attempts = attempts - %s"
                f" WHERE id = %s AND {OPEN}{condition} RETURNING {due}",
                [
                    later_value(connection, FIRST_PAUSE),
                    prepared(self.model, "waits_for", waits_for, connection),
                    turn.key,
                    prepared(self.model, "after_at", turn.after_at, connection),
                    prepared(self.model, "headers", dict(headers), connection),
                    prepared(self.model, "body", body, connection),
                    uncounted,
                    pk,
                    *fence,
                ],
            )
            row = cursor.fetchone()
        if row is None or waits_for is None:
            return False
        return self._look(pk, turn, row[0])

    def _look(self, pk: int, turn: Turn, due: Any) -> bool:
        """Ask once more for one that has just been parked: its predecessor may have
        ended just before, when it was not to be seen, or be waiting itself."""
        connection = connections[self.db]
        now, never = now_sql(connection), _never(connection)
        # Forgotten in a crash, it is asked again.
        no_wait, waits_not = no_wait_sql(connection)
        with_no_wait = no_wait and f"WITH {no_wait}"
        passed = passed_sql("c.waits_for", "c.stage", skips=turn.skips)
        with connection.cursor() as cursor:
            cursor.execute(
                f"{with_no_wait} UPDATE {self._table} AS c SET"  # noqa: S608 - constants only
                f" due_at = CASE WHEN {passed} THEN {now} ELSE {never} END,"
                f" waits_for = CASE WHEN {passed} THEN NULL ELSE waits_for END"
                f" WHERE c.id = %s AND c.due_at = %s AND {_WAITS.format('c')}"
                f" AND ({passed} OR {self._behind}) AND {waits_not}"
                " RETURNING waits_for",
                [pk, due],
            )
            row = cursor.fetchone()
        return row is not None and row[0] is None

    def wake(self, stage: str, messages: Collection[uuid.UUID]) -> int:
        """Make the followers of messages that end in this transaction due. Returns how
        many there are. The transaction's last statement: what commits later than it
        begins finds the ended message itself."""
        connection = connections[self.db]
        ids, values = _one_of(connection, "waits_for", messages)
        with connection.cursor() as cursor:
            cursor.execute(
                f"UPDATE {self._table} SET due_at = {now_sql(connection)},"  # noqa: S608 - constants only
                f" waits_for = NULL WHERE stage = %s AND {ids} AND {OPEN}",
                [stage, *values],
            )
            return int(cursor.rowcount)

    def wait_for_copy(self, stage: str, of: uuid.UUID, copy: uuid.UUID) -> None:
        """Let the followers of a dead message wait for its copy instead."""
        self.filter(stage=stage, waits_for=of).update(waits_for=copy)

    def aside(self, pk: int, turn: Turn) -> None:
        """Note the key of a message that failed: what it holds up is shown by that."""
        self.filter(pk=pk).update(
            key=turn.key, after_at=turn.after_at, waits_for=None, waits_since=None
        )

    def ask(self, stage: str, *, skips: bool) -> int:
        """Ask the waiting rows of a stage that are due whether their turn has come, and
        put those off whose turn has not. Returns how many were."""
        connection, table = connections[self.db], self._table
        now, waited = now_sql(connection), "clock_timestamp() - o.waits_since"
        passed = passed_sql("c.waits_for", "c.stage", skips=skips)
        if connection.vendor == "postgresql":
            pause = (
                f"{now} + greatest(make_interval(secs => {FIRST_PAUSE}),"
                f" least(make_interval(secs => {LONGEST_PAUSE}), {waited}))"
            )
        else:
            waited = "(julianday('now') - julianday(o.waits_since)) * 86400"
            pause = (
                "strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('+%%.3f seconds',"
                f" max({FIRST_PAUSE}, min({LONGEST_PAUSE}, {waited}))))"
            )
        # Read first, and changed where it still is as it was read: it has been woken
        # else, by one that ended after this statement began.
        with connection.cursor() as cursor:
            cursor.execute(
                f"""
                WITH found AS MATERIALIZED (
                    SELECT c.id, c.due_at, {self._behind} AS behind FROM {table} c
                    WHERE c.stage = %s AND c.due_at <= {began_sql(connection)}
                      AND {_WAITS.format("c")} AND NOT {passed}
                    ORDER BY c.due_at, c.id LIMIT {ASKED})
                UPDATE {table} AS o
                SET due_at = CASE WHEN o.id IN (SELECT id FROM found WHERE behind)
                                  THEN {_never(connection)} ELSE {pause} END
                WHERE o.id IN (
                    SELECT i.id FROM {table} i JOIN found ON found.id = i.id
                    WHERE i.due_at = found.due_at AND {_WAITS.format("i")}
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
        """Let messages go whose predecessor is not here and need not be waited for any
        longer, if nothing of their key before them is open here. `link` is the header
        that names it. Returns how many."""
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
                      AND {_WAITS.format("c")}
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
        """Let the first waiting message of a key go, by an operator's word, whatever
        it waits for. Returns how many were: 1 or 0."""
        connection, table = connections[self.db], self._table
        with connection.cursor() as cursor:
            cursor.execute(
                f"UPDATE {table} SET due_at = {now_sql(connection)}, waits_for = NULL,"  # noqa: S608 - constants only
                f" headers = {_without(connection, link)} WHERE id IN (SELECT c.id"
                f" FROM {table} c WHERE c.stage = %s AND c.key = %s AND NOT c.key = ''"
                f" AND {_WAITS.format('c')} ORDER BY c.after_at, c.id LIMIT 1"
                f" {skip_locked_sql(connection)})",
                [stage, key],
            )
            return int(cursor.rowcount)

    def wait_no_more(self, stage: str) -> int:
        """Let all waiting messages of a stage go that runs in order no longer."""
        connection = connections[self.db]
        with connection.cursor() as cursor:
            cursor.execute(
                f"UPDATE {self._table} SET due_at = {now_sql(connection)},"  # noqa: S608 - constants only
                " waits_for = NULL WHERE stage = %s AND waits_for IS NOT NULL"
                f" AND {OPEN}",
                [stage],
            )
            return int(cursor.rowcount)

    def behind(self, stage: str, key: str, most: int) -> int:
        """Return how many messages of a key wait at a stage, `most` at most."""
        rows = self.filter(stage=stage, key=key, waits_for__isnull=False)
        return int(rows.exclude(key="").filter(processed_at=None)[:most].count())

    @property
    def _behind(self) -> str:
        """The condition that the predecessor of `c` waits itself."""
        return (
            f"EXISTS (SELECT 1 FROM {self._table} w WHERE w.message_id = c.waits_for"  # noqa: S608 - constants only
            f" AND w.stage = c.stage AND {_WAITS.format('w')})"
        )


def _never(connection: Any) -> str:
    return f"'{NEVER}+00'::timestamptz" if _native(connection) else f"'{NEVER}'"


def _without(connection: Any, header: str) -> str:
    """Return SQL for the headers of a row without one of them."""
    if _native(connection):
        return f"headers - '{header}'"
    return f"json_remove(headers, '$.\"{header}\"')"


def _ids(connection: Any, ids: Collection[uuid.UUID]) -> tuple[str, Sequence[Any]]:
    """Return SQL for ids as a table `g (id)`, and its parameters."""
    if _native(connection):
        return "unnest(%s::uuid[]) AS g(id)", [list(ids)]
    given = json.dumps([one.hex for one in ids])
    return "(SELECT value AS id FROM json_each(%s)) AS g", [given]


def _one_of(
    connection: Any, column: str, ids: Collection[uuid.UUID]
) -> tuple[str, Sequence[Any]]:
    """Return the condition that a column is one of the ids, and its parameters."""
    if len(ids) == 1:
        return f"{column} = %s", [uuid_value(connection, one) for one in ids]
    table, values = _ids(connection, ids)
    return f"{column} IN (SELECT id FROM {table})", values  # noqa: S608 - constants only


def _native(connection: Any) -> bool:
    return bool(connection.vendor == "postgresql")
