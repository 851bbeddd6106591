"""Hop 6's decoding: reads the message from a delivery's headers and bytes.

Every fault of a message raises DecodeError with a reason code. The bytes are never
changed. CloudEvents 1.0, in structured or binary mode, become messages: the attributes
of the event become headers, and its data the body. Headers that the sender has set take
precedence.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import re
import uuid
from collections.abc import Mapping
from typing import Any

from .. import wire
from ..brokers.base import Delivery, Session
from ..envelope import serializers
from ..envelope.codec import from_json, to_json
from ..envelope.message import Message, correlation_id, new_id
from ..envelope.message_type import is_name
from ..envelope.serializers import is_json
from ..errors import DecodeError
from ..models.inbox_arrival import Parked
from ..rules.dead_letters import BODY_TOO_LONG
from ..stages import Stage

#: Largest accepted header block, in characters, and most headers.
MAX_HEADER_BLOCK = 128 * 1024
MAX_HEADERS = 1000

_CLOUDEVENTS = "application/cloudevents"
#: Prefixes of attributes as headers: that of HTTP, of Kafka and of AMQP, and the latter
#: as JMS property names.
_PREFIXES = ("ce-", "ce_", "cloudEvents:", "cloudEvents_")
_MARKS = frozenset(f"{prefix}specversion" for prefix in _PREFIXES)
_NEEDED = ("id", "source", "type")
_DATA = ("data", "data_base64")
#: Control characters and lone surrogates: neither an attribute nor one of our headers
#: may contain them.
_NO_TEXT = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\ud800-\\udfff]")


def read(delivery: Delivery, stage: Stage) -> Message:
    """Return the message of a delivery, with the body as the stage's handler expects
    it. Raises DecodeError, or its subclass NewerCodeNeeded."""
    checked(delivery, stage)
    given = delivery.body
    content_type = delivery.headers.get(wire.CONTENT_TYPE, wire.BYTES)
    if "/" not in content_type:
        raise DecodeError("content_type", f"not a media type: {content_type[:80]!r}")
    if is_event(content_type):
        given, content_type = event_data(given)
    reader = stage.reader
    if reader is None:
        body = serializers.decode(given, content_type)
    else:
        body = reader.read(given, content_type, delivery.headers.get(wire.TYPE))
    return envelope(delivery, stage, body)


def recognised(delivery: Delivery) -> Delivery:
    """Return the delivery with our headers added, if the message has the headers of
    another convention, such as Celery's."""
    if wire.MESSAGE_ID in delivery.headers:
        return delivery
    found = event_headers(delivery.headers, delivery.body)
    if not found:
        return delivery
    return dataclasses.replace(delivery, headers={**found, **delivery.headers})


def checked(delivery: Delivery, stage: Stage) -> None:
    """Raise DecodeError if the message's id, its headers or its body cannot be
    stored."""
    headers = delivery.headers
    if delivery.problem:
        reason = BODY_TOO_LONG if delivery.cut else "malformed_headers"
        raise DecodeError(reason, delivery.problem)
    size = sum(len(name) + len(value) for name, value in headers.items())
    if len(headers) > MAX_HEADERS or size > MAX_HEADER_BLOCK:
        raise DecodeError(
            "headers_too_large", f"{len(headers)} headers of {size} characters"
        )
    own = headers.get(wire.MESSAGE_ID)
    if own is not None and wire.uuid_or_none(own) is None:
        raise DecodeError(
            "malformed_id", f"{wire.MESSAGE_ID} is not a UUID: {own[:80]!r}"
        )
    others = wire.others_id(stage.broker, headers)
    if own is None and others is None and not delivery.broker_message_id:
        raise DecodeError("missing_id", "it has neither txmsg-id nor message-id")


def envelope(delivery: Delivery, stage: Stage, body: object = None) -> Message:
    """Return a delivery's message with this body. Pass no body if this process cannot
    read it."""
    headers = delivery.headers
    written = wire.senders(headers)
    written.pop(wire.CORRELATION_ID, None)  # a field of its own
    return Message(
        id=identity(delivery, stage.broker),
        destination=delivery.destination,
        body=body,
        headers=written,
        key=headers.get(wire.KEY),
        created_at=wire.created(headers),
        redelivered=delivery.came_before,
        correlation_id=correlation_id(headers),
        service=headers.get(wire.SERVICE),
        conversation=wire.conversation(headers),
    )


def identity(delivery: Delivery, broker: str) -> uuid.UUID:
    """Return the message's id. It comes from the message's headers. Without such a
    header, it is derived from the broker's id if that is stable, or else from the
    message's content."""
    own = wire.uuid_or_none(delivery.headers.get(wire.MESSAGE_ID))
    own = own or wire.others_id(broker, delivery.headers)
    if own is not None:
        return own
    if delivery.id_stays and delivery.broker_message_id:
        return wire.foreign_id(broker, delivery.broker_message_id)
    return wire.foreign_id(broker, wire.digest(delivery.headers, delivery.body))


def has_identity(delivery: Delivery) -> bool:
    """Return whether the message has a stable id, so that a redelivery of the message
    can be recognised."""
    return (
        delivery.id_stays
        or wire.MESSAGE_ID in delivery.headers
        or wire.others_id("", delivery.headers) is not None
    )


def named(delivery: Delivery) -> Delivery:
    """Return the delivery with a new `txmsg-id`, because its message has no stable
    id."""
    headers = {**delivery.headers, wire.MESSAGE_ID: str(new_id())}
    return dataclasses.replace(delivery, headers=headers)


def send_back(delivery: Delivery, session: Session) -> None:
    """Send a copy of a message back to its queue, and wait for the receipt. Then
    acknowledge the original delivery. The copy has the new id that `named()` has
    created.

    If the worker dies before the acknowledgement, the queue contains the original and
    the copy, as two messages. Raises DispatchRejected or DestinationUnavailable if the
    broker refuses the copy. The original delivery is then still unacknowledged.
    """
    headers = copied_headers(delivery.headers)
    for name, value in delivery.headers.items():
        if name.lower().startswith(wire.OF_A_DEATH):
            headers[name] = value
    session.send_back(delivery, headers)


def kept_headers(delivery: Delivery) -> dict[str, str]:
    """Return the headers to store with a message: all headers except those of the
    delivery.

    If the message has no id of its own, the broker's id is kept too.
    """
    if wire.FAILED_ATTEMPT in delivery.headers:
        # A copy that a stage returned: the broker's counts are not the message's own.
        kept = copied_headers(delivery.headers)
    else:
        kept = {
            name: value
            for name, value in delivery.headers.items()
            if name.lower() not in wire.OF_A_DELIVERY
        }
    if wire.MESSAGE_ID not in kept and delivery.broker_message_id:
        kept["txmsg-broker-id"] = delivery.broker_message_id
    return kept


def copied_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers for a copy that is sent to the broker again."""
    return {
        name: value
        for name, value in headers.items()
        if wire.travels(name) and name != wire.FAILED_ATTEMPT
    }


def from_parked(parked: Parked) -> Delivery:
    """Return a parked message as a delivery."""
    headers = dict(parked.headers)
    broker_id = headers.pop("txmsg-broker-id", "")
    headers.setdefault(wire.MESSAGE_ID, str(parked.record.message_id))
    return Delivery(parked.destination, headers, parked.body, True, broker_id)


def event_headers(headers: Mapping[str, str], body: bytes) -> dict[str, str]:
    """Return our headers for an event's attributes, or an empty dict if the message is
    not an event. The message id is derived from the attributes `source` and `id`, which
    together are unique."""
    try:
        event = _attributes(headers, body)
    except DecodeError:
        return {}  # reported when the body is read
    if event is None or not all(event.get(name) for name in _NEEDED):
        return {}
    found = {
        wire.MESSAGE_ID: str(wire.event_id(event["source"], event["id"])),
        wire.SERVICE: event["source"],
    }
    if is_name(event["type"]):
        found[wire.TYPE] = event["type"]
    for ours, theirs in (
        (wire.CREATED, "time"),
        (wire.KEY, "partitionkey"),
        (wire.TRACEPARENT, "traceparent"),
    ):
        if event.get(theirs):
            found[ours] = event[theirs]
    return found


def is_event(content_type: str) -> bool:
    """Return whether the content type is that of a structured event, whose body
    contains attributes and data."""
    return content_type.strip().lower().startswith(_CLOUDEVENTS)


def event_data(body: bytes) -> tuple[bytes, str]:
    """Return the data of a structured event as bytes, and its content type.

    Raises DecodeError if the body is not an event, or is a batch of events.
    """
    event = _event(body)
    content_type = str(event.get("datacontenttype") or wire.JSON)
    if "data_base64" in event:
        try:
            return base64.b64decode(event["data_base64"], validate=True), content_type
        except (TypeError, ValueError, binascii.Error) as error:
            raise DecodeError("undecodable_body", f"data_base64: {error}") from error
    value = event.get("data")
    try:
        if isinstance(value, str) and not is_json(content_type):
            return value.encode(), content_type
        return to_json(value), wire.JSON
    except (ValueError, RecursionError) as error:
        raise DecodeError("undecodable_body", f"data: {error}") from error


def _attributes(headers: Mapping[str, str], body: bytes) -> dict[str, str] | None:
    if is_event(headers.get(wire.CONTENT_TYPE, "")):
        event = _event(body)
        return {name: one for name, one in event.items() if isinstance(one, str)}
    if _MARKS.isdisjoint(headers):
        return None
    return {
        name.removeprefix(prefix).lower(): value
        for name, value in headers.items()
        for prefix in _PREFIXES
        if name.startswith(prefix)
    }


def _event(body: bytes) -> dict[str, Any]:
    event = from_json(body)
    if not isinstance(event, dict) or not str(event.get("specversion")).startswith("1"):
        raise DecodeError("undecodable_body", "not a single CloudEvent of version 1")
    for name, value in event.items():
        if name not in _DATA and isinstance(value, str) and _NO_TEXT.search(value):
            raise DecodeError("undecodable_body", f"{name[:80]!r} is no text")
    return event
