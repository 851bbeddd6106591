"""Whether it is a message's turn, in SQL: an ordered stage checks it when it takes a
message.

A predecessor releases its follower once it is processed, or passed: dead at a stage
that skips, expired, discarded, or replaced by a copy that is itself processed or
passed.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import uuid
from dataclasses import dataclass
from typing import Any

from django.db import models

from ..rules.inbox import IN_LINE, OPEN
from .fields import prepared

#: Due when its predecessor releases it.
NEVER = "9000-01-01 00:00:00"
_INBOX, _LETTERS = "django_txmsg_inboxmessage", "django_txmsg_deadletter"


@dataclass(frozen=True, slots=True)
class Turn:
    """The place of one message in the order of its key, at one stage."""

    stage: str
    key: str
    #: Whether dead messages release their followers.
    skips: bool
    #: The predecessor, and its place in the order; None if there is none.
    after_id: uuid.UUID | None = None
    after_at: dt.datetime | None = None

    @property
    def lock(self) -> int:
        """The number of the advisory lock that keeps the messages of its key apart."""
        named = hashlib.sha256(f"{self.stage}\0{self.key}".encode("utf-8", "replace"))
        return int.from_bytes(named.digest()[:8], "big", signed=True)


def passed_sql(message: str, stage: str, *, skips: bool) -> str:
    """Return the condition that a message, whose id in SQL is `message`, releases its
    followers at a `stage` (in SQL, used once)."""
    return (
        f"EXISTS (SELECT 1 FROM {_INBOX} p WHERE p.message_id = {message}"  # noqa: S608 - constants only
        f" AND p.stage = {stage} AND {passes_sql(skips=skips)})"
    )


def passes_sql(*, skips: bool) -> str:
    """Return the condition that the row `p` of the inbox releases its followers."""
    return (
        "CASE WHEN p.processed_at IS NOT NULL THEN TRUE"
        f" WHEN p.dead_at IS NULL THEN FALSE ELSE {_dead_sql(skips)} END"
    )


def waits_sql(row: str) -> str:
    """Return the condition that a row waits for its turn: it names its predecessor, and
    no worker holds it. Once it is claimed, its transaction may already have released
    its followers."""
    return f"{IN_LINE.sql(row)} AND {row}.lease_token IS NULL AND {OPEN.sql(row)}"


def size_sql(connection: Any) -> str:
    """Return SQL for the bytes of a waiting row's body and headers."""
    if connection.vendor == "postgresql":
        return "octet_length(body) + pg_column_size(headers)"
    return "LENGTH(body) + LENGTH(headers)"


def behind_sql(row: str) -> str:
    """Return the condition that the predecessor of a row is itself waiting."""
    return (
        f"EXISTS (SELECT 1 FROM {_INBOX} w WHERE w.message_id = {row}.waits_for"  # noqa: S608 - constants only
        f" AND w.stage = {row}.stage AND {waits_sql('w')})"
    )


def never_sql(connection: Any) -> str:
    """Return SQL for the due time of a row whose predecessor will release it."""
    if connection.vendor == "postgresql":
        return f"'{NEVER}+00'::timestamptz"
    return f"'{NEVER}'"


def turn_sql(
    model: type[models.Model],
    connection: Any,
    turn: Turn | None,
    *,
    dead_too: bool = True,
) -> tuple[str, list[Any]]:
    """Return an additional condition for taking a message, and its parameters: its turn
    has come, and no other transaction holds a message of its key. Empty for a message
    without an order.

    The turn is checked first, so that a message that must wait does not lock its key.
    Most predecessors are processed; the other cases (`dead_too`) take PostgreSQL longer
    to plan than the rest of the statement takes to run.
    """
    if turn is None:
        return "", []
    conditions: list[str] = []
    parameters: list[Any] = []
    if turn.after_id is not None:
        conditions.append(
            passed_sql("%s", "%s", skips=turn.skips)
            if dead_too
            else f"EXISTS (SELECT 1 FROM {_INBOX} p WHERE p.message_id = %s"  # noqa: S608 - constants only
            " AND p.stage = %s AND p.processed_at IS NOT NULL)"
        )
        before = prepared(model, "message_id", turn.after_id, connection)
        parameters += [before, turn.stage]
    if connection.vendor == "postgresql":
        # SQLite has one writer at a time: a transaction that has taken a message is
        # alone.
        conditions.append("pg_try_advisory_xact_lock(%s)")
        parameters.append(turn.lock)
    if not conditions:
        return "", []
    if len(conditions) == 1:
        return f" AND {conditions[0]}", parameters
    asked, locked = conditions
    return f" AND CASE WHEN {asked} THEN {locked} ELSE FALSE END", parameters


def _dead_sql(skips: bool) -> str:
    """Return the condition that the dead message `p` blocks no other."""
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
