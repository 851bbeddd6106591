"""Hop 6's decoding: the meaning of a delivery's raw headers and bytes.

An `Arrival` is a delivery in the hands of one worker thread, decoded once for all the
steps of hop 7.

Every error of a foreign or broken sender becomes a DecodeError with a reason code here;
the bytes are kept unchanged.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .. import wire
from ..brokers.base import Delivery, Session
from ..envelope import cloudevents, serializers
from ..envelope.message import Message, new_id
from ..errors import DecodeError
from ..models import InboxMessage
from ..models.inbox import InboxRecord, Parked
from ..models.inbox_order import Turn
from ..stages import Stage

#: Largest accepted header block, in characters, and most headers.
MAX_HEADER_BLOCK = 128 * 1024
MAX_HEADERS = 1000


def read(delivery: Delivery, stage: Stage) -> Message:
    """Return the message of a delivery, with the body for the stage's handler. Raises
    DecodeError, including NewerCodeNeeded."""
    given, content_type = delivery.body, checked(delivery, stage)
    if cloudevents.is_structured(content_type):
        given, content_type = cloudevents.data(given)
    reader = stage.reader
    if reader is None:
        body = serializers.decode(given, content_type)
    else:
        body = reader.read(given, content_type, delivery.headers.get(wire.TYPE))
    return _message(delivery, stage, body)


def recognised(delivery: Delivery) -> Delivery:
    """Return a delivery with our headers in place of those of another convention."""
    if wire.MESSAGE_ID in delivery.headers:
        return delivery
    found = cloudevents.headers_of(delivery.headers, delivery.body)
    if not found:
        return delivery
    return dataclasses.replace(delivery, headers={**found, **delivery.headers})


def envelope(delivery: Delivery, stage: Stage) -> Message:
    """Return the message of a delivery whose body cannot be read here yet."""
    return _message(delivery, stage, None)


def checked(delivery: Delivery, stage: Stage) -> str:
    """Return the content type of a delivery. Raises DecodeError for its headers."""
    headers = delivery.headers
    if delivery.problem:
        raise DecodeError("malformed_headers", delivery.problem)
    size = sum(len(name) + len(value) for name, value in headers.items())
    if len(headers) > MAX_HEADERS or size > MAX_HEADER_BLOCK:
        raise DecodeError(
            "headers_too_large", f"{len(headers)} headers of {size} characters"
        )
    own = headers.get(wire.MESSAGE_ID)
    if own is not None and _uuid(own) is None:
        raise DecodeError(
            "malformed_id", f"{wire.MESSAGE_ID} is not a UUID: {own[:80]!r}"
        )
    others = wire.others_id(stage.broker, headers)
    if own is None and others is None and not delivery.broker_message_id:
        raise DecodeError("missing_id", "it has neither txmsg-id nor message-id")
    content_type = headers.get(wire.CONTENT_TYPE, wire.BYTES)
    if "/" not in content_type:
        raise DecodeError("content_type", f"not a media type: {content_type[:80]!r}")
    return content_type


def _message(delivery: Delivery, stage: Stage, body: object) -> Message:
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
        redelivered=came_before(delivery),
        correlation_id=_correlation_id(headers),
        service=headers.get(wire.SERVICE),
        conversation=wire.conversation(headers),
    )


def identity(delivery: Delivery, broker: str) -> uuid.UUID:
    """Return the message's id; without one, an id derived from the broker's, or from
    the content if the broker's id is not stable."""
    own = _uuid(delivery.headers.get(wire.MESSAGE_ID, ""))
    own = own or wire.others_id(broker, delivery.headers)
    if own is not None:
        return own
    if delivery.id_stays and delivery.broker_message_id:
        return wire.foreign_id(broker, delivery.broker_message_id)
    return wire.foreign_id(broker, wire.digest(delivery.headers, delivery.body))


def has_identity(delivery: Delivery) -> bool:
    """Return whether the message can be recognised when it is delivered again."""
    return (
        delivery.id_stays
        or wire.MESSAGE_ID in delivery.headers
        or wire.others_id("", delivery.headers) is not None
    )


def named(delivery: Delivery) -> Delivery:
    """Return a foreign message's delivery with a `txmsg-id` of ours."""
    headers = {**delivery.headers, wire.MESSAGE_ID: str(new_id())}
    return dataclasses.replace(delivery, headers=headers)


def send_back(delivery: Delivery, session: Session) -> None:
    """Send a foreign message that was `named()` back to its queue, with proof; this
    delivery is acknowledged.

    A worker that dies in between leaves both, as two messages. Raises DispatchRejected
    if the broker does not take it.
    """
    headers = copied_headers(delivery.headers)
    for name, value in delivery.headers.items():
        if name.lower().startswith(wire.OF_A_DEATH):
            headers[name] = value
    session.send_back(delivery, headers)


def came_before(delivery: Delivery) -> bool:
    """Return whether this is not the first arrival: the broker reports it, or it is a
    copy that a stage returned."""
    return delivery.redelivered or wire.FAILED_ATTEMPT in delivery.headers


def kept_headers(delivery: Delivery) -> dict[str, str]:
    """Return the headers to keep with a message: all except the delivery's own.

    A foreign message keeps the identity that the broker gave it.
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
    """Return a parked message in the form of its delivery."""
    headers = dict(parked.headers)
    broker_id = headers.pop("txmsg-broker-id", "")
    headers.setdefault(wire.MESSAGE_ID, str(parked.record.message_id))
    return Delivery(parked.destination, headers, parked.body, True, broker_id)


def expired(delivery: Delivery, now: dt.datetime) -> bool:
    """Return whether its sender's expiry has passed, by the database's clock."""
    until = wire.expires(delivery.headers)
    return until is not None and until <= now


def _correlation_id(headers: Mapping[str, str]) -> str | None:
    """Return the correlation id, cut to the length of the columns that store it: in the
    inbox, and with each message that this one causes."""
    found = headers.get(wire.CORRELATION_ID)
    return None if found is None else found[: wire.MAX_CORRELATION_ID]


def _uuid(text: str) -> uuid.UUID | None:
    try:
        return uuid.UUID(text)
    except ValueError:
        return None


@dataclass(slots=True)
class Counted:
    """The record of a counted arrival. It is kept while the arrival is retried, so that
    the arrival is counted once."""

    row: int | None = None
    attempt: bool = False
    #: The previous attempt's error, if the next try must count as another attempt.
    error: BaseException | None = None
    #: Attempts that ended because the database had no room for their handler's work.
    crowded: int = 0


@dataclass(frozen=True)
class Arrival:
    """A delivery held by one worker thread, for one stage.

    `parked` is set if it comes from the inbox instead of the broker; `token` is then
    its lease. `woken` is set if it released messages that waited for it.
    """

    stage: Stage
    delivery: Delivery
    session: Session
    worker: str
    stop: threading.Event
    parked: Parked | None = None
    token: uuid.UUID | None = None
    woken: threading.Event = field(default_factory=threading.Event)
    counted: Counted = field(default_factory=Counted)

    @property
    def using(self) -> str:
        """The database alias of the stage's transaction, and of its inbox."""
        return self.stage.definition.using

    @cached_property
    def inbox(self) -> Any:
        """The rows of the stage's inbox, in that database."""
        return InboxMessage.objects.db_manager(self.using)

    @cached_property
    def order(self) -> Any:
        """The order of keys at the stage, if it is ordered."""
        return InboxMessage.order.db_manager(self.using)

    @cached_property
    def message_id(self) -> uuid.UUID:
        """The message's id: its own, or the one derived for it."""
        return identity(self.delivery, self.stage.broker)

    @cached_property
    def has_identity(self) -> bool:
        """Whether the message can be recognised when it is delivered again."""
        return has_identity(self.delivery)

    @cached_property
    def came_before(self) -> bool:
        """Whether the message was delivered before."""
        return came_before(self.delivery)

    @cached_property
    def kept_headers(self) -> dict[str, str]:
        """The headers to keep with the message: all except the delivery's own."""
        return kept_headers(self.delivery)

    @cached_property
    def turn(self) -> Turn | None:
        """The place of the message in the order of its key, at an ordered stage; None
        for a message without a key."""
        stage, headers = self.stage, self.delivery.headers
        key = stage.ordered and headers.get(wire.KEY, "")[:255].replace("\x00", "")
        if not key:
            return None
        after_id, after_at = wire.after(headers) or (None, None)
        return Turn(stage.name, key, stage.ordered == "skip", after_id, after_at)

    def count(self, record: InboxRecord, *, attempt: bool = True) -> InboxRecord:
        """Note that `record` is that of the arrival, with an attempt or without."""
        self.counted.row, self.counted.attempt = record.id, attempt
        return record

    def count_again(self, error: BaseException) -> None:
        """Count the next try as another attempt: this error may occur each time, and
        the message must end."""
        self.counted.attempt, self.counted.error = False, error
