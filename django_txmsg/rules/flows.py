"""The states of a run of a flow: `waiting → undoing → ended`, or from waiting
directly to ended."""

from __future__ import annotations

from . import Rule

#: It has not ended.
OPEN = Rule("{ended_at} IS NULL")

#: It is open, and undoes its work.
UNDOING = OPEN & Rule("{failing}")

#: It is open, and continues when what it waits for comes.
WAITING = OPEN & ~Rule("{failing}")

#: The run to which it has handed over is open, or has handed over in turn. The caller
#: of the first run of such a chain can cancel the last run only through all others.
_HAS_SUCCESSOR = Rule(
    "{outcome} = 'handed_over' AND EXISTS (SELECT 1 FROM django_txmsg_run s"  # noqa: S608 - constants only
    f" WHERE s.run_id = {{request_id}}"
    f" AND ({OPEN.sql('s')} OR s.outcome = 'handed_over'))"
)

#: It may be deleted together with its steps, undos and batches.
ENDED = Rule("{ended_at} < {cutoff}") & ~_HAS_SUCCESSOR

#: A step or an undo may be archived: its run has ended.
OF_AN_ENDED_RUN = Rule(
    "EXISTS (SELECT 1 FROM django_txmsg_run r WHERE r.id = {run_id}"  # noqa: S608 - constants only
    f" AND {ENDED.sql('r', cutoff='{cutoff}')})"
)


_UNANSWERED = "u.confirmed_at IS NULL AND NOT u.answered"

#: A run may undo the request with this `message_id`, and does not know yet whether the
#: request was executed. For the rows of any table.
MAY_UNDO = Rule(
    "EXISTS (SELECT 1 FROM django_txmsg_flowundo u"  # noqa: S608 - constants only
    f" WHERE u.request_id = {{message_id}} AND {_UNANSWERED})"
)

#: Such a request, or an edited copy of one. A statement reads the ids of all copies
#: once. They are few: an operator edits each of them. (Without DISTINCT, PostgreSQL
#: expects a hundred times as many, hashes none, and compares each row with all.)
MAY_UNDO_COPY = MAY_UNDO | Rule(
    "{message_id} IN (WITH RECURSIVE copies (id) AS"  # noqa: S608 - constants only
    " (SELECT d.replaced_by FROM django_txmsg_deadletter d"
    f" JOIN django_txmsg_flowundo u ON u.request_id = d.message_id AND {_UNANSWERED}"
    " WHERE d.resolution = 'replaced' UNION SELECT d.replaced_by FROM copies"
    " JOIN django_txmsg_deadletter d ON d.message_id = copies.id"
    " AND d.resolution = 'replaced')"
    " SELECT DISTINCT id FROM copies WHERE id IS NOT NULL)"
)


def _none_in(relation: str) -> Rule:
    """Return a rule that is true if the table `relation` has no rows of the run."""
    return Rule(
        f"NOT EXISTS (SELECT 1 FROM {relation} x WHERE x.run_id = {{id}})"  # noqa: S608 - constants only
    )


#: A run may be archived: its steps and undos are, and its batches are deleted.
SETTLED = (
    ENDED
    & _none_in("django_txmsg_flowstep")
    & _none_in("django_txmsg_flowundo")
    & _none_in("django_txmsg_batch")
)
