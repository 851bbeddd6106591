"""Hop 7's interface: an arrival goes in, and one of these outcomes comes out."""

from __future__ import annotations

import threading
import uuid
from dataclasses import dataclass, field
from functools import cached_property

from .. import wire
from ..brokers.base import Delivery, Session
from ..envelope.redelivery import Dead, RedeliverAfter
from ..models.inbox_parked import Parked
from ..models.inbox_record import Seen
from ..models.inbox_turn import Turn
from ..stages import Stage


@dataclass(frozen=True, slots=True)
class Processed:
    """The stage's transaction is committed."""

    acknowledged: bool = False
    """Whether the broker's own transaction has acknowledged the delivery already."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """This copy only needs to be dropped."""


@dataclass(frozen=True, slots=True)
class SentBack:
    """A foreign message without a stable identity is in its queue again, with an id of
    ours."""


@dataclass(frozen=True, slots=True)
class Postponed:
    """Parked, without counting an attempt: until newer code can read the body, or
    because its queue did not take the copy back."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Parked, without counting an attempt, until its turn among the messages of its
    key."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The worker is stopping: leave the delivery to the broker, unacknowledged."""


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


@dataclass(slots=True)
class Counted:
    """What the inbox has counted for an arrival: once, however often it is retried
    until something can be decided."""

    row: int | None = None
    attempt: bool = False
    #: The error that ended the attempt before, if it requires counting another one.
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

    def count(self, seen: Seen, *, attempt: bool = True) -> Seen:
        """Note that the arrival is recorded as `seen`, with an attempt or without."""
        self.counted.row, self.counted.attempt = seen.id, attempt
        return seen

    def count_again(self, error: BaseException) -> None:
        """Count the next try as another attempt: this error may occur each time, and
        the message must end."""
        self.counted.attempt, self.counted.error = False, error

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
