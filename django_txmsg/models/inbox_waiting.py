"""Messages of an ordered stage that wait because they arrived before their turn.

A waiting row is a parked row that names its predecessor in `waits_for`. It becomes due
when that message ends (`inbox_release.py`). If its predecessor itself waits, its due
time is `NEVER`, since that one ends later than anything committed by now.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping
from typing import Any

from django.db import connections

from ..rules.inbox import OPEN
from .fields import (
    ids_sql,
    later_sql,
    later_value,
    no_wait_sql,
    now_sql,
    prepared,
    read_uuid,
)
from .inbox_parked import ParkedManager
from .inbox_turn import (
    Turn,
    behind_sql,
    never_sql,
    passed_sql,
    passes_sql,
    size_sql,
    waits_sql,
)

#: Seconds until a waiting message is rechecked, at first and at most.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
#: Number of waiting rows whose bytes are measured.
MEASURED = 1000


class WaitingManager(ParkedManager):
    """The transitions of messages that wait for their turn, each in one statement."""

    def has_come(self, turn: Turn) -> bool:
        """Return whether the message's predecessor releases it."""
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
        """Return which of the messages release their followers, at the stage of one of
        these."""
        if not predecessors:
            return set()
        connection = connections[self.db]
        ids, values = ids_sql(connection, "p.message_id", predecessors)
        passes = passes_sql(skips=turn.skips)
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT p.message_id FROM {self._table} p WHERE {ids}"  # noqa: S608 - constants only
                f" AND p.stage = %s AND {passes}",
                [*values, turn.stage],
            )
            return {read_uuid(found) for (found,) in cursor.fetchall()}

    def lock_keys(self, turns: Collection[Turn]) -> set[str]:
        """Lock the keys of these messages until the transaction ends. Returns the keys
        that no other transaction has locked."""
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
        """Park a message whose turn has not come, or with `aside` one whose key another
        transaction has locked, and uncount its attempts. Outside of any transaction:
        the next statement must see what others have committed meanwhile.

        Returns whether it can be claimed at once after all.
        """
        connection = connections[self.db]
        held, fence = self.fence(token)
        condition = held or " AND due_at IS NULL"
        waits_for = None if aside else turn.after_id
        # In the form in which it is compared: drivers parse SQLite's text into
        # instants.
        due = "due_at"
        if connection.vendor != "postgresql":
            due = "CAST(due_at AS TEXT)"
        with connection.cursor() as cursor:
            cursor.execute(
                f"UPDATE {self._table} SET due_at = {later_sql(connection)},"  # noqa: S608 - constants only
                f" waits_since = COALESCE(waits_since, {now_sql(connection)}),"
                " waits_for = %s, key = %s,"
                " after_at = %s, headers = COALESCE(headers, %s),"
                " body = COALESCE(body, %s), lease_until = NULL, lease_token = NULL,"
                " attempts = attempts - %s"
                f" WHERE id = %s AND {OPEN.sql()}{condition} RETURNING {due}",
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
        """Recheck a message that was just parked: its predecessor may have ended just
        before, unseen by this transaction, or be waiting itself."""
        connection = connections[self.db]
        now, never = now_sql(connection), never_sql(connection)
        # If a crash loses this, the message is rechecked later.
        no_wait, waits_not = no_wait_sql(connection)
        with_no_wait = no_wait and f"WITH {no_wait}"
        passed = passed_sql("c.waits_for", "c.stage", skips=turn.skips)
        with connection.cursor() as cursor:
            cursor.execute(
                f"{with_no_wait} UPDATE {self._table} AS c SET"  # noqa: S608 - constants only
                f" due_at = CASE WHEN {passed} THEN {now} ELSE {never} END,"
                f" waits_for = CASE WHEN {passed} THEN NULL ELSE waits_for END"
                f" WHERE c.id = %s AND c.due_at = %s AND {waits_sql('c')}"
                f" AND ({passed} OR {behind_sql('c')}) AND {waits_not}"
                " RETURNING waits_for",
                [pk, due],
            )
            row = cursor.fetchone()
        return row is not None and row[0] is None

    def aside(self, pk: int, turn: Turn) -> None:
        """Record the key of a failed message, so that the messages it blocks can be
        shown."""
        self.filter(pk=pk).update(
            key=turn.key, after_at=turn.after_at, waits_for=None, waits_since=None
        )

    def wait_for_copy(self, stage: str, of: uuid.UUID, copy: uuid.UUID) -> None:
        """Let the followers of a dead message wait for its copy instead."""
        self.filter(stage=stage, waits_for=of).update(waits_for=copy)

    def waiting(self, stage: str, most: int | None) -> tuple[int, int]:
        """Return how many messages wait at a stage, counted up to `most`, and an
        estimate of their bytes from a sample."""
        connection = connections[self.db]
        size = size_sql(connection)
        waits = f"FROM {self._table} WHERE stage = %s AND waits_for IS NOT NULL"
        limit = "" if most is None else " LIMIT %s"
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT COUNT(*), (SELECT COALESCE(AVG(size), 0) FROM (SELECT {size}"  # noqa: S608 - constants only
                f" AS size {waits} LIMIT {MEASURED}) AS measured)"
                f" FROM (SELECT 1 {waits}{limit}) AS counted",
                [stage, stage, *([] if most is None else [most])],
            )
            count, average = cursor.fetchone()
        return count, int(count * average)

    def behind(self, stage: str, key: str, most: int) -> int:
        """Return how many messages of a key wait at a stage, at most `most`."""
        rows = self.filter(stage=stage, key=key, waits_for__isnull=False)
        return int(rows.exclude(key="").filter(processed_at=None)[:most].count())
