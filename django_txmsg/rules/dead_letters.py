"""The states of a dead letter: `open → redelivered | replaced | discarded`."""

from __future__ import annotations

from .rule import Rule

#: An operator must still resolve it.
OPEN = Rule("{resolution} = 'open'")

#: The dead letter may be deleted or archived.
SETTLED = ~OPEN & Rule("{resolved_at} < {cutoff}")


def is_open(stage: str) -> Rule:
    """Return the SQL rule "this message has an open dead letter of `stage`", for a row
    of any table that has a `message_id`."""
    return Rule(
        "EXISTS (SELECT 1 FROM django_txmsg_deadletter d WHERE"  # noqa: S608 - constants only
        f" d.message_id = {{message_id}} AND d.stage = {stage} AND {OPEN.sql('d')})"
    )
