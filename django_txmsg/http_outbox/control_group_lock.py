"""Whether any session may still store under a control group, by PostgreSQL's locks and
clock.

Each INSERT under a group first takes the group's lock, shared, and then reads the clock
(`models/outbox_store.py`, in one statement). The lock is released together with the
rows: at the commit, when they are visible, or at the rollback of their transaction or
savepoint. So a receiver that gets the lock exclusively, after the time to join has
passed, knows that all rows are visible.
"""

from __future__ import annotations

import datetime as dt
import enum
import hashlib
import uuid

from django.db import connections

#: Seconds by which the database's clock may step back without harm.
MARGIN = 1.0

#: Checked in this order: a standby has its own locks, and a free lock means nothing
#: while sessions may still join.
_ASK = """
    SELECT CASE
      WHEN pg_is_in_recovery() THEN 'early'
      WHEN clock_timestamp() <= %s THEN 'early'
      WHEN pg_try_advisory_xact_lock(%s) THEN 'over'
      ELSE 'held'
    END
"""


class Verdict(enum.Enum):
    """Whether a group has ended: no session can join, and all that joined have
    ended."""

    EARLY = "early"
    HELD = "held"
    OVER = "over"


def ask(using: str, group: uuid.UUID, joined_until: dt.datetime) -> Verdict:
    """Return whether a group that can be joined until then has ended. Runs outside of a
    transaction, in a single statement, so that the lock is free again at once. Query
    the group's rows only afterwards."""
    bound = joined_until + dt.timedelta(seconds=MARGIN)
    with connections[using].cursor() as cursor:
        cursor.execute(_ASK, [bound, key(group)])
        (word,) = cursor.fetchone()
    return Verdict(word)


def key(group: uuid.UUID) -> int:
    """Return the number of the group's lock."""
    digest = hashlib.sha256(b"txmsg-control-group\0" + group.bytes).digest()
    return int.from_bytes(digest[:8], "big", signed=True)
