"""Records an arrival: whether the message was here before, and its outcome.

Hop 7 records before it runs anything; recording also counts the attempt.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.db import connections, models

from ..django_internals import raw
from ..rules.inbox import OPEN
from .fields import no_wait_sql, now_sql, prepared, read_instant, read_uuid
from .inbox_turn import Turn, turn_sql

if TYPE_CHECKING:
    from ..envelope.message import Message

#: Marks a row as processed, with the clock's expression as `now`.
PROCESSED = (
    "processed_at = {now}, due_at = NULL, headers = NULL, body = NULL,"
    " lease_until = NULL, lease_token = NULL, key = '', waits_for = NULL"
)
#: The session setting that proves the first half of `record_and_begin()`.
_MARK = "txmsg.arrival"

#: The columns for `read_seen()`, in SQL with the clock's expression as `now`. The
#: instants themselves: some SQLite versions return a wrong `IS NOT NULL` of them.
SEEN_COLUMNS = (
    "id, message_id, attempts, deliveries, processed_at, dead_at, due_at, {now}"
)


@dataclass(frozen=True, slots=True)
class Seen:
    """What the inbox knew of a message after its arrival was recorded."""

    id: int
    message_id: uuid.UUID
    attempt: int
    deliveries: int
    processed: bool
    dead: bool
    parked: bool
    now: dt.datetime

    @property
    def settled(self) -> bool:
        """Whether this arrival only needs to be dropped."""
        return self.processed or self.dead or self.parked

    def attempted(self, attempt: int) -> Seen:
        """Return the record after another attempt was counted."""
        return dataclasses.replace(self, attempt=attempt)


class RecordingManager(models.Manager):  # type: ignore[type-arg]  # not generic at run time
    """Counts arrivals, many in a single statement."""

    def record(
        self,
        stage: str,
        messages: Sequence[Message],
        *,
        idempotent: bool = False,
        together: bool = False,
    ) -> dict[uuid.UUID, Seen]:
        """Count an arrival of each message, and an attempt for each that will run.

        Commits at once, so that a message that kills its worker is still counted. On
        PostgreSQL the commit does not wait for the disk, since a lost count costs at
        most one attempt; if a later statement then finds no row, it calls `recall()`.
        `idempotent` stages also run messages that they have processed. Messages that
        run `together` count no attempt: if their worker dies, it is unknown which one
        was the cause, and each is delivered again alone.
        """
        connection = connections[self.db]
        sql, parameters = self._recording(
            stage, messages, idempotent, 0 if together else 1
        )
        no_wait, waits_not = no_wait_sql(connection)
        if no_wait:
            sql = f"WITH {no_wait} {sql}, {waits_not}"
        with connection.cursor() as cursor:
            cursor.execute(sql, parameters)
            seen = [read_seen(row[:8]) for row in cursor.fetchall()]
        return {one.message_id: one for one in seen}

    def record_and_begin(
        self,
        stage: str,
        message: Message,
        isolation: str | None,
        mark: str,
        turn: Turn | None = None,
    ) -> tuple[Seen, bool]:
        """Record an arrival, commit that, begin the stage's transaction and take the
        row in it: `record()` and `take()` in one round trip instead of three.

        Returns the record, and whether the row was taken: with `turn`, only if its
        predecessor lets it go. The transaction is open in any case: a
        `StageTransaction` takes it over, or the caller rolls it back. For a connection
        of psycopg 3 outside of any block (`begins_early()`). If it fails, `recorded()`
        tells by the `mark` whether the first half was committed.
        """
        connection = connections[self.db]
        recording, parameters = self._recording(stage, [message], False, 1)
        # The driver sets OPTIONS' isolation level in its BEGIN, which is not used here.
        own = getattr(raw(connection), "isolation_level", None)
        if isolation is None and own is not None:
            isolation = own.name.replace("_", " ")
        level = f" ISOLATION LEVEL {isolation}" if isolation else ""
        come, values = turn_sql(self.model, connection, turn, dead_too=False)
        with connection.cursor() as cursor:
            cursor.execute(
                f"BEGIN; SET LOCAL synchronous_commit = off; {recording},"  # noqa: S608 - constants only
                f" set_config('{_MARK}', %s, false); COMMIT;"
                f" BEGIN{level};"
                f" UPDATE {self._table} SET {PROCESSED.format(now=now_sql(connection))}"
                f" WHERE message_id = %s AND stage = %s AND due_at IS NULL"
                f" AND {OPEN.sql()}{come}",
                [*parameters, mark, message.id, stage, *values],
            )
            for _passed in ("BEGIN", "SET"):
                cursor.nextset()
            seen = read_seen(cursor.fetchone()[:8])
            while cursor.nextset():
                pass
            return seen, bool(cursor.rowcount)

    def recorded(self, stage: str, message: Message, mark: str) -> Seen | None:
        """Return what `record_and_begin()` committed before it failed, if anything: a
        session setting made in a transaction survives only if the transaction
        commits."""
        return self._seen(
            f"message_id = %s AND stage = %s AND current_setting('{_MARK}', true) = %s",
            [message.id, stage, mark],
        )

    def recall(self, pk: int, stage: str, message_id: uuid.UUID) -> Seen | None:
        """Return the record of a message whose arrival was recorded before, if it still
        exists: after a crash of the server another message may have its row."""
        value = prepared(self.model, "message_id", message_id, connections[self.db])
        return self._seen(
            "id = %s AND stage = %s AND message_id = %s", [pk, stage, value]
        )

    def _seen(self, condition: str, parameters: list[Any]) -> Seen | None:
        now = now_sql(connections[self.db])
        with connections[self.db].cursor() as cursor:
            cursor.execute(
                f"SELECT {SEEN_COLUMNS.format(now=now)} FROM {self._table}"  # noqa: S608 - constants only
                f" WHERE {condition}",
                parameters,
            )
            row = cursor.fetchone()
        return None if row is None else read_seen(row)

    def _recording(
        self, stage: str, messages: Sequence[Message], idempotent: bool, counted: int
    ) -> tuple[str, list[Any]]:
        connection = connections[self.db]
        now = now_sql(connection)
        given = {message.id: message for message in messages}
        rows = ", ".join(
            [f"(%s, %s, %s, %s, %s, %s, 1, {counted}, {now}, {now}, {now}, '')"]
            * len(given)
        )
        parameters: list[Any] = []
        for message in given.values():
            parameters += [
                stage,
                prepared(self.model, "message_id", message.id, connection),
                message.destination,
                message.correlation_id or "",
                (message.service or "")[:255],
                prepared(self.model, "created_at", message.created_at, connection),
            ]
        again = "i.processed_at IS NOT NULL" if idempotent else "FALSE"
        runs = "i.dead_at IS NULL AND i.due_at IS NULL"
        if not idempotent:
            runs += " AND i.processed_at IS NULL"
        sql = f"""
            INSERT INTO {self._table} AS i
                (stage, message_id, destination, correlation_id, service, created_at,
                 deliveries, attempts, first_received_at, last_received_at,
                 started_at, last_error)
            VALUES {rows}
            ON CONFLICT (message_id, stage) DO UPDATE SET
                deliveries = i.deliveries + 1, last_received_at = {now},
                attempts = CASE WHEN {again} THEN 1
                                WHEN {runs} THEN i.attempts + {counted}
                                ELSE i.attempts END,
                started_at = CASE WHEN {runs} THEN {now} ELSE i.started_at END
            RETURNING {SEEN_COLUMNS.format(now=now)}
        """  # noqa: S608 - constants only
        return sql, parameters

    def unrecord(self, pk: int) -> None:
        """Remove an arrival that will be recorded anew, and its counted attempt."""
        self.filter(pk=pk).update(
            deliveries=models.F("deliveries") - 1, attempts=models.F("attempts") - 1
        )

    @property
    def _table(self) -> str:
        table: str = self.model._meta.db_table
        return table


def read_seen(row: Sequence[Any]) -> Seen:
    """Return the record from a row of SEEN_COLUMNS."""
    pk, message_id, attempts, deliveries, processed, dead, parked, now = row
    return Seen(
        id=pk,
        message_id=read_uuid(message_id),
        attempt=attempts,
        deliveries=deliveries,
        processed=processed is not None,
        dead=dead is not None,
        parked=parked is not None,
        now=read_instant(now),
    )
