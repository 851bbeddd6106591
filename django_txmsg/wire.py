"""What a message looks like between services: header names, ids, destinations.

Pure standard library and without state, since the Spark jobs import it too.
"""

from __future__ import annotations

import datetime as dt
import uuid
from typing import Any

MESSAGE_ID = "txmsg-id"
SERVICE = "txmsg-service"
CREATED = "txmsg-created"
KEY = "txmsg-key"
EXPIRES = "txmsg-expires"
#: On the copy that a stage hands back to the broker: the attempt that has failed.
FAILED_ATTEMPT = "txmsg-failed-attempt"
CORRELATION_ID = "correlation-id"
TRACEPARENT = "traceparent"
CONTENT_TYPE = "content-type"
CONTENT_LENGTH = "content-length"
PERSISTENT = "persistent"

JSON = "application/json"
BYTES = "application/octet-stream"

TOPIC_PREFIX = "topic:"

#: Headers that the package or the broker owns: a caller cannot set them.
RESERVED_HEADERS = frozenset(
    {
        MESSAGE_ID,
        SERVICE,
        CREATED,
        KEY,
        EXPIRES,
        CONTENT_TYPE,
        CONTENT_LENGTH,
        PERSISTENT,
        "ack",
        "destination",
        "expires",
        "expiration",
        "id",
        "message-id",
        "receipt",
        "redelivered",
        "subscription",
        "transaction",
    }
)

#: Ids of derived messages live in this namespace, so that they never meet others.
NAMESPACE = uuid.UUID("6f0d4a3e-5b0b-5d5c-9a58-3d8e5a1f7c42")


def derived_id(cause: uuid.UUID, stage: str, ordinal: int) -> uuid.UUID:
    """Return the id of the `ordinal`-th message that `stage` sends for `cause`.

    A stage that runs again sends the same ids, and every inbox catches the copies.
    """
    return uuid.uuid5(NAMESPACE, f"{cause}/{stage}/{ordinal}")


def session_id(cause: uuid.UUID, stage: str) -> uuid.UUID:
    """Return the id that marks all messages stored by `stage` for `cause`."""
    return uuid.uuid5(NAMESPACE, f"{cause}/{stage}")


def foreign_id(service: str, broker_message_id: str) -> uuid.UUID:
    """Return an identity for a message that carries no `txmsg-id` of its own.

    Weaker than ours: a sender that sends twice gets two broker ids.
    """
    return uuid.uuid5(NAMESPACE, f"foreign/{service}/{broker_message_id}")


def control_destination(service: str) -> str:
    """Return the destination of a service's control messages to itself."""
    return f"{service}.txmsg.control"


def format_instant(instant: dt.datetime) -> str:
    """Return an aware instant as RFC 3339 in UTC, with microseconds."""
    return instant.astimezone(dt.timezone.utc).isoformat(timespec="microseconds")


def parse_instant(text: str) -> dt.datetime:
    """Return the aware instant of an RFC 3339 text.

    Raises ValueError for anything else, a naive instant included.
    """
    instant = dt.datetime.fromisoformat(text.replace("Z", "+00:00"))
    if instant.tzinfo is None:
        raise ValueError(f"instant without a time zone: {text!r}")
    return instant


def headers_of(row: Any, service: str, created: str) -> dict[str, str]:
    """Return the headers of an outbox row as they go on the wire; `created` is the
    instant of its storing, formatted for it."""
    headers = dict(row.headers)
    headers[CONTENT_TYPE] = row.content_type
    headers[MESSAGE_ID] = str(row.message_id)
    headers[SERVICE] = service
    headers[CREATED] = created
    if row.key:
        headers[KEY] = row.key
    if row.correlation_id:
        headers[CORRELATION_ID] = row.correlation_id
    if row.expires_at is not None:
        headers[EXPIRES] = format_instant(row.expires_at)
    return headers
