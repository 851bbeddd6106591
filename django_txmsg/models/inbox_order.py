"""Order per key in the inbox: decides which messages are processed, which wait, and
which are released.

A message releases its follower as soon as the message is processed or passed. A message
is passed if it has expired, was discarded, or is dead at a stage that skips dead
messages. A replaced message is passed as soon as its copy is processed or passed.

A waiting row is a parked row that names its predecessor in `waits_for`. The row becomes
due when its predecessor ends. If the predecessor waits too, the row's due time is
`NEVER` until the predecessor releases the row.

A message becomes processed or passed in a transaction, and the last statement of that
transaction releases the message's followers. (If the transaction's isolation level is
above READ COMMITTED, it releases them before the handler runs.) If the statement misses
a follower, the follower is checked again at growing intervals. If a predecessor never
arrives, its followers are released after a time-out. An operator can release waiting
messages at any time.
"""

from __future__ import annotations

import datetime as dt
import json
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Any

from django.db import connections, transaction

from ..rules.inbox import OPEN
from .fields import SqlManager, limit_waits, no_wait_sql, read_uuid
from .turn import Turn, behind_sql, held_sql, passed_sql, passes_sql, waits_sql

#: Seconds until a waiting message is rechecked, at first and at most.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
#: Seconds at most while a stage is still receiving what is in its queue.
SHORT_PAUSE = 5.0
#: Number of waiting rows whose bytes are measured.
MEASURED = 1000
#: Waiting rows rechecked, and released, in one statement.
ASKED = 1000
#: Waiting rows that one statement reads to find stranded rows, or releases because the
#: stage is not ordered any more.
READ = 10_000
#: Seconds to wait for a predecessor that may never arrive, at a stage that does not
#: skip: one that is on its way arrives sooner.
ON_ITS_WAY = 120.0
#: Seconds that an operator's command waits for a message that a worker holds.
PATIENCE = 5.0


class OrderManager(SqlManager):
    """Changes the states of messages that wait for their turn."""

    def has_come(self, turn: Turn) -> bool:
        """Return whether the message need not wait for its predecessor any more."""
        if turn.after_id is None:
            return True
        before = self.filter(message_id=turn.after_id, stage=turn.stage)
        ends = before.order_by().values_list("processed_at", "dead_at").first()
        if ends is None or ends == (None, None):
            return False
        return ends[0] is not None or bool(self.let_go_by([turn.after_id], turn))

    def let_go_by(
        self, predecessors: Collection[uuid.UUID], turn: Turn
    ) -> set[uuid.UUID]:
        """Return the `predecessors` that no longer block their followers at the stage
        of `turn`."""
        if not predecessors:
            return set()
        ids, values = self._sql.ids("p.message_id", predecessors)
        passes = passes_sql(skips=turn.skips)
        rows = self._rows(
            f"SELECT p.message_id FROM {self._table} p WHERE {ids}"  # noqa: S608 - constants only
            f" AND p.stage = %s AND {passes}",
            [*values, turn.stage],
        )
        return {read_uuid(found) for (found,) in rows}

    def lock_keys(self, turns: Collection[Turn]) -> set[str]:
        """Lock the keys of these messages until the transaction ends. Returns the keys
        that were locked; other transactions hold the rest."""
        connection = connections[self.db]
        wanted = {turn.key: turn.lock for turn in turns}
        if connection.vendor != "postgresql":
            return set(wanted)
        keys = list(wanted)
        rows = self._rows(
            "SELECT key FROM unnest(%s::text[], %s::bigint[]) AS g(key, lock)"
            " WHERE pg_try_advisory_xact_lock(lock)",
            [keys, [wanted[key] for key in keys]],
        )
        return {key for (key,) in rows}

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
    ) -> bool | None:
        """Park a message whose turn has not come, and subtract `uncounted` from its
        number of attempts. Pass `aside` if the turn has come, but another transaction
        has locked the key.

        Returns True if the predecessor has ended meanwhile, so that the message can be
        claimed immediately. Returns None if the message was not parked: another worker
        has settled or claimed it, or a server crash has lost its row. Call this outside
        any transaction: between the two statements of this method, other transactions
        may commit, and the second statement must see their changes.
        """
        connection = connections[self.db]
        held, fence = held_sql(token)
        condition = held or " AND due_at IS NULL"
        waits_for = None if aside else turn.after_id
        # As text, in the form in which it is compared: drivers parse instants.
        row = self._row(
            f"UPDATE {self._table} SET due_at = {self._sql.later()},"  # noqa: S608 - constants only
            f" waits_since = COALESCE(waits_since, {self._sql.now}),"
            " waits_for = %s, key = %s,"
            " after_at = %s, headers = COALESCE(headers, %s),"
            " body = COALESCE(body, %s), lease_until = NULL, lease_token = NULL,"
            " attempts = attempts - %s"
            f" WHERE id = %s AND {OPEN.sql()}{condition}"
            " RETURNING CAST(due_at AS TEXT)",
            [
                FIRST_PAUSE,
                waits_for and waits_for.hex,
                turn.key,
                connection.ops.adapt_datetimefield_value(turn.after_at),
                json.dumps(dict(headers)),
                body,
                uncounted,
                pk,
                *fence,
            ],
        )
        if row is None:
            return None
        if waits_for is None:
            return False
        return self._look(pk, turn, row[0])

    def _look(self, pk: int, turn: Turn, due: Any) -> bool:
        """Check a message once more, right after it was parked. The predecessor may
        have ended before its transaction could see the parked row. Or the predecessor
        may itself be waiting."""
        connection = connections[self.db]
        now, never = self._sql.now, self._sql.never
        # If a crash loses this, the message is rechecked later.
        no_wait, waits_not = no_wait_sql(connection)
        passed = passed_sql("c.waits_for", "c.stage", skips=turn.skips)
        row = self._row(
            f"{no_wait} UPDATE {self._table} AS c SET"  # noqa: S608 - constants only
            f" due_at = CASE WHEN {passed} THEN {now} ELSE {never} END,"
            f" waits_for = CASE WHEN {passed} THEN NULL ELSE waits_for END"
            f" WHERE c.id = %s AND c.due_at = %s AND {waits_sql('c')}"
            f" AND ({passed} OR {behind_sql('c')}) AND {waits_not}"
            " RETURNING waits_for",
            [pk, due],
        )
        return row is not None and row[0] is None

    def aside(self, pk: int, turn: Turn) -> None:
        """Record the key of a failed message, so that the admin can show which messages
        the failed message blocks."""
        self.filter(pk=pk).update(
            key=turn.key, after_at=turn.after_at, waits_for=None, waits_since=None
        )

    def wait_for_copy(self, stage: str, of: uuid.UUID, copy: uuid.UUID) -> None:
        """Let the followers of a dead message wait for the copy that replaces the dead
        message."""
        self.filter(stage=stage, waits_for=of).update(waits_for=copy)

    def waiting(self, stage: str, most: int | None) -> tuple[int, int]:
        """Return two values: the number of messages that wait at a stage, and the
        estimated size of these messages in bytes. At most `most` messages are counted.
        The estimate is based on a sample of at most MEASURED messages."""
        size = self._sql.size
        waits = f"FROM {self._table} WHERE stage = %s AND waits_for IS NOT NULL"
        limit = "" if most is None else " LIMIT %s"
        count, average = self._row(
            f"SELECT COUNT(*), (SELECT COALESCE(AVG(size), 0) FROM (SELECT {size}"  # noqa: S608 - constants only
            f" AS size {waits} LIMIT {MEASURED}) AS measured)"
            f" FROM (SELECT 1 {waits}{limit}) AS counted",
            [stage, stage, *([] if most is None else [most])],
        )
        return count, int(count * average)

    def behind(self, stage: str, key: str, most: int) -> int:
        """Return the number of messages of a key that wait at a stage. At most `most`
        messages are counted."""
        rows = self.filter(stage=stage, key=key, waits_for__isnull=False)
        return int(rows.exclude(key="").filter(processed_at=None)[:most].count())

    def wake(self, stage: str, messages: Collection[uuid.UUID]) -> int:
        """Make the followers of these messages due, and return the number of followers.
        Call this in the transaction that ends the messages. If a follower is parked
        later, its own worker checks whether the predecessor has ended."""
        ids, values = self._sql.ids("waits_for", messages)
        return self._release(stage, ids, values)

    def ask(
        self, stage: str, until: dt.datetime, *, skips: bool, soon: bool = False
    ) -> int:
        """Check a stage's waiting rows that were due at `until`, and postpone the rows
        whose turn has not come. Returns the number of postponed rows, at most ASKED.
        The longer a row has waited, the longer it is postponed; with `soon`, at most
        for SHORT_PAUSE."""
        longest = SHORT_PAUSE if soon else LONGEST_PAUSE
        connection, table = connections[self.db], self._table
        passed = passed_sql("c.waits_for", "c.stage", skips=skips)
        waited = f"{self._sql.epoch()} - {self._sql.epoch('o.waits_since')}"
        seconds = f"{self._sql.least}({longest}, {waited})"
        seconds = f"{self._sql.greatest}({FIRST_PAUSE}, {seconds})"
        pause = self._sql.later(seconds)
        # Read first, and changed only if unchanged since: a message that ended after
        # this statement began has released it already. They are returned, because
        # Python's `sqlite3` does not count what a statement with WITH has changed.
        rows = self._rows(
            f"""
            WITH found AS MATERIALIZED (
                SELECT c.id, c.due_at, {behind_sql("c")} AS behind FROM {table} c
                WHERE c.stage = %s AND c.due_at <= %s
                  AND {waits_sql("c")} AND NOT {passed}
                ORDER BY c.due_at, c.id LIMIT {ASKED})
            UPDATE {table} AS o
            SET due_at = CASE WHEN o.id IN (SELECT id FROM found WHERE behind)
                              THEN {self._sql.never} ELSE {pause} END
            WHERE o.id IN (
                SELECT i.id FROM {table} i JOIN found ON found.id = i.id
                WHERE i.due_at = found.due_at AND {waits_sql("i")}
                {self._sql.skip_locked and "FOR UPDATE OF i SKIP LOCKED"})
            RETURNING id
            """,  # noqa: S608 - constants only
            [stage, connection.ops.adapt_datetimefield_value(until)],
        )
        return len(rows)

    def expire_waits(
        self,
        stage: str,
        *,
        skips: bool,
        patience: float,
        retention: dt.timedelta | None,
        link: str,
    ) -> int:
        """Release messages that have waited long enough for a missing predecessor. A
        message is released only if the stage has no earlier unfinished message of the
        same key. `link` is the header that names the predecessor. Returns the number of
        released messages."""
        table = self._table
        held = "e.dead_at IS NULL"
        lost, parameters = "", [stage, -patience]
        if not skips:
            held = (
                f"({held} OR NOT {passed_sql('e.message_id', 'e.stage', skips=False)})"
            )
            lost = (
                " AND (c.after_at < (SELECT s.ordered_since"
                " FROM django_txmsg_stagestate s WHERE s.stage = c.stage)"
            )
            parameters[1] = -min(patience, ON_ITS_WAY)
            if retention is not None:
                lost += f" OR c.after_at < {self._sql.later()}"
                parameters.append(-retention.total_seconds())
            lost += ")"
        return self._changed(
            f"""
            UPDATE {table} SET due_at = {self._sql.now}, waits_for = NULL,
                headers = {self._sql.without(link)}
            WHERE id IN (
                SELECT c.id FROM {table} c
                WHERE c.stage = %s AND c.due_at <= {self._sql.began}
                  AND {waits_sql("c")}
                  AND c.waits_since <= {self._sql.later()}
                  AND NOT EXISTS (SELECT 1 FROM {table} p
                      WHERE p.message_id = c.waits_for AND p.stage = c.stage)
                  {lost}
                  AND NOT EXISTS (SELECT 1 FROM {table} e
                      WHERE e.stage = c.stage AND e.key = c.key AND NOT e.key = ''
                        AND e.processed_at IS NULL AND {held} AND e.id <> c.id
                        AND (e.after_at IS NULL OR e.after_at < c.after_at))
                ORDER BY c.due_at, c.id LIMIT {ASKED} {self._sql.skip_locked})
            """,  # noqa: S608 - constants only
            parameters,
        )

    def let_go(self, stage: str, key: str, *, link: str) -> int:
        """Release the first waiting message of a key, at an operator's request. Returns
        1, or 0 if no message waits or another transaction has released the first
        message.

        A released message waits no more, so the next message of the key then looks like
        the first one. It is not released while its predecessor is due or will be
        retried: it would overtake the predecessor.

        Raises OperationalError if a worker is processing the message and does not
        finish within PATIENCE.
        """
        connection, table = connections[self.db], self._table
        # The first message is chosen once, even if a worker holds it: the operator
        # means no other. Its lease is removed, so that a worker that is about to park
        # it again changes nothing.
        with transaction.atomic(using=self.db):
            limit_waits(connection, PATIENCE)
            return self._changed(
                f"UPDATE {table} SET due_at = {self._sql.now}, waits_for = NULL,"  # noqa: S608 - constants only
                " lease_until = NULL, lease_token = NULL,"
                f" headers = {self._sql.without(link)} WHERE id = (SELECT c.id"
                f" FROM {table} c WHERE c.stage = %s AND c.key = %s AND NOT c.key = ''"
                " AND c.waits_for IS NOT NULL AND c.processed_at IS NULL"
                " AND c.dead_at IS NULL ORDER BY c.after_at, c.id LIMIT 1)"
                f" AND waits_for IS NOT NULL AND {OPEN.sql()}"
                f" AND NOT EXISTS (SELECT 1 FROM {table} p"
                f" WHERE p.message_id = {table}.waits_for AND p.stage = {table}.stage"
                " AND p.due_at IS NOT NULL AND p.waits_for IS NULL"
                f" AND {OPEN.sql('p')})",
                [stage, key],
            )

    def wait_no_more(self, stage: str, between: Callable[[], object]) -> None:
        """Release all waiting messages of a stage that is not ordered any more. Skip a
        message that a worker is processing: its row stays locked while the handler
        runs. `between` is called after each `READ` messages."""
        # Materialized: otherwise the planner might evaluate the selection repeatedly.
        free = (
            f"id IN (WITH free AS MATERIALIZED (SELECT c.id FROM {self._table} c"  # noqa: S608 - constants only
            " WHERE c.stage = %s"
            f" AND {waits_sql('c')} LIMIT {READ}"
            f" {self._sql.skip_locked}) SELECT id FROM free)"
        )
        while self._release(stage, free, [stage]) == READ:
            between()

    def release_stranded(self, stage: str, between: Callable[[], object]) -> None:
        """Make waiting messages due whose predecessor does not wait any more, but has
        not released them: a process whose stage is not ordered has processed the
        predecessor. `ask()` then checks them as usual. `between` is called after each
        `READ` messages."""
        never, last, read = self._sql.never, 0, READ
        while read == READ:
            # Read first: SQLite locks the database for as long as an UPDATE searches.
            page = self._rows(
                f"SELECT c.id, {behind_sql('c')} FROM {self._table} c"  # noqa: S608 - constants only
                f" WHERE c.stage = %s AND c.due_at = {never} AND {waits_sql('c')}"
                f" AND c.id > {last} ORDER BY c.id LIMIT {READ}",
                [stage],
            )
            stranded = [str(pk) for pk, behind in page if not behind]
            for first in range(0, len(stranded), ASKED):
                self._changed(
                    f"UPDATE {self._table} SET due_at = {self._sql.now}"  # noqa: S608 - constants only
                    f" WHERE id IN (SELECT c.id FROM {self._table} c"
                    f" WHERE c.id IN ({', '.join(stranded[first : first + ASKED])})"
                    f" AND c.due_at = {never} AND {waits_sql('c')}"
                    f" {self._sql.skip_locked})",
                    [],
                )
            read = len(page)
            last = page[-1][0] if page else last
            between()

    def _release(self, stage: str, which: str, values: list[Any]) -> int:
        return self._changed(
            f"UPDATE {self._table} SET due_at = {self._sql.now},"  # noqa: S608 - constants only
            f" waits_for = NULL WHERE stage = %s AND {which} AND {OPEN.sql()}",
            [stage, *values],
        )
