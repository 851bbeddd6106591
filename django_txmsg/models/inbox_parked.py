"""The side track's waiting room: messages parked in the inbox table until they are due.

A parked row holds the whole message: the broker has nothing of it any more.
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

#: Message types by name, each with the version of the code here.
Reads = Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Parked:
    """A parked message whose time has come, held by one worker under a lease."""

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

        `needs` names a message type and the oldest version that reads it: no worker of
        an older one claims it, and it costs no attempt.
        False when it is processed or dead by now, or when `token`, the lease it was
        held under, has ended and somebody else has it.
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
        its parameters; none for a message that came from the broker."""
        if token is None:
            return "", []
        connection = connections[self.db]
        held = prepared(self.model, "lease_token", token, connection)
        return " AND lease_token = %s", [held]

    def due_stages(self, stages: Mapping[str, Reads | None]) -> set[str]:
        """Return which of the stages have parked messages that are due and free, and of
        a version that the code here reads."""
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
        """Take one due parked message of a stage, counting the attempt it is for.

        `reads` are the types and versions that the code here knows; None reads all.
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
        """Keep a claimed parked message for `lease` seconds from now, unless its row
        is locked: then nobody else can claim it."""
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
        """Give a claimed parked message back, due now, and so many attempts that were
        counted and not made."""
        self.filter(pk=pk, lease_token=token).update(
            lease_until=None, lease_token=None, attempts=models.F("attempts") - attempts
        )


def _readable(of: str, reads: Reads | None) -> tuple[str, list[Any]]:
    """Return the condition that code which knows these types can read a row, with its
    parameters; none for a stage that takes bodies as JSON gives them."""
    if reads is None:
        return "", []
    one = f" OR ({of}needs_type = %s AND {of}needs_version <= %s)"
    known = [value for pair in reads for value in pair]
    return f" AND ({of}needs_version IS NULL{one * len(reads)})", known
