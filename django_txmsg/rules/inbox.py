"""The states of a received message: `received → processed | dead`. Also the reasons why
a message waits, and when its failed attempts may be deleted."""

from __future__ import annotations

from . import NOT_LEASED, Rule, flows
from .dead_letters import is_open

#: Subquery of the names of all paused stages, whose consumers take no messages now; a
#: statement reads it once.
PAUSED_NAMES = (
    "(SELECT p.stage FROM django_txmsg_stagestate p WHERE p.paused_at IS NOT NULL)"
)

#: It must still be processed.
OPEN = Rule("{processed_at} IS NULL AND {dead_at} IS NULL")

PROCESSED = Rule("{processed_at} IS NOT NULL")
DEAD = Rule("{dead_at} IS NOT NULL")

#: It waits here for its next attempt. Worded like the index that serves it.
PARKED = Rule("{due_at} IS NOT NULL")

#: It waits for its predecessor of the same key.
BLOCKED = Rule("{waits_for} IS NOT NULL")

#: It waits for newer code that can read its body: for a deployment.
NEEDS_NEWER_CODE = PARKED & Rule("{needs_version} IS NOT NULL")

#: It waits only for its next attempt, or also for its stage to be resumed.
RETRYING = PARKED & Rule("{needs_version} IS NULL") & ~BLOCKED

#: Its stage is paused.
PAUSED = Rule("{stage} IN " + PAUSED_NAMES)

#: It waits for another message, a deployment or an operator who paused its stage, so it
#: is never late, however long it waits.
HELD_BACK = Rule("{needs_version} IS NOT NULL") | BLOCKED | PAUSED

#: It should be tried now, and no worker has claimed it. It is overdue if this was true
#: OVERDUE ago already.
DUE = PARKED & Rule("{due_at} <= {now}") & NOT_LEASED & ~HELD_BACK

#: When it became due. A claim leaves `due_at`, but as long as the lease lasts, no other
#: worker could try it.
DUE_SINCE = Rule(
    "CASE WHEN {lease_until} > {due_at} THEN {lease_until} ELSE {due_at} END"
)

#: A OnceTask's message that Celery killed by its time limit, or that was revoked: the
#: worker could not record it, and the message is not delivered again. (Messages from
#: services have the instant of their storing; tasks do not.)
KILLED = (
    OPEN & Rule("{due_at} IS NULL AND {created_at} IS NULL") & Rule("{service} <> ''")
)

#: When it last changed. The row must be kept for as long as copies of the message may
#: arrive. Worded so that no index matches, like those of the outbox.
_LAST = (
    "CASE WHEN COALESCE({processed_at}, {dead_at}) > {last_received_at}"
    " THEN COALESCE({processed_at}, {dead_at}) ELSE {last_received_at} END"
)

#: It was processed, and a run of this database may undo it. The undo finds out from
#: this row that there is something to undo.
MAY_BE_UNDONE = PROCESSED & flows.MAY_UNDO_COPY

#: It may be deleted or archived.
SETTLED = (
    Rule(_LAST + " < {cutoff}")
    & (PROCESSED | (DEAD & ~is_open("{stage}")) | KILLED)
    & ~MAY_BE_UNDONE
)


#: An attempt's message is still needed by the inbox.
_REMEMBERED = Rule(
    "EXISTS (SELECT 1 FROM django_txmsg_inboxmessage i WHERE"  # noqa: S608 - constants only
    " i.message_id = {message_id} AND i.stage = {stage}"
    f" AND {(~SETTLED).sql('i', cutoff='{cutoff}')})"
)

#: An attempt may be deleted or archived: its stage no longer remembers the message,
#: and no open dead letter needs its traceback.
ATTEMPT_SETTLED = Rule("{failed_at} < {cutoff}") & ~_REMEMBERED & ~is_open("{stage}")
