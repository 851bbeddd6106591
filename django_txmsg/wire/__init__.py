"""The wire format of a message: the names of its headers, and their meaning.

Ids, destinations and instants have their own files beside this one; the names are here.
Only the standard library and no state, because the Spark jobs import it too.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import re
import uuid
from collections.abc import Mapping
from typing import Any

from .conversation import EXPIRES as EXPIRES
from .conversation import FLOW as FLOW
from .conversation import HOP as HOP
from .conversation import JMS_REPLY_TO as JMS_REPLY_TO
from .conversation import OWN_WORK as OWN_WORK
from .conversation import PROP as PROP
from .conversation import REPLY_TO as REPLY_TO
from .conversation import TICKET as TICKET
from .conversation import UNDOES as UNDOES
from .conversation import Undone as Undone
from .conversation import conversation as conversation
from .conversation import is_request as is_request
from .conversation import of_conversation as of_conversation
from .conversation import read_ticket as read_ticket
from .conversation import ticket as ticket
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
#: The predecessor of a message with a key: `ID;at=INSTANT`.
AFTER = "txmsg-after"
#: The type of the body: `NAME;v=N;min=M`.
TYPE = "txmsg-type"
#: On the copy that a stage returns to the broker: the number of the failed attempt.
FAILED_ATTEMPT = "txmsg-failed-attempt"
#: On a task's message: the path of its function, and the options that differ from the
#: defaults.
TASK = "task"
TASK_QUEUE = "task-queue"
TASK_PRIORITY = "task-priority"
TASK_RUN_AFTER = "task-run-after"
CORRELATION_ID = "correlation-id"
#: Most characters of a correlation id; a longer one from outside is cut.
MAX_CORRELATION_ID = 255
TRACEPARENT = "traceparent"
CONTENT_TYPE = "content-type"
CONTENT_LENGTH = "content-length"
PERSISTENT = "persistent"

JSON = "application/json"
BYTES = "application/octet-stream"

#: The prefix of all headers of this package, including those of later versions.
PREFIX = "txmsg-"

#: The same prefix for JMS: no selector and no Java property may have a hyphen.
TWINS = {
    name: name.replace("-", "_")
    for name in (MESSAGE_ID, SERVICE, CREATED, KEY, TYPE, EXPIRES)
}
TWIN_NAMES = frozenset(TWINS.values())

#: Headers of one frame or one delivery, in lower case: no copy of a message keeps them.
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

#: Headers that a caller cannot set: those with `PREFIX`, and the protocol's.
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
    JMS_REPLY_TO,  # RabbitMQ replaces its value
    "cc",  # RabbitMQ reads these two as lists of further queues
    "bcc",
}

#: Headers that a broker writes on its messages, or obeys on those it receives.
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
#: Headers in which a broker records why it moved a message to its dead letters.
OF_A_DEATH = ("x-first-death-", "x-last-death-")
#: The broker's headers, by their prefixes.
OF_A_BROKER_BEGIN = ("_amq_", "amq_", "jms", "x-dead-letter-", *OF_A_DEATH)

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def created(headers: Mapping[str, str]) -> dt.datetime | None:
    """Return when a message was stored, or None if its sender's header is
    unreadable."""
    return _instant(headers.get(CREATED))


def expires(headers: Mapping[str, str]) -> dt.datetime | None:
    """Return when a message expires, or None if the header is missing or unreadable."""
    return _instant(headers.get(EXPIRES))


def _instant(text: str | None) -> dt.datetime | None:
    try:
        return parse_instant(text) if text else None
    except ValueError:
        return None


def after(headers: Mapping[str, str]) -> tuple[uuid.UUID, dt.datetime] | None:
    """Return the predecessor in the order of its key: id, and instant of its place in
    the order. None if the header is missing or unreadable, or if a foreign message
    names itself as its predecessor: it could never run."""
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
    """Return a message's trace context, or None if it does not have W3C's form."""
    found = headers.get(TRACEPARENT, "")
    return found if _TRACEPARENT.fullmatch(found) else None


def travels(name: str) -> bool:
    """Return whether a header stays with its message when that is sent again: the
    sender's headers and ours do, those added by a broker do not."""
    lowered = name.lower()
    return (
        lowered not in OF_A_DELIVERY
        and lowered not in OF_A_BROKER
        and not lowered.startswith(OF_A_BROKER_BEGIN)
    )


def reserved(name: str) -> bool:
    """Return whether a header is ours, the protocol's or a broker's: callers cannot set
    it."""
    lowered = name.lower()
    return (
        lowered in RESERVED_HEADERS
        or lowered in OF_A_BROKER
        or lowered.startswith((PREFIX, *OF_A_BROKER_BEGIN))
    )


def senders(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that the sender wrote and may send again."""
    return {name: value for name, value in headers.items() if not reserved(name)}


def digest(headers: Mapping[str, str], body: bytes) -> str:
    """Return a digest of the sender's headers and body, the same over every broker."""
    written = {name: value for name, value in headers.items() if travels(name)}
    found = hashlib.sha256(json.dumps(written, sort_keys=True).encode())
    found.update(body)
    return found.hexdigest()


def of_a_copy(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers to store with a copy that keeps the body: the sender's
    headers, those that tell how to read the body, the place in the order of its key,
    and the conversation that it is part of."""
    kept = senders(headers) | conversation(headers)
    kept.pop(CORRELATION_ID, None)  # a column of its own
    for name in (TYPE, AFTER):
        if name in headers:
            kept[name] = headers[name]
    return kept


def headers_of(row: Any, service: str, created: str) -> dict[str, str]:
    """Return the headers of an outbox row for the wire; `created` is the formatted
    instant at which the row was stored."""
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
