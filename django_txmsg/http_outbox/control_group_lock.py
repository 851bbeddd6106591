"""Does anybody still store under a control group? PostgreSQL's locks and clock tell.

Each INSERT under a group takes the group's lock first, shared, and reads the clock
then (`models/outbox_store.py`, in one statement); the lock is given back with the rows:
at the commit, after they can be seen, or at the rollback of their transaction or
savepoint. So who gets the lock for himself, at an instant after which nobody joins any
more, knows that all rows are there to see.
"""

from __future__ import annotations

import datetime as dt
import enum
import hashlib
import uuid

from django.db import connections

#: Seconds by which the database's clock may step back without harm.
MARGIN = 1.0

#: In this order: a standby has locks and rows of its own, and a lock that is free tells
#: nothing as long as somebody may come and take it.
_ASK = """
    SELECT CASE
      WHEN pg_is_in_recovery() THEN 'early'
      WHEN clock_timestamp() <= %s THEN 'early'
      WHEN pg_try_advisory_xact_lock(%s) THEN 'over'
      ELSE 'held'
    END
"""


class Verdict(enum.Enum):
    """Whether a group is over: nobody can join it, and who did has ended."""

    EARLY = "early"
    HELD = "held"
    OVER = "over"


def ask(using: str, group: uuid.UUID, joined_until: dt.datetime) -> Verdict:
    """Return whether a group that can be joined until then is over. Outside of a
    transaction, in a single statement, so that the lock is free again at once: what is
    asked for its rows has to be asked later."""
    bound = joined_until + dt.timedelta(seconds=MARGIN)
    with connections[using].cursor() as cursor:
        cursor.execute(_ASK, [bound, key(group)])
        (word,) = cursor.fetchone()
    return Verdict(word)


def key(group: uuid.UUID) -> int:
    """Return the number of the group's lock."""
    digest = hashlib.sha256(b"txmsg-control-group\0" + group.bytes).digest()
    return int.from_bytes(digest[:8], "big", signed=True)
