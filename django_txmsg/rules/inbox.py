"""The states of a received message: `received → processed | dead`, and what it waits
for between two attempts."""

from __future__ import annotations

from .dead_letters import is_open
from .rule import Rule
from .stages import PAUSED_NAMES

#: It must be processed yet.
OPEN = Rule("{processed_at} IS NULL AND {dead_at} IS NULL")

PROCESSED = Rule("{processed_at} IS NOT NULL")
DEAD = Rule("{dead_at} IS NOT NULL")

#: It waits here for its next attempt. In the words of an index.
PARKED = Rule("{due_at} IS NOT NULL")

#: It waits for the message before it, of its key.
IN_LINE = Rule("{waits_for} IS NOT NULL")

#: It waits for code which reads its body: for a deployment.
NEEDS_NEWER_CODE = PARKED & Rule("{needs_version} IS NOT NULL")

#: Its stage is paused.
PAUSED = Rule("{stage} IN " + PAUSED_NAMES)

#: Nothing is late about it, however long it waits: it is the turn of another message,
#: of a deployment, or of the operator who has paused its stage.
HELD_BACK = Rule("{needs_version} IS NOT NULL") | IN_LINE | PAUSED

#: It should be tried now. It is overdue if this held OVERDUE ago already.
DUE = PARKED & Rule("{due_at} <= {now}") & ~HELD_BACK

#: It is a OnceTask's that Celery has killed by its time limit, or by hand: nobody could
#: say so here, and its message does not come again. (What comes from a service says
#: when it was stored, but for a task.)
KILLED = (
    OPEN & Rule("{due_at} IS NULL AND {created_at} IS NULL") & Rule("{service} <> ''")
)

#: Its last instant: while copies of a message keep coming, it must be remembered. In
#: words that no index knows, as those of the outbox.
_LAST = (
    "CASE WHEN COALESCE({processed_at}, {dead_at}) > {last_received_at}"
    " THEN COALESCE({processed_at}, {dead_at}) ELSE {last_received_at} END"
)

#: It may be forgotten, or archived.
SETTLED = Rule(_LAST + " < {cutoff}") & (
    PROCESSED | (DEAD & ~is_open("{stage}")) | KILLED
)
