"""What a message looks like between services: its headers, and what they say.

Its ids, destinations and instants have files beside this one, and their names are here.
Pure standard library and without state, since the Spark jobs import it too.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import re
import uuid
from collections.abc import Mapping
from typing import Any

from .destinations import OF_TASKS as OF_TASKS
from .destinations import TOPIC_PREFIX as TOPIC_PREFIX
from .destinations import control_destination as control_destination
from .destinations import is_control as is_control
from .destinations import is_task as is_task
from .destinations import is_topic as is_topic
from .destinations import task_destination as task_destination
from .ids import NAMESPACE as NAMESPACE
from .ids import derived_id as derived_id
from .ids import event_id as event_id
from .ids import foreign_id as foreign_id
from .ids import others_id as others_id
from .ids import session_id as session_id
from .ids import tick_id as tick_id
from .instants import format_instant as format_instant
from .instants import parse_instant as parse_instant

MESSAGE_ID = "txmsg-id"
SERVICE = "txmsg-service"
CREATED = "txmsg-created"
KEY = "txmsg-key"
#: Of a message with a key, the one before it: `ID;at=INSTANT`.
AFTER = "txmsg-after"
#: What the body is: `NAME;v=N;min=M`.
TYPE = "txmsg-type"
EXPIRES = "txmsg-expires"
#: On the copy that a stage hands back to the broker: the attempt that has failed.
FAILED_ATTEMPT = "txmsg-failed-attempt"
#: What a task's message says of it: its function's path, and how it was enqueued,
#: where that is not as usual.
TASK = "task"
TASK_QUEUE = "task-queue"
TASK_PRIORITY = "task-priority"
TASK_RUN_AFTER = "task-run-after"
CORRELATION_ID = "correlation-id"
#: Characters of a correlation id; of a longer one that comes from outside, the first.
MAX_CORRELATION_ID = 255
TRACEPARENT = "traceparent"
CONTENT_TYPE = "content-type"
CONTENT_LENGTH = "content-length"
PERSISTENT = "persistent"

JSON = "application/json"
BYTES = "application/octet-stream"

#: How the names of all our own headers begin, those of later versions included.
PREFIX = "txmsg-"

#: What JMS can name of our headers: no selector and no Java property has a hyphen.
TWINS = {
    name: name.replace("-", "_")
    for name in (MESSAGE_ID, SERVICE, CREATED, KEY, TYPE, EXPIRES)
}
TWIN_NAMES = frozenset(TWINS.values())

#: Headers of one frame or of one delivery, in lower case: no copy of a message has
#: them.
OF_A_DELIVERY = frozenset(
    {
        CONTENT_LENGTH,
        PERSISTENT,
        "ack",
        "destination",
        "id",
        "message-id",
        "receipt",
        "receipt-id",
        "redelivered",
        "subscription",
        "transaction",
    }
)

#: Headers that a caller cannot set: ours, with `PREFIX`, and the protocol's.
RESERVED_HEADERS = OF_A_DELIVERY | {
    MESSAGE_ID,
    SERVICE,
    CREATED,
    KEY,
    AFTER,
    TYPE,
    EXPIRES,
    *TWIN_NAMES,
    CONTENT_TYPE,
    "expires",
    "expiration",
    "reply-to",  # RabbitMQ makes a queue of its own of it
    "cc",  # RabbitMQ reads these two as lists of further queues
    "bcc",
}

#: Headers that a broker writes on what lies in it, or obeys on what it is sent.
OF_A_BROKER = frozenset(
    {
        "amq-msg-type",
        "amqp-message-id",
        "auto-delete",
        "breadcrumbid",
        "destination-type",
        "dlqdeliveryfailurecause",
        "durable",
        "exclusive",
        "expiration",
        "expires",
        "original-destination",
        "originaldestination",
        "originalexpiration",
        "priority",
        "scheduledjobid",
        "timestamp",
        "user-id",
        "x-acquired-count",
        "x-death",
        "x-delivery-count",
        "x-expires",
        "x-max-length",
        "x-max-length-bytes",
        "x-max-priority",
        "x-message-ttl",
        "x-queue-name",
        "x-queue-type",
    }
)
#: In which a broker notes why a message lies in its dead letters.
OF_A_DEATH = ("x-first-death-", "x-last-death-")
#: The broker's, by the beginnings of their names.
OF_A_BROKER_BEGIN = ("_amq_", "amq_", "jms", "x-dead-letter-", *OF_A_DEATH)

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def created(headers: Mapping[str, str]) -> dt.datetime | None:
    """Return when a message was stored, as far as its sender says so legibly."""
    return _instant(headers.get(CREATED))


def expires(headers: Mapping[str, str]) -> dt.datetime | None:
    """Return when a message is of no use any more, as far as that is legible."""
    return _instant(headers.get(EXPIRES))


def _instant(text: str | None) -> dt.datetime | None:
    try:
        return parse_instant(text) if text else None
    except ValueError:
        return None


def after(headers: Mapping[str, str]) -> tuple[uuid.UUID, dt.datetime] | None:
    """Return the id of the message before this one in the order of its key, and the
    instant of that one's place, as far as both are legible. None for one that names
    itself, as a stranger may: nothing waits for its own end."""
    before, _, at = headers.get(AFTER, "").partition(";at=")
    try:
        instant, found = parse_instant(at), uuid.UUID(before)
        own = headers.get(MESSAGE_ID)
        if own and uuid.UUID(own) == found:
            return None
        return found, instant.astimezone(dt.timezone.utc)
    except (ValueError, OverflowError):
        return None


def traceparent(headers: Mapping[str, str]) -> str | None:
    """Return a message's trace context, unless it is none that W3C knows."""
    found = headers.get(TRACEPARENT, "")
    return found if _TRACEPARENT.fullmatch(found) else None


def travels(name: str) -> bool:
    """Return whether a header goes on with its message when that is sent again: what
    the sender wrote and what is ours, and nothing that a broker added."""
    lowered = name.lower()
    return (
        lowered not in OF_A_DELIVERY
        and lowered not in OF_A_BROKER
        and not lowered.startswith(OF_A_BROKER_BEGIN)
    )


def reserved(name: str) -> bool:
    """Return whether a header is ours, the protocol's or a broker's, so that no caller
    sets it."""
    lowered = name.lower()
    return (
        lowered in RESERVED_HEADERS
        or lowered in OF_A_BROKER
        or lowered.startswith((PREFIX, *OF_A_BROKER_BEGIN))
    )


def senders(headers: Mapping[str, str]) -> dict[str, str]:
    """Return what of a message's headers its sender wrote, and may send again."""
    return {name: value for name, value in headers.items() if not reserved(name)}


def digest(headers: Mapping[str, str], body: bytes) -> str:
    """Return a name for what a sender wrote, the same for the same however it came."""
    written = {name: value for name, value in headers.items() if travels(name)}
    found = hashlib.sha256(json.dumps(written, sort_keys=True).encode())
    found.update(body)
    return found.hexdigest()


def of_a_copy(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers to store with a copy of a message that keeps its body: what
    its sender wrote, what says how to read that body, and its place among those of its
    key."""
    kept = senders(headers)
    kept.pop(CORRELATION_ID, None)  # a column of its own
    for name in (TYPE, AFTER):
        if name in headers:
            kept[name] = headers[name]
    return kept


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
