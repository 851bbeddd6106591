"""The states of a dead letter: `open → redelivered | replaced | discarded`."""

from __future__ import annotations

from .rule import Rule

#: An operator must resolve it yet.
OPEN = Rule("{resolution} = 'open'")

#: It may be forgotten, or archived.
SETTLED = ~OPEN & Rule("{resolved_at} < {cutoff}")


def is_open(stage: str) -> Rule:
    """Return the rule that a message has an open dead letter of `stage`, in SQL: of a
    row of any table that has its `message_id`."""
    return Rule(
        "EXISTS (SELECT 1 FROM django_txmsg_deadletter d WHERE"  # noqa: S608 - constants only
        f" d.message_id = {{message_id}} AND d.stage = {stage} AND {OPEN.sql('d')})"
    )
