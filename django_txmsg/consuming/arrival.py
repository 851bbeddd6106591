"""Hop 7's interface: an arrival goes in, and an outcome comes out.

An `Arrival` is a delivery that one worker thread processes. The delivery is decoded
once and recorded once. The `Mode` of an arrival has the steps of hop 7 that depend on
`@stage(transaction=)`; the modes are in `modes.py`.
"""

from __future__ import annotations

import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from django.db import connections

from .. import conf, wire
from ..brokers.base import Delivery, Session
from ..django_internals import depth
from ..envelope.message import Message
from ..envelope.redelivery import Dead, RedeliverAfter
from ..models import InboxMessage
from ..models.inbox_arrival import InboxRecord, Parked
from ..models.outbox_store import NewMessage
from ..models.turn import Turn
from ..runtime.liveness import running
from ..sending.scope import Scope, in_scope
from ..stages import Stage
from . import decoding
from .protocol import guarded, is_outage


@dataclass(frozen=True, slots=True)
class Processed:
    """The stage has processed the message, and its transaction is committed."""

    #: Whether the broker's own transaction has acknowledged the delivery already.
    acknowledged: bool = False


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The message has already been processed, buried or parked. This delivery of the
    message is dropped."""

    #: False if the delivery is no copy: it is the request of a flow that no longer
    #: waits, it was revoked after its arrival, or another worker has it.
    is_copy: bool = True


@dataclass(frozen=True, slots=True)
class SentBack:
    """The message came from another system without a stable id, so a copy with a
    `txmsg-id` was sent back to its queue."""


@dataclass(frozen=True, slots=True)
class Postponed:
    """The message is parked, and no attempt is counted. There are three causes: this
    code cannot read the message's body; the message's slot at a stage with a rate is
    not due; the message's queue did not accept the copy that was sent back."""

    #: Whether this code can read it. If not, it cannot be the next one here.
    readable: bool = True


@dataclass(frozen=True, slots=True)
class Waiting:
    """The message is parked until the earlier messages of its key have ended. No
    attempt is counted."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The worker is stopping, or the stage is paused. The delivery is not acknowledged,
    so the broker delivers it again."""


Outcome = (
    Processed
    | Duplicate
    | RedeliverAfter
    | Dead
    | SentBack
    | Postponed
    | Waiting
    | Interrupted
)


def to_acknowledge(
    deliveries: Sequence[Delivery], outcomes: Sequence[Outcome]
) -> list[Delivery]:
    """Return the deliveries that must be acknowledged now. Deliveries that are already
    acknowledged, and deliveries that the broker must deliver again, are omitted."""
    return [
        delivery
        for delivery, outcome in zip(deliveries, outcomes, strict=True)
        if not isinstance(outcome, Interrupted | SentBack)
        and not _is_committed(outcome)
    ]


def is_answered(outcome: Outcome) -> bool:
    """Return whether the broker has answered what the stage has sent: it has committed
    the stage's transaction, or has stored the copy that was sent back."""
    return _is_committed(outcome) or isinstance(outcome, SentBack)


def _is_committed(outcome: Outcome) -> bool:
    """Return whether the broker has acknowledged the message with its transaction."""
    return isinstance(outcome, Processed) and outcome.acknowledged


def turn_of(stage: Stage, headers: Mapping[str, str]) -> Turn | None:
    """Return a message's place in the order of its key. Return None if the stage is not
    ordered, or if the message has no key."""
    key = headers.get(wire.KEY, "")[:255].replace("\x00", "")
    if not stage.ordered or not key:
        return None
    after_id, after_at = wire.after(headers) or (None, None)
    return Turn(stage.name, key, stage.ordered == "skip", after_id, after_at)


@dataclass(eq=False)
class Arrival:
    """A delivery that one worker thread processes with a stage.

    If the message comes from the inbox instead of the broker, `parked` is set, and
    `token` is the message's lease. When this message releases messages that waited for
    it, the event `woken` is set.
    """

    mode: Mode
    delivery: Delivery
    session: Session
    worker: str
    stop: threading.Event
    parked: Parked | None = None
    token: uuid.UUID | None = None
    woken: threading.Event = field(default_factory=threading.Event)
    #: Whether the stage is paused.
    paused: threading.Event = field(default_factory=threading.Event)
    #: Called with the error of each failed attempt, in tests.
    on_error: Callable[[BaseException], object] = lambda error: None

    #: Its reading. Read again for each attempt, since a handler may change the object.
    message: Message = field(init=False)
    #: The error of a body too large to read here, with a message that has no body.
    short: MemoryError | None = field(default=None, init=False)
    #: Its record. Kept while the arrival is retried, so that it is counted once.
    record: InboxRecord | None = field(default=None, init=False)
    #: Whether an attempt is counted.
    counted: bool = field(default=False, init=False)
    #: Whether its transaction has begun, and has taken the message's row.
    begun: bool = field(default=False, init=False)
    #: The previous attempt's error, if the next try must count as another attempt.
    error: BaseException | None = field(default=None, init=False)
    #: The messages that its handler has sent, in mode "none", once the handler has
    #: returned. The next try then omits the handler.
    sent: list[NewMessage] | None = field(default=None, init=False)
    #: Attempts that ended because the database had no room for their handler's work.
    crowded: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        mode, stage = self.mode, self.mode.stage
        self.stage, self.using = stage, mode.using
        self.inbox, self.order = mode.inbox, mode.order
        #: Whether the message can be recognised when it is delivered again.
        self.has_identity = wire.MESSAGE_ID in self.delivery.headers
        if not self.has_identity:
            self.delivery = decoding.recognised(self.delivery)
            self.has_identity = decoding.has_identity(self.delivery)
        #: Whether the message was delivered before, and can be recognised.
        self.came_before = self.has_identity and self.delivery.came_before
        #: Its place in the order of its key, at an ordered stage; None without a key.
        self.turn = turn_of(stage, self.delivery.headers)

    @cached_property
    def message_id(self) -> uuid.UUID:
        """The message's id, from its headers or derived from its delivery."""
        return decoding.identity(self.delivery, self.stage.broker)

    @cached_property
    def kept_headers(self) -> dict[str, str]:
        """The headers to store with the message: all headers except those of the
        delivery."""
        return decoding.kept_headers(self.delivery)

    @property
    def session_id(self) -> uuid.UUID:
        """The session id of the messages that the stage sends while it processes this
        message."""
        service, stage = conf.get().SERVICE, self.stage.name
        return wire.session_id(service, self.message.id, stage)

    @property
    def recorded(self) -> InboxRecord:
        """The inbox row of this arrival. Use this only after the arrival was
        recorded."""
        assert self.record is not None
        return self.record

    def count(self, record: InboxRecord, *, attempt: bool = True) -> InboxRecord:
        """Store the inbox record in this object, and return the record. `attempt` says
        whether the record's number of attempts includes the present attempt."""
        self.record, self.counted = record, attempt
        return record

    def count_again(self, error: BaseException) -> None:
        """Ensure that the next try of this arrival is counted as another attempt.
        Otherwise a message that causes this error at every try would never become a
        dead letter."""
        self.counted, self.error = False, error

    def runs(self, record: InboxRecord) -> bool:
        """Store the inbox record in this object, and return whether the stage must
        run."""
        return not self.mode.reason_not_to_run(self, self.count(record))


class Mode(ABC):
    """The processing steps that depend on the transaction mode of a stage."""

    #: Whether the delivery and the stage's messages are in the broker's transaction.
    transacted: ClassVar[bool] = False
    #: Whether a message that was processed is processed again.
    idempotent: ClassVar[bool] = False

    def __init__(self, stage: Stage) -> None:
        self.stage, self.using = stage, stage.definition.using
        self.max_begun = stage.policy.max_begun
        #: The rows of the stage's inbox, and the order of its keys.
        self.inbox: Any = InboxMessage.objects.db_manager(self.using)
        self.order: Any = InboxMessage.order.db_manager(self.using)

    @abstractmethod
    def record(self, arrival: Arrival) -> None:
        """Record the arrival durably, unless this mode needs no record. Sets
        `arrival.record`. Also sets `arrival.begun` if the same round trip has begun the
        stage's transaction."""

    @abstractmethod
    def run(self, arrival: Arrival, message: Message) -> bool:
        """Run the stage and commit. Returns whether the handler used the database.
        Raises LostRace if the message cannot be taken."""

    def reason_not_to_run(self, arrival: Arrival, record: InboxRecord) -> str:
        """Return why the stage must not run ("settled", "worker_lost" or "expired"), or
        "" if the stage may run."""
        if self.is_done(arrival, record):
            return "settled"
        if record.attempt > self.max_begun:
            return "worker_lost"
        if arrival.sent is not None:
            return ""  # the handler has run, and only the rest is tried again
        until = wire.expires(arrival.delivery.headers)
        return "expired" if until is not None and until <= record.now else ""

    def is_done(self, arrival: Arrival, record: InboxRecord) -> bool:
        """Return whether to drop the arrival, because the message has already been
        processed, buried or parked. A message from the inbox is never dropped: the
        worker claimed the message in order to process it."""
        if arrival.parked is not None:
            return False
        processed = record.processed and not self.idempotent
        return processed or record.dead or record.parked

    def handle(
        self,
        arrival: Arrival,
        message: Message,
        enlist: Callable[[Sequence[NewMessage]], None] | None = None,
    ) -> None:
        """Call the handler inside the scope of its messages. The scope ends before the
        commit, so messages that `on_commit` hooks send do not belong to the stage.

        If `enlist` is given, it is called with the messages that the handler sends
        outside of its own atomic blocks.
        """
        scope = self.scope(arrival, message)
        if enlist is not None:
            scope.enlist = enlist
            opened = connections.all(initialized_only=True)
            scope.blocks = {connection: depth(connection) for connection in opened}
        # Heartbeats report the handler as running.
        reported = running(self.stage.name, message.id, message.delivery_attempt)
        with in_scope(scope), guarded(self.using), reported:
            self.stage.handler(message)

    def scope(self, arrival: Arrival, message: Message) -> Scope:
        """Return the scope of the messages that the stage sends for `message`."""
        return Scope(
            session_id=arrival.session_id,
            using=self.using,
            cause=message,
            stage=self.stage.name,
            worker=arrival.worker,
        )

    def roll_back(self, arrival: Arrival) -> None:  # noqa: B027 - most do nothing
        """Roll back the broker's transaction, if there is one."""

    def is_turned_away(self, error: BaseException) -> bool:
        """Return whether the stage failed because its broker did not answer or refused
        a statement, or because a destination currently accepts no messages."""
        return False

    def is_outage(self, error: BaseException, raw: Any) -> bool:
        """Return True if the broker or the stage's own database is unavailable. `raw`
        is the driver's connection of the stage before the attempt."""
        return is_outage(error, raw)

    def locks_parked(self) -> bool:
        """Return whether the stage keeps the row of a parked message locked while it
        processes the message. If so, no other worker can claim the message."""
        return False
