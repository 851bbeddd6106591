"""The ids of messages that are made of names: what is the same has the same id."""

from __future__ import annotations

import datetime as dt
import json
import uuid
from collections.abc import Mapping

from .instants import format_instant

#: Under which other libraries say what their message is: CAP and django-outbox-pattern.
IDS_OF_OTHERS = ("cap-msg-id", "dop-msg-id")

#: Ids that are made of names live in this namespace, so that they never meet others.
#: One formula, one namespace or UUID version: whoever changes what an id is made of
#: takes a new one, and no id of the one is an id of the other.
NAMESPACE = uuid.UUID("86f79ce9-ac6e-4a7d-ade4-44f29f8b6b22")
#: The bits of an id behind its instant and its version.
_BEHIND = (1 << 76) - 1


def derived_id(service: str, cause: uuid.UUID, stage: str, ordinal: int) -> uuid.UUID:
    """Return the id of the `ordinal`-th message that `stage` sends for `cause`.

    A stage that runs again sends the same ids, and every inbox catches the copies.
    Two services that consume one topic send different ones, whatever their stages
    are called. It begins as its cause's id does where that is taken to begin with an
    instant, in versions 7 and 8, so that an index on ids grows at one end: version 8
    (RFC 9562, section 5.8), else 5.
    """
    named = _named("sent", service, str(cause), stage, ordinal)
    if cause.version not in (7, 8):
        return named
    return uuid.UUID(int=cause.int >> 80 << 80 | 0x8 << 76 | named.int & _BEHIND)


def session_id(service: str, cause: uuid.UUID, stage: str) -> uuid.UUID:
    """Return the id that marks all messages stored by `stage` for `cause`."""
    return _named("session", service, str(cause), stage)


def foreign_id(service: str, broker_message_id: str) -> uuid.UUID:
    """Return an identity for a message that carries no `txmsg-id` of its own.

    Weaker than ours: a sender that sends twice gets two broker ids.
    """
    return uuid.uuid5(NAMESPACE, f"foreign/{service}/{broker_message_id}")


def event_id(source: str, event: str) -> uuid.UUID:
    """Return the identity of a CloudEvent: its source and its id, unique together."""
    return _named("cloudevent", source, event)


def tick_id(service: str, name: str, tick: dt.datetime) -> uuid.UUID:
    """Return the id of the message that recurs under `name`, for one tick of it."""
    return _named("tick", service, name, format_instant(tick))


def others_id(service: str, headers: Mapping[str, str]) -> uuid.UUID | None:
    """Return the identity that another library's sender gave its message, if any."""
    for name in IDS_OF_OTHERS:
        if given := headers.get(name):
            try:
                return uuid.UUID(given)
            except ValueError:
                return foreign_id(service, given)
    return None


def _named(*parts: str | int) -> uuid.UUID:
    # Names may hold any separator; JSON keeps one from running into the next.
    return uuid.uuid5(NAMESPACE, json.dumps(parts, separators=(",", ":")))
