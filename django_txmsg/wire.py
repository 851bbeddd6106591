"""The wire format of a message: the names and meaning of its headers, and the instants,
destinations and derived ids in them.

The module uses only the standard library and has no state, because the Spark jobs
import it too.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


def format_instant(instant: dt.datetime) -> str:
    """Return an aware instant as RFC 3339 in UTC, with microseconds."""
    return instant.astimezone(dt.timezone.utc).isoformat(timespec="microseconds")


def parse_instant(text: str) -> dt.datetime:
    """Return the instant of an RFC 3339 text, in UTC. PostgreSQL refuses some of the
    offsets that Python accepts, for example +23:59.

    Raises ValueError if the text is malformed, the instant is naive, or the instant is
    so close to an end of the calendar that another time zone cannot express it.
    """
    # Before Python 3.11, Z and a fraction of other than 3 or 6 digits are errors.
    text = re.sub(r"\.(\d+)", lambda one: f".{one[1][:6]:0<6}", text)
    instant = dt.datetime.fromisoformat(text.replace("Z", "+00:00"))
    if instant.tzinfo is None:
        raise ValueError(f"instant without a time zone: {text!r}")
    if not dt.MINYEAR < instant.year < dt.MAXYEAR:
        raise ValueError(f"instant at an end of the calendar: {text!r}")
    return instant.astimezone(dt.timezone.utc)


#: Where the answer to a request goes. Not `reply-to`, whose value RabbitMQ replaces.
REPLY_TO = "txmsg-reply-to"
#: Beside it for consumers that are not of this package: the name that JMS knows. Their
#: answers return the ticket as `correlation-id`.
JMS_REPLY_TO = "reply-to"
#: The part that the answer returns: the waiting run, and its turn.
TICKET = "txmsg-ticket"
#: The prefix of a signal's ticket.
SIGNAL = "signal"
#: The id of the first run, which has caused all the others.
FLOW = "txmsg-flow"
#: Steps since the last sleep or wait.
HOP = "txmsg-hop"
#: The request that an undo is for; or OWN_WORK.
UNDOES = "txmsg-undoes"
#: Of an undo of a step's own work, for which there was no request.
OWN_WORK = "own"
#: The message in whose place an operator sent this edited copy. A copy of a copy names
#: the first message.
COPY_OF = "txmsg-copy-of"
#: When a message expires; a request does so with its flow's deadline.
EXPIRES = "txmsg-expires"
#: The prefix of headers that all messages of a flow carry along.
PROP = "txmsg-prop-"

_NAMES = frozenset({REPLY_TO, TICKET, FLOW, HOP, UNDOES, COPY_OF})


def ticket(run_id: uuid.UUID, turn: uuid.UUID) -> str:
    """Return the ticket of a run and its current turn. A message with the ticket
    continues the run."""
    return f"{run_id.hex}.{turn.hex}"


def read_ticket(text: str) -> tuple[uuid.UUID, uuid.UUID]:
    """Return the run and the turn of a ticket. Raises ValueError."""
    run_id, _, turn = text.partition(".")
    if len(run_id) != 32 or len(turn) != 32:
        raise ValueError(text)
    return uuid.UUID(run_id), uuid.UUID(turn)


def holds_back(ticket: str) -> bool:
    """Return whether the answer to the ticket's request releases another request of the
    same gather."""
    return "-" in ticket.partition("/")[2]


def is_request(headers: Mapping[str, str]) -> bool:
    """Return whether a flow waits for the answer to a message. Such a request expires
    when the flow stops waiting. It is then dropped instead of buried."""
    return TICKET in headers and REPLY_TO in headers


def continues_run(headers: Mapping[str, str]) -> bool:
    """Return whether a run of a flow waits for this message and not for an answer to
    it. A signal is no such message: the run does not wait for it."""
    ticket = headers.get(TICKET, "")
    expected = (
        ticket and not ticket.startswith(f"{SIGNAL};") and REPLY_TO not in headers
    )
    return bool(expected) or UNDOES in headers


def conversation(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a message that belong to its conversation."""
    found = {
        name: value
        for name, value in headers.items()
        if name in _NAMES or name.startswith(PROP)
    }
    for name in (EXPIRES, JMS_REPLY_TO):
        if name in headers and is_request(headers):
            found[name] = headers[name]
    return found


@dataclass(frozen=True, slots=True)
class Undone:
    """The request that an undo reverses: its id, when it was stored, and whether its
    answer has arrived. An answer proves that the request was processed."""

    request_id: uuid.UUID
    at: dt.datetime
    answered: bool

    def __str__(self) -> str:
        answered = ";answered" if self.answered else ""
        return f"{self.request_id};at={format_instant(self.at)}{answered}"

    @classmethod
    def parse(cls, text: str) -> Undone:
        """Return the content of a header. Raises ValueError."""
        request_id, at, *more = text.split(";")
        if not at.startswith("at=") or more not in ([], ["answered"]):
            raise ValueError(text)
        return cls(uuid.UUID(request_id), parse_instant(at[3:]), bool(more))


def original_id(message_id: uuid.UUID, headers: Mapping[str, str]) -> uuid.UUID:
    """Return the id of the message in whose place an operator sent this message as an
    edited copy. Otherwise return the message's own id."""
    return uuid_or_none(headers.get(COPY_OF)) or message_id


def uuid_or_none(text: str | None) -> uuid.UUID | None:
    """Return the UUID of a header's text, or None if the header is missing or is no
    UUID."""
    try:
        return uuid.UUID(text or "")
    except ValueError:
        return None


TOPIC_PREFIX = "topic:"

_CONTROL = ".txmsg.control"
#: The part of a destination that marks tasks.
OF_TASKS = ".tasks."
#: The end of the destination of a flow's messages after the first.
STEPS = ".steps"


def control_destination(service: str) -> str:
    """Return the destination to which a service sends control messages. The same
    service receives them from there."""
    return f"{service}{_CONTROL}"


def is_control(destination: str) -> bool:
    """Return whether this is the destination of a service's control messages."""
    return destination.endswith(_CONTROL)


def task_destination(service: str, backend: str) -> str:
    """Return the destination of a backend's tasks. If the backend has a destination for
    each queue, that destination is the returned text, a dot, and the queue's name."""
    return f"{service}{OF_TASKS}{backend}"


def is_task(destination: str) -> bool:
    """Return whether this is a destination of tasks."""
    return OF_TASKS in destination


#: Most milliseconds after which RabbitMQ can expire a message: 49 days.
MAX_RABBITMQ_DELAY = 2**32 - 1


def delay_queue_seconds(milliseconds: int) -> int:
    """Return the seconds in the name of the queue in which RabbitMQ keeps a delayed
    message. RabbitMQ expires only the first message of a queue, so there are queues for
    1 s, 2 s, 4 s, 8 s and so on."""
    return 1 << ((milliseconds - 1) // 1000).bit_length()


def is_delay_queue(name: str) -> bool:
    """Return whether RabbitMQ keeps delayed messages in the queue of this name."""
    return re.search(r"\.(wait|delay)-\d+s$", name) is not None


def is_topic(destination: str) -> bool:
    """Return whether this is a topic, whose messages go to every subscriber."""
    return destination.startswith(TOPIC_PREFIX)


#: Headers in which other libraries keep a message's id: CAP and django-outbox-pattern.
IDS_OF_OTHERS = ("cap-msg-id", "dop-msg-id")

#: The namespace of derived ids, which keeps them apart from all others. Each formula
#: has its own namespace or UUID version: if you change what an id is derived from, take
#: a new one, so that two formulas never give the same id.
NAMESPACE = uuid.UUID("86f79ce9-ac6e-4a7d-ade4-44f29f8b6b22")
#: The bits of an id after its instant and its version.
_BEHIND = (1 << 76) - 1


def derived_id(
    service: str, cause: uuid.UUID, stage: str, ordinal: int, *content: str
) -> uuid.UUID:
    """Return the id of the `ordinal`-th message that `stage` sends for `cause`. With
    `content`, return the id of the `ordinal`-th message with this content.

    A stage that runs again sends the same ids, and every inbox drops the copies. Two
    services that consume one topic send different ids, even if their stages have the
    same name.

    Ids of version 7 and version 8 begin with an instant. If the id of `cause` has one
    of these versions, the derived id begins with the same instant, so that an index on
    ids grows at one end. The derived id then has version 8 (RFC 9562, section 5.8).
    Otherwise, the derived id has version 5.
    """
    named = _named("sent", service, str(cause), stage, ordinal, *content)
    if cause.version not in (7, 8):
        return named
    return uuid.UUID(int=cause.int >> 80 << 80 | 0x8 << 76 | named.int & _BEHIND)


def other_id(derived: uuid.UUID, destination: str, key: str, body: bytes) -> uuid.UUID:
    """Return a new id for a message, because a stored message with other content has
    the id `derived` already. The new id depends only on the arguments, so a copy of the
    message gets the same new id."""
    digest = hashlib.sha256(body).hexdigest()
    return _named("another", str(derived), destination, key, digest)


def session_id(service: str, cause: uuid.UUID, stage: str) -> uuid.UUID:
    """Return the session id of all messages that `stage` stores for `cause`."""
    return _named("session", service, str(cause), stage)


def foreign_id(service: str, broker_message_id: str) -> uuid.UUID:
    """Return an id for a message that has no `txmsg-id`.

    Such an id does not detect every duplicate: if a sender sends a message twice, the
    broker gives the two copies different ids.
    """
    named = f"foreign/{service}/{broker_message_id}"
    # Half of a surrogate pair, in a header of another system, has no UTF-8.
    return uuid.uuid5(NAMESPACE, named.encode("utf-8", "backslashreplace").decode())


def event_id(source: str, event: str) -> uuid.UUID:
    """Return the message id for a CloudEvent. It is derived from two attributes of the
    CloudEvent, `source` and `id`, which are unique together. `event` is the value of
    `id`."""
    return _named("cloudevent", source, event)


def tick_id(service: str, name: str, tick: dt.datetime) -> uuid.UUID:
    """Return the id of the message that the schedule `name` stores for one tick."""
    return _named("tick", service, name, format_instant(tick))


def others_id(service: str, headers: Mapping[str, str]) -> uuid.UUID | None:
    """Return the message id that the sender's library has set in a header of its own,
    if any."""
    for name in IDS_OF_OTHERS:
        if given := headers.get(name):
            return uuid_or_none(given) or foreign_id(service, given)
    return None


def _named(*parts: str | int) -> uuid.UUID:
    # Names may contain any separator. JSON keeps adjacent names apart.
    return uuid.uuid5(NAMESPACE, json.dumps(parts, separators=(",", ":")))


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

#: Headers that a caller cannot set, besides those with `PREFIX` and a broker's.
RESERVED_HEADERS = OF_A_DELIVERY | {
    *TWIN_NAMES,
    CONTENT_TYPE,
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
    """Return the id of the message's predecessor in the order of the key, and the
    predecessor's place in this order. Return None if the header is missing or
    unreadable. Also return None if the message names itself as its predecessor, as a
    message from another system may do. It would wait for itself for ever."""
    before, _, at = headers.get(AFTER, "").partition(";at=")
    try:
        instant, found = parse_instant(at), uuid.UUID(before)
        own = headers.get(MESSAGE_ID)
        if own and uuid.UUID(own) == found:
            return None
        return found, instant
    except ValueError:
        return None


def traceparent(headers: Mapping[str, str]) -> str | None:
    """Return a message's trace context, or None if it does not have W3C's form."""
    found = headers.get(TRACEPARENT, "")
    return found if _TRACEPARENT.fullmatch(found) else None


def travels(name: str) -> bool:
    """Return whether a header is kept when its message is sent again. The sender's
    headers and ours are kept; headers that a broker adds are not."""
    lowered = name.lower()
    return (
        lowered not in OF_A_DELIVERY
        and lowered not in OF_A_BROKER
        and not lowered.startswith(OF_A_BROKER_BEGIN)
    )


def reserved(name: str) -> bool:
    """Return whether callers cannot set a header, because it belongs to this package,
    the protocol or a broker."""
    lowered = name.lower()
    return (
        lowered in RESERVED_HEADERS
        or lowered in OF_A_BROKER
        or lowered.startswith((PREFIX, *OF_A_BROKER_BEGIN))
    )


def senders(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that the sender wrote and that may be sent again."""
    return {name: value for name, value in headers.items() if not reserved(name)}


def digest(headers: Mapping[str, str], body: bytes) -> str:
    """Return a digest of the sender's headers and body, which is the same over every
    broker."""
    written = {name: value for name, value in headers.items() if travels(name)}
    found = hashlib.sha256(json.dumps(written, sort_keys=True).encode())
    found.update(body)
    return found.hexdigest()


def of_a_copy(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers to store with a copy whose body is unchanged: the sender's
    headers, the type of the body, the link to the predecessor, and the headers of the
    conversation."""
    kept = senders(headers) | conversation(headers)
    kept.pop(CORRELATION_ID, None)  # a column of its own
    for name in (TYPE, AFTER):
        if name in headers:
            kept[name] = headers[name]
    return kept


def headers_of(row: Any, service: str, created: str) -> dict[str, str]:
    """Return the wire headers of an outbox row. `created` is the formatted time at
    which the row was stored."""
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
