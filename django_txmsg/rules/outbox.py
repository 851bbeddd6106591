"""The states of a stored message: `pending → dispatched | dead | cancelled`."""

from __future__ import annotations

from . import Rule, flows, inbox
from .dead_letters import is_open

#: How the `replay_id` of a message begins that the pipeline has stored under a new id.
#: Like ordinary messages, it gets a place in the order of its key.
NEW = "new/"
#: How the `replay_id` of a redelivered dead letter begins.
REDELIVERED = "dead-letter-"


def wrong_run(name: str) -> str:
    """Return what is wrong with the name of a replay, a send or a write, or "" if it is
    valid. The relay would take a message that is stored again for a new one if the name
    began with NEW."""
    if not 0 < len(name) <= 64:
        return "a name has 1 to 64 characters"
    return f"a name does not begin with {NEW}" if name.startswith(NEW) else ""


def is_again(replay_id: str) -> bool:
    """Return whether a message is stored again under its own id."""
    return bool(replay_id) and not replay_id.startswith(NEW)


def origin(replay_id: str) -> str:
    """Return in words what has stored a message again, or under a new id. Empty for an
    ordinary message."""
    again = "again, " if is_again(replay_id) else ""
    return f"{again}by {replay_id.removeprefix(NEW)}" if replay_id else ""


#: It must still leave. Worded like the index that a claim scans.
PENDING = Rule("{dispatched_at} IS NULL AND {dead_at} IS NULL")

#: The same condition, worded differently from the index that a claim scans. If
#: statistics were collected while nothing was pending, the planner believes that index
#: to be short, and scans all of it to find a few ids or a key. The index of keys is
#: worded like this.
PENDING_OTHERWISE = Rule("COALESCE({dispatched_at}, {dead_at}) IS NULL")

#: It should leave now. It is overdue if this was true OVERDUE ago already.
DUE = PENDING & Rule("{due_at} <= {now}")

DISPATCHED = Rule("{dispatched_at} IS NOT NULL")

#: It is dead: a relay gave it up, so it never left.
DEAD = Rule("{dead_at} IS NOT NULL AND {cancelled_at} IS NULL")

#: It was cancelled: dead by intent, without a dead letter. (`dead_at` is named for its
#: index.)
CANCELLED = Rule("{dead_at} IS NOT NULL AND {cancelled_at} IS NOT NULL")

#: It holds its unique key, because a stage here has received it and not ended it.
_HOLDS = Rule(
    "{unique_key} IS NOT NULL AND EXISTS (SELECT 1 FROM django_txmsg_inboxmessage i"  # noqa: S608 - constants only
    f" WHERE i.message_id = {{message_id}} AND {inbox.OPEN.sql('i')})"
)

#: It is a request that a consumer may still execute, and a run may undo it. The undo
#: of a foreign request is sent after the request has expired.
_MAY_BE_UNDONE = (
    Rule("{expires_at} IS NOT NULL AND {expires_at} >= {cutoff}") & flows.MAY_UNDO
)

#: It was sent, or may have been, and the undo waits for its expiry.
UNDO_WAITS = ~PENDING & _MAY_BE_UNDONE

#: It may be deleted or archived. Worded so that no index matches: callers page by the
#: primary key, and a planner that chose a BRIN index would read all of it for each
#: page.
SETTLED = (
    Rule("COALESCE({dispatched_at}, {dead_at}) < {cutoff}")
    & (Rule("{dead_at} IS NULL") | ~is_open("''"))
    & ~_HOLDS
    & ~_MAY_BE_UNDONE
)
