"""Actions of an operator on a message, from a page or a command: cancel or reschedule a
pending message, or stop a message that a handler is processing."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..models import InboxMessage, OutboxMessage
from ..models.monitoring import Deed, Done
from ..sending.pending import cancel_message, reschedule_message
from .deadline import ask_to_stop


@dataclass(frozen=True)
class Act:
    """One action: what was done, the permission, and when it is not possible. `do`
    returns False if it is not possible for a message. `model` is the message's row."""

    done: str
    deed: Deed
    permission: str
    unless: str
    do: Callable[..., bool]
    model: Any = OutboxMessage


#: The actions by their names in commands and addresses.
ACTS = {
    "cancel": Act(
        "cancelled", Deed.CANCEL, "cancel_outboxmessage",
        "it is no longer pending, is being sent now, or is unknown, or a run of a flow "
        "waits for it",
        cancel_message,
    ),
    "reschedule": Act(
        "rescheduled", Deed.RESCHEDULE, "reschedule_outboxmessage",
        "it is no longer pending, is being sent now, or is unknown",
        reschedule_message,
    ),
    "stop": Act(
        "asked to stop", Deed.STOP, "stop_inboxmessage",
        "it has ended, is parked, was not received, or its stage has no timeout",
        ask_to_stop,
        InboxMessage,
    ),
}  # fmt: skip


def act(
    name: str, message_id: uuid.UUID, *, using: str, by: str, why: str, **when: Any
) -> Done | None:
    """Apply one of ACTS to a message. `when` is the time for "reschedule". The others
    store the operator and the reason with the message. Returns None, and changes
    nothing, if the action is not possible."""
    one, because = ACTS[name], f": {why}" if why else ""
    given = when or {"why": f"by {by}{because}"}
    if not one.do(message_id, using=using, **given):
        return None
    rows = one.model.objects.using(using).filter(message_id=message_id)
    row = rows.defer("body", "headers").order_by("-pk")[0]
    said = f"{one.done.capitalize()} message {message_id}{because or '.'}"
    return row, one.deed, said
