"""Derived message ids: equal inputs give equal ids."""

from __future__ import annotations

import datetime as dt
import json
import uuid
from collections.abc import Mapping

from .instants import format_instant

#: Headers in which other libraries keep a message's id: CAP and django-outbox-pattern.
IDS_OF_OTHERS = ("cap-msg-id", "dop-msg-id")

#: The namespace of derived ids, which keeps them apart from all others. Each formula
#: has its own namespace or UUID version: if you change what an id is derived from, take
#: a new one, so that two formulas never give the same id.
NAMESPACE = uuid.UUID("86f79ce9-ac6e-4a7d-ade4-44f29f8b6b22")
#: The bits of an id after its instant and its version.
_BEHIND = (1 << 76) - 1


def derived_id(service: str, cause: uuid.UUID, stage: str, ordinal: int) -> uuid.UUID:
    """Return the id of the `ordinal`-th message that `stage` sends for `cause`.

    A stage that runs again sends the same ids, and every inbox drops the copies. Two
    services that consume one topic send different ids, even if their stages have the
    same name. If the cause's id is of version 7 or 8, which begin with an instant, the
    derived id begins with the same bits, so that an index on ids grows at one end. It
    is then of version 8 (RFC 9562, section 5.8), else of version 5.
    """
    named = _named("sent", service, str(cause), stage, ordinal)
    if cause.version not in (7, 8):
        return named
    return uuid.UUID(int=cause.int >> 80 << 80 | 0x8 << 76 | named.int & _BEHIND)


def session_id(service: str, cause: uuid.UUID, stage: str) -> uuid.UUID:
    """Return the session id of all messages that `stage` stores for `cause`."""
    return _named("session", service, str(cause), stage)


def foreign_id(service: str, broker_message_id: str) -> uuid.UUID:
    """Return an id for a message that has no `txmsg-id`.

    Weaker than our own ids: a sender that sends twice gets two broker ids.
    """
    return uuid.uuid5(NAMESPACE, f"foreign/{service}/{broker_message_id}")


def event_id(source: str, event: str) -> uuid.UUID:
    """Return the id of a CloudEvent, derived from its source and id, which are unique
    together."""
    return _named("cloudevent", source, event)


def tick_id(service: str, name: str, tick: dt.datetime) -> uuid.UUID:
    """Return the id of the message that the schedule `name` stores for one tick."""
    return _named("tick", service, name, format_instant(tick))


def others_id(service: str, headers: Mapping[str, str]) -> uuid.UUID | None:
    """Return the message id that another library's sender set, if any."""
    for name in IDS_OF_OTHERS:
        if given := headers.get(name):
            try:
                return uuid.UUID(given)
            except ValueError:
                return foreign_id(service, given)
    return None


def _named(*parts: str | int) -> uuid.UUID:
    # Names may contain any separator. JSON keeps adjacent names apart.
    return uuid.uuid5(NAMESPACE, json.dumps(parts, separators=(",", ":")))
