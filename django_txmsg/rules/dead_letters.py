"""The states of a dead letter: `open → redelivered | replaced | discarded`. Also the
statement that starts a bulk operation, and the rule for a muted error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from . import Rule, flows

#: The reason of a message of which only the beginning of the body was kept.
BODY_TOO_LONG = "body_too_long"

#: The reasons of dead letters without a stage that this service has taken from a
#: broker's dead-letter queue. All other dead letters without a stage are a relay's.
TAKEN_IN = frozenset({"broker", BODY_TOO_LONG})

#: An operator must still resolve it.
OPEN = Rule("{resolution} = 'open'")

#: It was replaced by a copy that has not ended, or whose dead letter is still needed.
#: A stage that is `ordered="block"` finds the copy by this dead letter.
_NEEDED_FOR_COPY = Rule(
    "{resolution} = 'replaced' AND (EXISTS (SELECT 1 FROM django_txmsg_inboxmessage c"
    " WHERE c.message_id = {replaced_by} AND c.stage = {stage}"
    " AND c.processed_at IS NULL AND c.dead_at IS NULL)"
    " OR EXISTS (SELECT 1 FROM django_txmsg_deadletter d"
    " WHERE d.message_id = {replaced_by} AND d.stage = {stage}"
    " AND d.resolution IN ('open', 'replaced')))"
)

#: It was replaced by a copy, and a run of this database may undo the work of the copy.
#: The undo finds the copy by this dead letter.
MAY_BE_UNDONE = Rule("{resolution} = 'replaced'") & flows.MAY_UNDO_COPY

#: The dead letter may be deleted or archived.
SETTLED = ~OPEN & Rule("{resolved_at} < {cutoff}") & ~_NEEDED_FOR_COPY & ~MAY_BE_UNDONE


def is_open(stage: str) -> Rule:
    """Return a rule for the rows of any table with a column `message_id`. The rule is
    true if the row's message has an open dead letter at a stage. `stage` is SQL for the
    stage's name."""
    return Rule(
        "EXISTS (SELECT 1 FROM django_txmsg_deadletter d WHERE"  # noqa: S608 - constants only
        f" d.message_id = {{message_id}} AND d.stage = {stage} AND {OPEN.sql('d')})"
    )


#: An error is muted: its dead letters are not counted until the mute ends.
MUTED = Rule("{muted} AND ({muted_until} IS NULL OR {muted_until} > {now})")


#: Who has resolved a dead letter that is of no use any more.
GONE_ON = "revoked: its flow has gone on"


def resolver(by: str) -> str:
    """Return who has resolved a dead letter, or why it was closed without an operator,
    from its `resolved_by`."""
    if by == GONE_ON:
        return "because its flow has gone on"
    return f"by {by}" if by else ""


#: Dead letters in the first batch. Later batches are larger.
FIRST_BATCH = 100
#: The lowest and highest rate that can be requested, in messages a second.
RATES = 0.001, 1_000_000


def wrong_rate(rate: float | None) -> str:
    """Return what is wrong with a rate in messages per second, or "" if it is valid."""
    if rate is None or RATES[0] <= rate <= RATES[1]:
        return ""
    return (
        f"The rate must be greater than zero: between {RATES[0]:g} and "
        f"{RATES[1]:,} messages a second, not {rate:g}."
    )


def bulk_operation(
    vendor: str,
    *,
    kind: str,
    filters: Mapping[str, Any],
    service: str,
    total: int,
    up_to: int,
    by: str,
    why: str,
    force: bool = False,
    rate: float | None = None,
) -> tuple[str, list[Any]]:
    """Return the statement, with its parameters, that stores a running bulk operation
    and returns its id. The admin, the commands and the pipeline start operations with
    this statement.

    `filters` select the dead letters, `total` is their number, and `up_to` is their
    highest id. `service` is stored beside the filters: only consumers of this service
    execute the operation. `rate` is the highest number of messages per second.
    """
    as_json = "%s::jsonb" if vendor == "postgresql" else "%s"
    values = {
        "kind": kind,
        "filter": json.dumps({**filters, "service": service}),
        "force": force,
        "by": by[:255],
        "why": why[:255],
        "rate": rate,
        "total": total,
        "done": 0,
        "skipped": 0,
        "skipped_why": "{}",
        "cursor": 0,
        "up_to": up_to,
        "batch_size": FIRST_BATCH,
        "state": "running",
        "last_error": "",
    }
    places = [as_json if name in ("filter", "skipped_why") else "%s" for name in values]
    names = ", ".join(f'"{name}"' for name in values)
    sql = (
        f"INSERT INTO django_txmsg_bulkoperation ({names})"  # noqa: S608 - constants only
        f" VALUES ({', '.join(places)}) RETURNING id"
    )
    return sql, list(values.values())
