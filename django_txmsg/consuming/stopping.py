"""Around hop 8: an operator asks to stop a message while its handler runs."""

from __future__ import annotations

import uuid

from ..models import InboxMessage, StopRequest
from ..stages import all_stages


def running(message_id: uuid.UUID, using: str) -> list[InboxMessage]:
    """Return the records of a message that has not ended, at stages here that can be
    stopped: those with a timeout."""
    timed = [
        one.name
        for one in all_stages()
        if one.timeout is not None and one.definition.using == using
    ]
    rows = InboxMessage.objects.using(using).filter(
        message_id=message_id, stage__in=timed, processed_at=None, dead_at=None
    )
    return list(rows.defer("body", "headers"))


def ask(message_id: uuid.UUID, *, using: str, why: str) -> bool:
    """Ask the consumers that run a message to stop it. False if it has ended, or no
    stage that can be stopped has received it."""
    found = running(message_id, using)
    for one in found:
        StopRequest.objects.db_manager(using).ask(one.stage, message_id, why)
    return bool(found)
