"""The side track's storage: messages parked in the inbox table until they are due.

A parked row holds the whole message: the broker does not have it any more.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.db import connections, models

from ..rules import lease as leases
from ..rules.inbox import OPEN
from .claiming import bounds, claim_sql
from .fields import (
    began_sql,
    later_sql,
    later_value,
    now_sql,
    prepared,
    skip_locked_sql,
)
from .inbox_record import SEEN_COLUMNS, RecordingManager, Seen, read_seen

#: Message types by name, each with the version of this code.
Reads = Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Parked:
    """A due parked message, held by one worker under a lease."""

    seen: Seen
    destination: str
    headers: dict[str, str]
    body: bytes
    #: Seconds from one renewal of the lease to its end.
    lease: float


class ParkedManager(RecordingManager):
    """The transitions of parked messages, each in a single statement."""

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
    ) -> bool:
        """Keep the whole message here until it is due again in `delay` seconds.

        `needs` names a message type and the oldest version that reads it: workers with
        older code do not claim it, and it costs no attempt. Returns False if it is
        already processed or dead, or if its lease, `token`, has ended and another
        worker has it.
        """
        connection = connections[self.db]
        held, fence = self.fence(token)
        # Its claim counted the attempt.
        uncounted = int(needs is not None and token is not None)
        with connection.cursor() as cursor:
            cursor.execute(
                f"UPDATE {self._table} SET due_at = {later_sql(connection)},"  # noqa: S608 - constants only
                " headers = %s, body = %s, last_error = %s, lease_until = NULL,"
                " lease_token = NULL, needs_type = %s, needs_version = %s,"
                f" attempts = attempts - {uncounted} WHERE id = %s"
                f" AND {OPEN.sql()}{held}",
                [
                    later_value(connection, delay),
                    prepared(self.model, "headers", dict(headers), connection),
                    prepared(self.model, "body", body, connection),
                    error,
                    *(needs or ("", None)),
                    pk,
                    *fence,
                ],
            )
            return bool(cursor.rowcount)

    def fence(self, token: uuid.UUID | None) -> tuple[str, list[Any]]:
        """Return the condition that a parked message is still held under `token`, and
        its parameters; empty for a message from the broker."""
        if token is None:
            return "", []
        connection = connections[self.db]
        held = prepared(self.model, "lease_token", token, connection)
        return " AND lease_token = %s", [held]

    def due_stages(self, stages: Mapping[str, Reads | None]) -> set[str]:
        """Return which of the stages have parked messages that are due, unclaimed and
        readable by this code."""
        connection = connections[self.db]
        now = began_sql(connection)
        queries: list[str] = []
        parameters: list[Any] = []
        for stage, reads in stages.items():
            readable, versions = _readable("", reads)
            queries.append(
                f"SELECT %s AS stage WHERE EXISTS (SELECT 1 FROM {self._table}"  # noqa: S608 - constants only
                f" WHERE stage = %s AND due_at <= {now}{readable}"
                f" AND {leases.FREE.sql(now=now)})"
            )
            parameters += [stage, stage, *versions]
        with connection.cursor() as cursor:
            cursor.execute(" UNION ALL ".join(queries), parameters)
            return {stage for (stage,) in cursor.fetchall()}

    def claim_parked(
        self, stage: str, token: uuid.UUID, lease: float, reads: Reads | None = None
    ) -> Parked | None:
        """Claim one due parked message of a stage, and count the attempt.

        `reads` are the types and versions that this code reads; None reads all.
        """
        readable, versions = _readable("c.", reads)
        connection = connections[self.db]
        now = now_sql(connection)
        sql = claim_sql(
            connection,
            self._table,
            due="due_at",
            where=f"c.stage = %s AND c.due_at <= {began_sql(connection)} AND"
            f" {leases.FREE.sql('c', now=began_sql(connection))}{readable}",
            assign=f"lease_until = {later_sql(connection)}, lease_token = %s,"
            f" attempts = attempts + 1, started_at = {now}",
            returning=f"{SEEN_COLUMNS.format(now=now)}, destination, headers, body",
        )
        with connection.cursor() as cursor:
            cursor.execute(
                sql,
                [
                    stage,
                    *versions,
                    *bounds(1),
                    later_value(connection, lease),
                    prepared(self.model, "lease_token", token, connection),
                ],
            )
            row = cursor.fetchone()
        if row is None:
            return None
        *seen, destination, headers, body = row
        return Parked(
            seen=read_seen(seen),
            destination=destination,
            headers=json.loads(headers) if isinstance(headers, str) else headers,
            body=bytes(body),
            lease=lease,
        )

    def extend(self, pk: int, token: uuid.UUID, lease: float) -> None:
        """Hold a claimed parked message for `lease` seconds from now, unless its row is
        locked: then no other worker can claim it anyway."""
        connection = connections[self.db]
        with connection.cursor() as cursor:
            cursor.execute(
                f"UPDATE {self._table} SET lease_until = {later_sql(connection)}"  # noqa: S608 - constants only
                f" WHERE id IN (SELECT id FROM {self._table} WHERE id = %s"
                f" AND lease_token = %s {skip_locked_sql(connection)})",
                [
                    later_value(connection, lease),
                    pk,
                    prepared(self.model, "lease_token", token, connection),
                ],
            )

    def unpark(self, pk: int, token: uuid.UUID, *, attempts: int = 1) -> None:
        """Release a claimed parked message, due now, and uncount attempts that were
        counted but not made."""
        self.filter(pk=pk, lease_token=token).update(
            lease_until=None, lease_token=None, attempts=models.F("attempts") - attempts
        )


def _readable(of: str, reads: Reads | None) -> tuple[str, list[Any]]:
    """Return the condition that code with these types can read a row, and its
    parameters; empty for a stage that takes bodies as parsed JSON."""
    if reads is None:
        return "", []
    one = f" OR ({of}needs_type = %s AND {of}needs_version <= %s)"
    known = [value for pair in reads for value in pair]
    return f" AND ({of}needs_version IS NULL{one * len(reads)})", known
