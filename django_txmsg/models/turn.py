"""The SQL of the order per key: the conditions under which a message's predecessor is
passed, its turn has come, or it waits."""

from __future__ import annotations

import datetime as dt
import hashlib
import uuid
from dataclasses import dataclass
from typing import Any

from ..rules.inbox import BLOCKED, OPEN

_INBOX, _LETTERS = "django_txmsg_inboxmessage", "django_txmsg_deadletter"


@dataclass(frozen=True, slots=True)
class Turn:
    """The place of one message in the order of its key at one stage."""

    stage: str
    key: str
    #: Whether dead messages release their followers.
    skips: bool
    #: The predecessor, and its place in the order; None if there is none.
    after_id: uuid.UUID | None = None
    after_at: dt.datetime | None = None

    @property
    def lock(self) -> int:
        """The number of the advisory lock of the key. Only the transaction that holds
        the lock may process a message of the key."""
        named = hashlib.sha256(f"{self.stage}\0{self.key}".encode("utf-8", "replace"))
        return int.from_bytes(named.digest()[:8], "big", signed=True)


def passed_sql(message: str, stage: str, *, skips: bool) -> str:
    """Return an SQL condition for one message at one stage. It is true if the message's
    followers need not wait for the message any more at this stage. `message` is SQL for
    the message's id. `stage` is SQL for the stage's name, which appears in the
    condition only once."""
    return (
        f"EXISTS (SELECT 1 FROM {_INBOX} p WHERE p.message_id = {message}"  # noqa: S608 - constants only
        f" AND p.stage = {stage} AND {passes_sql(skips=skips)})"
    )


def passes_sql(*, skips: bool) -> str:
    """Return an SQL condition. It is true if the followers of the message in the inbox
    row `p` need not wait for that message any more."""
    return (
        "CASE WHEN p.processed_at IS NOT NULL THEN TRUE"
        f" WHEN p.dead_at IS NULL THEN FALSE ELSE {_dead_sql(skips)} END"
    )


def waits_sql(row: str) -> str:
    """Return an SQL condition that is true for a row that waits for its turn: the row
    names a predecessor, and no worker has claimed the row. The condition is false for a
    claimed row, because the worker's transaction may already have released the rows
    behind it."""
    return f"{BLOCKED.sql(row)} AND {row}.lease_token IS NULL AND {OPEN.sql(row)}"


def behind_sql(row: str) -> str:
    """Return an SQL condition. It is true if the predecessor of a row is itself
    waiting."""
    return (
        f"EXISTS (SELECT 1 FROM {_INBOX} w WHERE w.message_id = {row}.waits_for"  # noqa: S608 - constants only
        f" AND w.stage = {row}.stage AND {waits_sql('w')})"
    )


def turn_sql(
    connection: Any, turn: Turn | None, *, dead_too: bool = True
) -> tuple[str, list[Any]]:
    """Return a condition, with its parameters, for the statement that takes a message:
    the message's predecessor has released it, and no other transaction has locked the
    message's key. Without a `turn`, the condition is empty.

    The predecessor is checked first, so that a message that must wait does not lock its
    key. Without `dead_too`, only a processed predecessor counts. That is the usual
    case, and planning the full condition takes longer than running the statement.
    """
    if turn is None:
        return "", []
    # SQLite has one writer at a time: a transaction that has taken a message is alone.
    is_due, locked = "TRUE", "TRUE"
    parameters: list[Any] = []
    if turn.after_id is not None:
        is_due = (
            passed_sql("%s", "%s", skips=turn.skips)
            if dead_too
            else f"EXISTS (SELECT 1 FROM {_INBOX} p WHERE p.message_id = %s"  # noqa: S608 - constants only
            " AND p.stage = %s AND p.processed_at IS NOT NULL)"
        )
        parameters += [turn.after_id.hex, turn.stage]
    if connection.vendor == "postgresql":
        locked = "pg_try_advisory_xact_lock(%s)"
        parameters.append(turn.lock)
    return f" AND CASE WHEN {is_due} THEN {locked} ELSE FALSE END", parameters


def _dead_sql(skips: bool) -> str:
    """Return an SQL condition. It is true if the dead message `p` does not block its
    followers."""
    if skips:
        return "TRUE"
    held = _HOLDS.format(letter="l", message="p")
    return (
        f"NOT EXISTS (SELECT 1 FROM {_LETTERS} l WHERE {held}"  # noqa: S608 - constants only
        f" AND (l.resolution = 'open' OR NOT {_REPLACED}))"
    )


#: A dead letter that blocks its followers.
_HOLDS = (
    "{letter}.message_id = {message}.message_id AND {letter}.stage = {message}.stage"
    " AND {letter}.resolution IN ('open', 'replaced') AND {letter}.reason <> 'expired'"
)
#: A copy of the dead letter `l`, or a copy of the copy, has ended in its place.
_REPLACED = f"""
    EXISTS (WITH RECURSIVE copies(id) AS (
            SELECT l.replaced_by UNION
            SELECT n.replaced_by FROM {_LETTERS} n
            JOIN copies ON n.message_id = copies.id
            WHERE n.stage = l.stage AND n.resolution = 'replaced')
        SELECT 1 FROM copies JOIN {_INBOX} c ON c.message_id = copies.id
        WHERE c.stage = l.stage AND (c.processed_at IS NOT NULL
            OR (c.dead_at IS NOT NULL AND NOT EXISTS (SELECT 1 FROM {_LETTERS} x
                WHERE {_HOLDS.format(letter="x", message="c")}))))
"""  # noqa: S608 - constants only


def held_sql(token: uuid.UUID | None) -> tuple[str, list[Any]]:
    """Return an SQL condition and its parameters. The condition is true if a parked
    message is still claimed under `token`. It is empty for a message from the broker,
    which has no token."""
    return ("", []) if token is None else (" AND lease_token = %s", [token.hex])
