"""The statements that record the arrival of a message in the inbox and count its
attempt, park it until its next attempt, and claim it when it is due."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from django.db import connections, models
from django.db.models.functions import Now

from .. import rules
from ..django_internals import raw
from ..rules.inbox import OPEN
from .claiming import bounds, claim_sql
from .fields import (
    Holds,
    Later,
    Sql,
    SqlManager,
    no_wait_sql,
    read_instant,
    read_uuid,
)
from .turn import Turn, turn_sql

if TYPE_CHECKING:
    from ..envelope.message import Message

#: Message types by name, each with the version of this code.
Reads = Sequence[tuple[str, int]]

#: Stages that one query looks up. SQLite allows 500 SELECTs in a UNION ALL.
LOOKED_TOGETHER = 400
#: Empties a row that has ended, and that nobody claims any more.
EMPTIED = (
    "due_at = NULL, headers = NULL, body = NULL,"
    " lease_until = NULL, lease_token = NULL, key = '', waits_for = NULL"
)
#: The session setting that proves the first half of `record_and_begin()`.
_MARK = "txmsg.arrival"

#: The columns for `read_record()`, in SQL with the clock's expression as `now`. The
#: instants themselves: some SQLite versions return a wrong `IS NOT NULL` of them.
RECORD_COLUMNS = (
    "id, message_id, attempts, deliveries, processed_at, dead_at, due_at, {now}"
)


@dataclass(frozen=True, slots=True)
class InboxRecord:
    """The state of a message's inbox row just after the arrival of the message was
    recorded."""

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
        """Whether the message is processed, dead or parked. If so, the consumer drops
        this arrival."""
        return self.processed or self.dead or self.parked

    def attempted(self, attempt: int) -> InboxRecord:
        """Return a copy of the record with this attempt number."""
        return dataclasses.replace(self, attempt=attempt)


@dataclass(frozen=True, slots=True)
class Parked:
    """A due parked message that one worker holds under a lease."""

    record: InboxRecord
    destination: str
    headers: dict[str, str]
    body: bytes
    #: Seconds from one renewal of the lease to its end.
    lease: float
    #: An instant of `time.monotonic()` before the lease was granted.
    since: float
    #: The slot that it waited for, at a stage with a rate, and the key of its line.
    slot: int | None = None
    key: str = ""


class ArrivalManager(SqlManager):
    """Records the arrivals of messages, parks messages, and claims them."""

    def record(
        self,
        stage: str,
        messages: Sequence[Message],
        *,
        idempotent: bool = False,
        together: bool = False,
    ) -> dict[uuid.UUID, InboxRecord]:
        """Count one more arrival of each message, and one more attempt of each message
        that the stage will process.

        The statement commits immediately, so that a message that kills its worker is
        still counted. On PostgreSQL the commit does not wait for the disk, so a crash
        of the server may lose the rows. To find out later whether a row was lost, call
        `recall()`.

        Pass `idempotent` if the stage processes a message again that it has already
        processed. Pass `together` if the stage processes the messages in one
        transaction. Then no attempt is counted: if the worker dies, any of the messages
        may be the cause. After the worker's death, each message is redelivered and
        processed alone.
        """
        connection = connections[self.db]
        sql, parameters = self._recording(
            stage, messages, idempotent, 0 if together else 1
        )
        no_wait, waits_not = no_wait_sql(connection)
        sql = f"{no_wait} {sql}, {waits_not}"
        records = [read_record(row[:8]) for row in self._rows(sql, parameters)]
        return {one.message_id: one for one in records}

    def record_and_begin(
        self,
        stage: str,
        message: Message,
        isolation: str | None,
        mark: str,
        turn: Turn | None = None,
    ) -> tuple[InboxRecord, bool]:
        """Do `record()` and `take()` in one round trip: record the message's arrival
        and commit, then begin the stage's transaction and take the row.

        Returns the record, and whether the row was taken. With `turn`, the row is taken
        only if the message's predecessor is processed and no other transaction has
        locked the key. The transaction stays open even if the row was not taken: the
        caller must pass the transaction to a `StageTransaction` or roll it back.

        If the call fails, pass the same `mark` to `recorded()`, which returns the
        record if the first commit succeeded. Requires psycopg 3, and a connection that
        is outside any transaction (`begins_early()`).
        """
        connection = connections[self.db]
        recording, parameters = self._recording(stage, [message], False, 1)
        # The driver sets OPTIONS' isolation level in its BEGIN, which is not used here.
        own = getattr(raw(connection), "isolation_level", None)
        if isolation is None and own is not None:
            isolation = own.name.replace("_", " ")
        level = f" ISOLATION LEVEL {isolation}" if isolation else ""
        come, values = turn_sql(connection, turn, dead_too=False)
        with connection.cursor() as cursor:
            cursor.execute(
                f"BEGIN; SET LOCAL synchronous_commit = off; {recording},"  # noqa: S608 - constants only
                f" set_config('{_MARK}', %s, false); COMMIT;"
                f" BEGIN{level};"
                f" UPDATE {self._table} SET {processed_sql(self._sql)}"
                f" WHERE message_id = %s AND stage = %s AND due_at IS NULL"
                f" AND {OPEN.sql()}{come}",
                [*parameters, mark, message.id, stage, *values],
            )
            for _passed in ("BEGIN", "SET"):
                cursor.nextset()
            record = read_record(cursor.fetchone()[:8])
            while cursor.nextset():
                pass
            return record, bool(cursor.rowcount)

    def recorded(self, stage: str, message: Message, mark: str) -> InboxRecord | None:
        """Roll back what `record_and_begin()` began before it failed. Return the record
        that it committed, or None if it committed nothing. Pass the same `mark` as to
        `record_and_begin()`: the transaction that stores the record also stores the
        mark in a session setting. If this transaction is rolled back, so is the
        setting.

        One round trip does both, because after a rollback a pooler may continue in
        another session.
        """
        found = self._finding(
            f"message_id = %s AND stage = %s AND current_setting('{_MARK}', true) = %s"
        )
        with connections[self.db].cursor() as cursor:
            cursor.execute(f"ROLLBACK; {found}", [message.id, stage, mark])
            cursor.nextset()
            row = cursor.fetchone()
        return None if row is None else read_record(row)

    def recall(self, pk: int, stage: str, message_id: uuid.UUID) -> InboxRecord | None:
        """Return the record of a message whose arrival was recorded earlier, or None if
        the row was lost in a crash of the server. After a crash another message may
        have the primary key `pk`, so the stage and the message id must match too."""
        sql = self._finding("id = %s AND stage = %s AND message_id = %s")
        row = self._row(sql, [pk, stage, message_id.hex])
        return None if row is None else read_record(row)

    def known(self, stage: str, message_id: uuid.UUID) -> InboxRecord | None:
        """Return the record of a message without counting an arrival, or None if the
        inbox does not know the message."""
        sql = self._finding("stage = %s AND message_id = %s")
        row = self._row(sql, [stage, message_id.hex])
        return None if row is None else read_record(row)

    def _finding(self, condition: str) -> str:
        columns = RECORD_COLUMNS.format(now=self._sql.now)
        return f"SELECT {columns} FROM {self._table} WHERE {condition}"  # noqa: S608 - constants only

    def _recording(
        self, stage: str, messages: Sequence[Message], idempotent: bool, counted: int
    ) -> tuple[str, list[Any]]:
        connection = connections[self.db]
        now = self._sql.now
        given = {message.id: message for message in messages}
        rows = ", ".join(
            [f"(%s, %s, %s, %s, %s, %s, 1, {counted}, {now}, {now}, {now}, '')"]
            * len(given)
        )
        parameters: list[Any] = []
        for message in given.values():
            parameters += [
                stage,
                message.id.hex,
                message.destination,
                message.correlation_id or "",
                (message.service or "")[:255],
                connection.ops.adapt_datetimefield_value(message.created_at),
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
            RETURNING {RECORD_COLUMNS.format(now=now)}
        """  # noqa: S608 - constants only
        return sql, parameters

    def unrecord(self, pk: int) -> None:
        """Subtract one arrival and one attempt from a row. The caller then records the
        same arrival again."""
        self.filter(pk=pk).update(
            deliveries=models.F("deliveries") - 1, attempts=models.F("attempts") - 1
        )

    def park(
        self,
        pk: int,
        *,
        delay: float,
        headers: Mapping[str, str],
        body: bytes,
        error: str,
        token: uuid.UUID | None = None,
        needs: tuple[str, int] | None = None,
        slot: int | None = None,
        key: str = "",
        turn: Turn | None = None,
        uncounted: int = 0,
    ) -> bool:
        """Keep the whole message in its row until it is due again in `delay` seconds,
        and subtract `uncounted` from its number of attempts.

        `needs` names a message type and the oldest version of the code that can read
        it: workers with older code do not claim the message. `slot` is the slot for
        which the message waits, in the line of `key`. Pass the message's `turn` if its
        stage is ordered, so that its followers do not overtake the message.

        Returns False if the message is already processed or dead. Also returns False if
        its lease, `token`, has ended and another worker has claimed the message.
        """
        rows = self.filter(Holds(OPEN), pk=pk)
        if token is not None:
            rows = rows.filter(lease_token=token)
        line: dict[str, Any] = {} if slot is None else {"key": key}
        if turn is not None:
            line = {"key": turn.key, "after_at": turn.after_at}
        needs_type, needs_version = needs or ("", None)
        parked = rows.update(
            due_at=Later(delay), headers=dict(headers), body=body, last_error=error,
            lease_until=None, lease_token=None, needs_type=needs_type,
            needs_version=needs_version, slot=slot,
            attempts=models.F("attempts") - uncounted, **line,
        )  # fmt: skip
        return bool(parked)

    def due_stages(self, stages: Mapping[str, Reads | None]) -> set[str]:
        """Return the stages that have a parked message which is due, unclaimed and
        readable by this code."""
        now = self._sql.began
        found: set[str] = set()
        left = iter(stages.items())
        while part := list(islice(left, LOOKED_TOGETHER)):
            queries: list[str] = []
            parameters: list[Any] = []
            for stage, reads in part:
                readable, versions = _readable("", reads)
                queries.append(
                    f"SELECT %s AS stage WHERE EXISTS (SELECT 1 FROM {self._table}"  # noqa: S608 - constants only
                    f" WHERE stage = %s AND due_at <= {now}{readable}"
                    f" AND {rules.NOT_LEASED.sql(now=now)})"
                )
                parameters += [stage, stage, *versions]
            rows = self._rows(" UNION ALL ".join(queries), parameters)
            found.update(stage for (stage,) in rows)
        return found

    def claim_parked(
        self, stage: str, token: uuid.UUID, lease: float, reads: Reads | None = None
    ) -> Parked | None:
        """Claim one due parked message of a stage, and count the attempt.

        `reads` lists the types and versions of messages that this code reads; None
        means all.
        """
        readable, versions = _readable("c.", reads)
        sql = self._sql
        now, began = sql.now, sql.began
        since = time.monotonic()
        statement = claim_sql(
            sql,
            self._table,
            due="due_at",
            where=f"c.stage = %s AND c.due_at <= {began} AND"
            f" {rules.NOT_LEASED.sql('c', now=began)}{readable}",
            assign=f"lease_until = {sql.later()}, lease_token = %s,"
            f" attempts = attempts + 1, started_at = {now}",
            returning=f"{RECORD_COLUMNS.format(now=now)}, destination, headers, body,"
            " slot, key",
        )
        row = self._row(statement, [stage, *versions, *bounds(1), lease, token.hex])
        if row is None:
            return None
        *record, destination, headers, body, slot, key = row
        return Parked(
            record=read_record(record),
            destination=destination,
            headers=json.loads(headers),
            body=bytes(body),
            lease=lease,
            since=since,
            slot=slot,
            key=key,
        )

    def next_due(self, stage: str) -> float | None:
        """Return the seconds until a stage's next parked message is due, or None if
        there is none. Messages that a worker has claimed, or that need newer code, are
        ignored. So are messages that have been due for more than a second: a worker
        that processes one in its transaction cannot renew the lease."""
        free = Holds(rules.NOT_LEASED, now=Now())
        lately = Now() - dt.timedelta(seconds=1)
        rows = self.filter(free, stage=stage, due_at__gt=lately, needs_version=None)
        first = rows.order_by("due_at", "id").annotate(now=Now())
        found = first.values_list("due_at", "now").first()
        return None if found is None else (found[0] - found[1]).total_seconds()

    def extend(self, pk: int, token: uuid.UUID, lease: float) -> None:
        """Extend the lease of a claimed message to `lease` seconds from now. A locked
        row is skipped, because no other worker can claim it anyway."""
        self._changed(
            f"UPDATE {self._table} SET lease_until = {self._sql.later()}"  # noqa: S608 - constants only
            f" WHERE id IN (SELECT id FROM {self._table} WHERE id = %s"
            f" AND lease_token = %s {self._sql.skip_locked})",
            [lease, pk, token.hex],
        )

    def unpark(self, pk: int, token: uuid.UUID, *, attempts: int = 1) -> None:
        """Release a claimed parked message, and subtract the `attempts` that were
        counted but not made. The message is due immediately."""
        self.filter(pk=pk, lease_token=token).update(
            lease_until=None, lease_token=None, attempts=models.F("attempts") - attempts
        )


def processed_sql(sql: Sql) -> str:
    """Return SQL that marks a row as processed. If the message has waited here for more
    than an hour, the SQL also sets `late_at`."""
    now, hour_ago = sql.now, sql.later("-3600")
    late = f"CASE WHEN last_received_at < {hour_ago} THEN {now} END"
    return f"processed_at = {now}, late_at = {late}, {EMPTIED}"


def read_record(row: Sequence[Any]) -> InboxRecord:
    """Return the record from a row with the columns RECORD_COLUMNS."""
    pk, message_id, attempts, deliveries, processed, dead, parked, now = row
    return InboxRecord(
        id=pk,
        message_id=read_uuid(message_id),
        attempt=attempts,
        deliveries=deliveries,
        processed=processed is not None,
        dead=dead is not None,
        parked=parked is not None,
        now=read_instant(now),
    )


def _readable(of: str, reads: Reads | None) -> tuple[str, list[Any]]:
    """Return an SQL condition and its parameters. The condition is true if this code
    can read a row. `reads` lists the types and versions that the code reads. If `reads`
    is None, the code reads every message and the condition is empty."""
    if reads is None:
        return "", []
    one = f" OR ({of}needs_type = %s AND {of}needs_version <= %s)"
    known = [value for pair in reads for value in pair]
    return f" AND ({of}needs_version IS NULL{one * len(reads)})", known
