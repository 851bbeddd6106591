"""The statements by which a relay claims and settles pending rows of the outbox.

A claim is a lease with a token, and every later statement checks the token. So a relay
whose lease has ended can change nothing.
"""

from __future__ import annotations

import datetime as dt
import json
import uuid
from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from django.db import connections

from .. import rules
from ..rules.outbox import PENDING, PENDING_OTHERWISE, is_again
from ..wire import AFTER, format_instant
from .claiming import UNLIMITED, bounds, claim_sql
from .fields import Holds, OneOf, SqlManager, no_wait_sql, read_instant


class Claimed(NamedTuple):
    """A pending row that one relay holds until its lease ends. A busy relay creates
    very many of these tuples. To save time, most values stay in the form in which the
    database returns them."""

    id: int
    #: The message's UUID, in the form of its header.
    message_id: str
    destination: str
    key: str
    correlation_id: str
    headers: dict[str, str]
    content_type: str
    body: bytes
    expires_at: dt.datetime | None
    attempts: int
    #: Whether it has a key, but no place in the order of that key yet.
    unlinked: bool
    expired: bool
    #: Whether its headers are not a JSON object: somebody has written the row by hand.
    malformed: bool
    #: When it was stored, in the form of its header.
    created: str
    #: When it was due, in the database's own format.
    due: str
    #: The service that stored it; "" for an earlier release.
    service: str
    #: Whether the broker or the destination has refused it before.
    has_error: bool

    def linked(self, after: str | None) -> Claimed:
        """Return the row with the link to its predecessor, if it has one."""
        headers = self.headers if after is None else {**self.headers, AFTER: after}
        return self._replace(headers=headers, unlinked=False)


class ClaimingManager(SqlManager):
    """Changes the states of pending rows, many rows with each statement."""

    def claim(
        self,
        *,
        broker: str,
        token: uuid.UUID,
        lease: float,
        limit: int,
        ids: list[int] | None = None,
        session_id: uuid.UUID | None = None,
        floor: str | None = None,
        services: Sequence[str] | None = None,
        max_bytes: int | None = None,
        larger: bool = True,
        only: str | None = None,
        but: Collection[str] = (),
        but_keys: Collection[str] = (),
        heads: bool = False,
    ) -> list[Claimed]:
        """Claim due rows for `lease` seconds, the oldest first. No other relay gets
        these rows. A row with a key is claimed only together with all earlier pending
        rows of its key.

        - `limit` and `max_bytes` (of bodies, by default `claiming.MAX_BYTES`) limit the
          claim. If the first row alone is larger than `max_bytes`, it is claimed only
          if `larger` is set.
        - `services` selects the rows that these services stored, and the rows of
          releases that did not record the service. If `services` is None, the rows of
          all services are selected.
        - `ids`, `session_id` and the destination `only` narrow the selection.
        - `but` excludes destinations, and rows that must follow an excluded row.
          `but_keys` excludes keys.
        - `floor` excludes rows that were due before this time, so that a busy relay
          does not scan the rows that it has just settled.
        - `heads` selects, of each key, only the first pending row. So rows behind a row
          that another transaction has locked cannot fill the batch.
        """
        connection, table = connections[self.db], self._table
        sql = self._sql
        now = sql.began
        narrow, pending = "", PENDING.sql("c")
        ours, stored_by = _ours_sql(services)
        parameters: list[Any] = [broker, *stored_by]
        if ids is not None:
            pending = PENDING_OTHERWISE.sql("c")
            condition, values = sql.ids("c.id", ids)
            narrow += f" AND {condition}"
            parameters += values
        if session_id is not None:
            narrow += " AND c.session_id = %s"
            parameters.append(session_id.hex)
        if floor is not None:
            narrow += " AND c.due_at >= %s"
            parameters.append(floor)
        # Excluded rows are not selected at all: if they were dropped later, they could
        # fill every batch.
        waits = "TRUE" if heads else "e.due_at > c.due_at"
        blocking: list[Any] = []
        if only is not None:
            narrow += " AND c.destination = %s"
            parameters.append(only)
            waits += " OR e.destination <> c.destination"
        if but:
            condition, values = sql.ids("c.destination", but)
            narrow += f" AND NOT ({condition})"
            parameters += values
            condition, blocking = sql.ids("e.destination", but)
            waits += f" OR {condition}"
        if but_keys:
            condition, values = sql.ids("c.key", but_keys)
            narrow += f" AND NOT ({condition})"
            parameters += values
        parameters += [*stored_by, *blocking]
        held, left = (
            rules.LEASED.sql("e", now=now),
            "e.id NOT IN (SELECT id FROM picked)",
        )
        no_wait, waits_not = no_wait_sql(connection)
        statement = claim_sql(
            sql,
            table,
            before=no_wait,
            due="due_at",
            where=f"""
                {pending} AND c.broker = %s AND {ours.format("c")} AND c.due_at <= {now}
                AND {rules.NOT_LEASED.sql("c", now=now)} {narrow}
                AND {_leads_sql(table, "c", ours, f"{waits} OR {held}")}
            """,
            # Once claimed, it cannot be reused for its unique key: its receiver may
            # have begun already.
            assign=f"lease_until = {sql.later()}, lease_token = %s,"
            " unique_key = CASE WHEN unique_until_processed THEN unique_key END",
            also=f"{waits_not} AND {_leads_sql(table, 'o', ours, left)}",
            returning=f"""
                id, {sql.text("message_id")}, destination, key,
                correlation_id, {sql.text("headers")}, content_type, body,
                expires_at, attempts, replay_id, linked_at,
                COALESCE(expires_at <= {now}, FALSE),
                {sql.instant_text("created_at")},
                {sql.text("due_at")}, service, last_error <> ''
            """,
        )
        parameters += [
            *bounds(limit, max_bytes, alone=UNLIMITED if larger else 0),
            lease,
            token.hex,
            *stored_by,
        ]
        return sorted(map(_claimed, self._rows(statement, parameters)), key=_by_id)

    def held_back(
        self,
        ids: list[int],
        limit: int,
        *,
        broker: str,
        services: Sequence[str] | None = None,
    ) -> list[int]:
        """Return the ids of rows that must be claimed together: the due, unclaimed rows
        among `ids` that have an ordering key, and all earlier pending rows with the
        same ordering keys. Returns at most `limit` ids, in the order in which the rows
        are sent. `broker` and `services` select rows as in `claim()`."""
        connection, table = connections[self.db], self._table
        condition, values = self._sql.ids("c.id", ids)
        own, stored_by = _ours_sql(services)
        ours = f"{{0}}.broker = %s AND {own}"
        now = self._sql.now
        # Limited for each key: a million rows can follow a delayed one.
        earlier = f"""
            SELECT e.id FROM {table} e
            WHERE e.key = held.key AND e.id <= held.last AND NOT (e.key = '')
              AND {PENDING_OTHERWISE.sql("e")} AND {ours.format("e")}
            ORDER BY e.id LIMIT %s
        """  # noqa: S608 - constants only
        if connection.vendor == "postgresql":
            join = f"CROSS JOIN LATERAL ({earlier}) e"
        else:
            join = f"JOIN {table} e ON e.id IN ({earlier})"
        rows = self._rows(
            f"""
            WITH held AS MATERIALIZED (
                SELECT c.key, max(c.id) AS last FROM {table} c
                WHERE {condition} AND {PENDING_OTHERWISE.sql("c")}
                  AND {ours.format("c")}
                  AND NOT (c.key = '') AND c.due_at <= {now}
                  AND {rules.NOT_LEASED.sql("c", now=now)}
                GROUP BY c.key)
            SELECT e.id FROM held {join} ORDER BY e.id LIMIT %s
            """,  # noqa: S608 - constants only
            [*values, broker, *stored_by, broker, *stored_by, limit, limit],
        )
        return [pk for (pk,) in rows]

    def link(self, links: Mapping[int, str | None], token: uuid.UUID, name: str) -> int:
        """Store each row's link to its predecessor in the header `name`; `None` means
        that the row is the first of its key. Returns the number of rows that still
        belonged to this lease."""
        connection, table = connections[self.db], self._table
        given = [{"id": pk, "after": after} for pk, after in links.items()]
        source = self._sql.given("g", id="bigint", after="text")
        if connection.vendor == "postgresql":
            with_link = f"o.headers || jsonb_build_object('{name}', g.after)"
        else:
            with_link = f"json_set(o.headers, '$.\"{name}\"', g.after)"
        pending = PENDING_OTHERWISE.sql("o")
        return self._changed(
            f"UPDATE {table} AS o SET linked_at = {self._sql.now},"  # noqa: S608 - constants only
            f" headers = CASE WHEN g.after IS NULL THEN o.headers ELSE {with_link}"
            f" END FROM {source} WHERE o.id = g.id AND o.lease_token = %s"
            f" AND o.linked_at IS NULL AND {pending}",
            [json.dumps(given), token.hex],
        )

    def mark_dispatched(self, ids: list[int], token: uuid.UUID) -> int:
        """Mark rows as dispatched, after the broker has confirmed their messages.
        Returns the number of rows that still belonged to this lease."""
        return self._leased(
            ids, token, "dispatched_at = {now}, lease_until = NULL, lease_token = NULL"
        )

    def release(
        self,
        ids: list[int],
        token: uuid.UUID,
        *,
        error: str = "",
        delay: float = 0.0,
        skip_locked: bool = False,
    ) -> int:
        """Release rows without counting an attempt. Pass `error` if the rows'
        destination currently accepts no messages. Omit `error` if the broker did not
        answer. With `delay`, the rows are due again after so many seconds. With
        `skip_locked`, rows that another transaction has locked keep their lease."""
        free: str = "lease_until = NULL, lease_token = NULL"
        values: list[Any] = []
        if error:
            free, values = f"{free}, last_error = %s", [error]
        if delay:
            free += f", due_at = {self._sql.later()}"
            values.append(delay)
        return self._leased(ids, token, free, values, skip_locked=skip_locked)

    def extend(self, ids: list[int], token: uuid.UUID, lease: float) -> list[int]:
        """Extend the lease of rows to `lease` seconds from now. Returns the ids of the
        rows that still belonged to this lease. Rows that another transaction has locked
        are omitted, and not extended."""
        extended = f"lease_until = {self._sql.later()}"
        sql, values = self._leased_sql(ids, token, extended, [lease], skip_locked=True)
        return [pk for (pk,) in self._rows(f"{sql} RETURNING id", values)]

    def renew(self, ids: list[int], token: uuid.UUID, seconds: float) -> bool:
        """Extend the lease of the unsettled rows, except rows that another transaction
        has locked: if this waited for one row, every lease of the process would end.
        Returns False if there was such a row, whose lease may therefore end."""
        extended = self.extend(ids, token, seconds)
        mine = OneOf("id", ids), Holds(PENDING_OTHERWISE)
        rows = self.filter(*mine, lease_token=token)
        return len(extended) >= rows.count()

    def reschedule(self, pk: int, token: uuid.UUID, *, delay: float, error: str) -> int:
        """Count a failed dispatch and make the row due again in `delay` seconds."""
        return self._leased(
            [pk],
            token,
            "attempts = attempts + 1, lease_until = NULL, lease_token = NULL,"
            f" last_error = %s, due_at = {self._sql.later()}",
            [error, delay],
        )

    def mark_dead(
        self, pk: int, token: uuid.UUID, *, error: str, cancelled: bool = False
    ) -> int:
        """Mark a row as dead, because the broker rejects its message or because the
        message has expired. Pass `cancelled` if the message gets no dead letter: the
        row is then also marked as cancelled. Returns 1, or 0 if the row no longer
        belonged to this lease."""
        return self._leased(
            [pk],
            token,
            "dead_at = {now}, attempts = attempts + 1, lease_until = NULL,"
            " lease_token = NULL, last_error = %s"
            + (", cancelled_at = {now}" if cancelled else ""),
            [error],
        )

    def _leased(
        self,
        ids: list[int],
        token: uuid.UUID,
        assignments: str,
        values: Sequence[Any] = (),
        *,
        skip_locked: bool = False,
    ) -> int:
        """Change rows that are still pending and belong to this lease."""
        return self._changed(
            *self._leased_sql(ids, token, assignments, values, skip_locked=skip_locked)
        )

    def _leased_sql(
        self,
        ids: list[int],
        token: uuid.UUID,
        assignments: str,
        values: Sequence[Any],
        *,
        skip_locked: bool,
    ) -> tuple[str, list[Any]]:
        connection, table = connections[self.db], self._table
        condition, id_values = self._sql.ids("id", ids)
        assignments = assignments.replace("{now}", self._sql.now)
        # If a crash loses this, the message is sent again, with the same id.
        no_wait, waits_not = no_wait_sql(connection)
        leased = f"{condition} AND lease_token = %s AND {PENDING_OTHERWISE.sql()}"
        if skip_locked:
            free = f"SELECT id FROM {table} WHERE {leased} {self._sql.skip_locked}"  # noqa: S608 - constants only
            leased = f"id IN ({free})"
        return (
            f"{no_wait} UPDATE {table} SET {assignments} WHERE {leased}"  # noqa: S608 - constants only
            f" AND {waits_not}",
            [*values, *id_values, token.hex],
        )


_by_id = itemgetter(0)


def _ours_sql(services: Sequence[str] | None) -> tuple[str, list[str]]:
    """Return an SQL condition and its parameters. The condition is true if one of the
    services stored the row `{0}`."""
    if services is None:
        return "TRUE", []
    stored_by = ["", *services]
    return f"{{0}}.service IN ({', '.join(['%s'] * len(stored_by))})", stored_by


def _leads_sql(table: str, row: str, ours: str, stays: str) -> str:
    """Return the SQL condition under which a row may be sent: the row has no key, or it
    does not have to wait for another row. It has to wait for every earlier pending row
    `e` of the same key that meets the condition `stays`."""
    return f"""
        ({row}.key = '' OR NOT EXISTS (
            SELECT 1 FROM {table} e
            WHERE e.key = {row}.key AND NOT (e.key = '') AND e.id < {row}.id
              AND e.broker = {row}.broker AND {PENDING_OTHERWISE.sql("e")}
              AND {ours.format("e")} AND ({stays})))
    """  # noqa: S608 - constants only


def _claimed(row: Sequence[Any]) -> Claimed:
    pk, message_id, destination, key, correlation_id, headers, kind, body, *rest = row
    expires_at, attempts, replay_id, linked_at, expired, created, *last = rest
    due, service, has_error = last
    read = {} if headers == "{}" else json.loads(headers)
    malformed = not isinstance(read, dict)
    return Claimed(
        pk,
        message_id if len(message_id) == 36 else str(uuid.UUID(message_id)),
        destination,
        key,
        correlation_id,
        {} if malformed else read,
        kind,
        bytes(body),
        expires_at and read_instant(expires_at),
        attempts,
        bool(key) and linked_at is None and not is_again(replay_id) and not malformed,
        # Other messages wait for a linked one, so it is sent in any case.
        bool(expired) and linked_at is None,
        malformed,
        _instant_text(created),
        due,
        service,
        bool(has_error),
    )


def _instant_text(value: Any) -> str:
    ready = isinstance(value, str) and value.endswith("+00:00")
    return value if ready else format_instant(read_instant(value))
