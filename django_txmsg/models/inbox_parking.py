"""The statements that park messages in the inbox until their next attempt, and claim
the messages that are due."""

from __future__ import annotations

import datetime as dt
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from django.db import models
from django.db.models.functions import Now

from .. import rules
from ..rules.inbox import OPEN
from .claiming import bounds, claim_sql
from .fields import Holds, Later, SqlManager
from .inbox_arrival import RECORD_COLUMNS, InboxRecord, read_record
from .turn import Turn

#: Message types by name, each with the version of this code.
Reads = Sequence[tuple[str, int]]

#: Stages that one query looks up. SQLite allows 500 SELECTs in a UNION ALL.
LOOKED_TOGETHER = 400


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


class ParkingManager(SqlManager):
    """Parks and claims messages."""

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


def _readable(of: str, reads: Reads | None) -> tuple[str, list[Any]]:
    """Return an SQL condition and its parameters. The condition is true if this code
    can read a row. `reads` lists the types and versions that the code reads. If `reads`
    is None, the code reads every message and the condition is empty."""
    if reads is None:
        return "", []
    one = f" OR ({of}needs_type = %s AND {of}needs_version <= %s)"
    known = [value for pair in reads for value in pair]
    return f" AND ({of}needs_version IS NULL{one * len(reads)})", known
