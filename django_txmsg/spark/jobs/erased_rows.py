"""The databases' side of `erase`: all rows of some messages, whatever their state."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import closing

from ... import wire
from ...rules import inbox
from ..connection import Connection, connect_plain
from ..spec import SourceSpec

#: Relations that belong to a table of the lake. The broker in the database stores a
#: message's id in its headers.
_RELATIONS = {
    "attempts": ("django_txmsg_attempt", "django_txmsg_queuemessage"),
    # A task's run contains the task's return value.
    "inbox": ("django_txmsg_inboxmessage", "django_txmsg_taskrun"),
    "verdicts": ("django_txmsg_finding",),
    "dead_letters": ("django_txmsg_deadletter",),
    "outbox": ("django_txmsg_stagedmessage", "django_txmsg_outboxmessage"),
}
_QUEUE, _INBOX = "django_txmsg_queuemessage", "django_txmsg_inboxmessage"
_OUTBOX = "django_txmsg_outboxmessage"
#: The responses to requests with an Idempotency-Key.
RESPONSES = "django_txmsg_idempotencykey"
#: Most messages of a statement: in SQLite all other writers wait for it.
_SLICE = 500


def messages_named(
    source: SourceSpec, keys: Sequence[str], correlation_ids: Sequence[str]
) -> set[str]:
    """Return the ids of the messages in a database that have one of these keys or
    correlation ids."""
    found: set[str] = set()
    with closing(connect_plain(source)) as connection:
        header = _header(connection, wire.KEY)
        for value in keys:
            found |= _queued(connection, wire.KEY, value)
            for relation, column in (
                ("django_txmsg_outboxmessage", '"key"'),
                ("django_txmsg_stagedmessage", '"key"'),
                ("django_txmsg_inboxmessage", header),
                ("django_txmsg_deadletter", header),
            ):
                found |= _ids(connection, relation, column, value)
        for value in correlation_ids:
            found |= _queued(connection, wire.CORRELATION_ID, value)
            for relation in (
                "django_txmsg_outboxmessage", "django_txmsg_stagedmessage",
                "django_txmsg_inboxmessage", "django_txmsg_deadletter",
            ):  # fmt: skip
                found |= _ids(connection, relation, "correlation_id", value)
    return found


def erase_rows(
    source: SourceSpec, name: str, ids: Sequence[str], *, dry_run: bool
) -> dict[str, int]:
    """Delete the rows of messages that belong to a table of the lake, or count them,
    and return the numbers by relation."""
    counts: dict[str, int] = {}
    with closing(connect_plain(source)) as connection:
        for relation in _RELATIONS.get(name, ()):
            counts[relation] = 0
            for start in range(0, len(ids), _SLICE):
                where = _where(connection, relation, ids[start : start + _SLICE])
                if dry_run:
                    counts[relation] += connection.value(
                        f"SELECT count(*) FROM {relation} WHERE {where}"
                    )
                else:
                    counts[relation] += connection.execute(
                        f"DELETE FROM {relation} WHERE {where}"
                    )
                    if relation == _INBOX:
                        _let_go(connection, where)
    return counts


def erase_tails(source: SourceSpec, keys: Sequence[str], *, dry_run: bool) -> int:
    """Delete the relay's records of keys, or count them: the order of those keys starts
    anew."""
    verb = "SELECT count(*)" if dry_run else "DELETE"
    found = 0
    with closing(connect_plain(source)) as connection:
        ask = connection.value if dry_run else connection.execute
        for key in keys:
            found += ask(f'{verb} FROM django_txmsg_keytail WHERE "key" = %s', key)
    return found


def _let_go(connection: Connection, erased: str) -> None:
    """Release the messages that wait in an ordered stage for an erased one. A worker
    that has claimed one of them, and is about to park it again, loses its claim."""
    postgresql = connection.vendor == "postgresql"
    now = "now()" if postgresql else "strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')"
    headers = (
        f"headers - '{wire.AFTER}'"
        if postgresql
        else f"json_remove(headers, '$.\"{wire.AFTER}\"')"
    )
    connection.execute(
        f"UPDATE {_INBOX} SET due_at = {now}, waits_for = NULL, headers = {headers},"
        " lease_until = NULL, lease_token = NULL"
        f" WHERE {erased.replace('message_id', 'waits_for')} AND {inbox.OPEN.sql()}"
    )


def sessions_of(source: SourceSpec, ids: Sequence[str]) -> set[str]:
    """Return the sessions of HTTP requests that stored messages of a database."""
    found: set[str] = set()
    with closing(connect_plain(source)) as connection:
        for start in range(0, len(ids), _SLICE):
            where = _where(connection, _OUTBOX, ids[start : start + _SLICE])
            rows = connection.rows(
                f"SELECT DISTINCT session_id FROM {_OUTBOX} WHERE {where}"
                " AND session_id IS NOT NULL"
            )
            found |= {str(uuid.UUID(str(row[0]))) for row in rows}
    return found


def erase_responses(
    source: SourceSpec, sessions: Sequence[str], *, dry_run: bool
) -> int:
    """Empty the responses stored under an Idempotency-Key for requests of these
    sessions, and return how many. The keys stay, so that no request is executed
    again."""
    count = 0
    with closing(connect_plain(source)) as connection:
        for start in range(0, len(sessions), _SLICE):
            part = [uuid.UUID(one) for one in sessions[start : start + _SLICE]]
            where = f"session_id IN ({', '.join(['%s'] * len(part))})"
            where += " AND (body IS NOT NULL OR headers <> '[]')"
            values = map(connection.given, part)
            if dry_run:
                count += connection.value(
                    f"SELECT count(*) FROM {RESPONSES} WHERE {where}", *values
                )
            else:
                count += connection.execute(
                    f"UPDATE {RESPONSES} SET body = NULL, headers = '[]' WHERE {where}",
                    *values,
                )
    return count


def _ids(connection: Connection, relation: str, column: str, value: str) -> set[str]:
    rows = connection.rows(
        f"SELECT message_id FROM {relation} WHERE {column} = %s", value
    )
    return {str(uuid.UUID(str(row[0]))) for row in rows}


def _queued(connection: Connection, header: str, value: str) -> set[str]:
    """Return the ids of messages in the embedded broker's queues: another service has
    sent them, or their outbox rows are pruned."""
    rows = connection.rows(
        f"SELECT {_header(connection, wire.MESSAGE_ID)} FROM {_QUEUE}"
        f" WHERE {_header(connection, header)} = %s",
        value,
    )
    return {known for (text,) in rows if (known := _id_of(text))}


def _id_of(text: str | None) -> str:
    try:
        return str(uuid.UUID(text or ""))
    except ValueError:
        return ""  # of a sender that is none of ours


def _where(connection: Connection, relation: str, ids: Sequence[str]) -> str:
    # Literals of parsed ids, never of a user's text.
    texts = [str(uuid.UUID(one)) for one in ids]
    if relation == _QUEUE:
        listed = ", ".join(f"'{one}'" for one in texts)
        return f"{_header(connection, wire.MESSAGE_ID)} IN ({listed})"
    if connection.vendor == "sqlite":
        texts = [one.replace("-", "") for one in texts]
    listed = ", ".join(f"'{one}'" for one in texts)
    return f"message_id IN ({listed})"


def _header(connection: Connection, name: str) -> str:
    if connection.vendor == "sqlite":
        return f"json_extract(headers, '$.\"{name}\"')"
    return f"headers ->> '{name}'"
