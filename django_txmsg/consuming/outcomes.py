"""Hop 7 from outside: an arrival goes in, and one of these outcomes comes out."""

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
    """Whether the broker's own transaction has settled the delivery already."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Nothing was to be done but to drop this copy."""


@dataclass(frozen=True, slots=True)
class SentBack:
    """A foreign message without a lasting identity lies in its queue again, under one
    of ours."""


@dataclass(frozen=True, slots=True)
class Postponed:
    """Parked, at no attempt: until code runs that reads the body's version, or since
    its queue did not take it back."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Parked, at no attempt, until it is its turn among the messages of its key."""


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
    """What was counted in the inbox of an arrival: once, however often it is processed
    until something can be decided."""

    row: int | None = None
    attempt: bool = False
    #: What ended the attempt before, if another one is to be counted for that.
    error: BaseException | None = None
    #: Attempts that ended as the database had no room for their handler's work.
    crowded: int = 0


@dataclass(frozen=True)
class Arrival:
    """A delivery in the hands of one worker thread, for one stage.

    `parked` is set when it comes from the inbox's parking place and not from the
    broker; `token` is the lease it is held under then. `woken` is set when it makes
    others due, which have waited for it.
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
        """Have the next try counted as another attempt: this error may come each time,
        and the message has to end."""
        self.counted.attempt, self.counted.error = False, error

    @cached_property
    def turn(self) -> Turn | None:
        """The place of the message among those of its key, where that matters: at an
        ordered stage, for a message with a key."""
        stage, headers = self.stage, self.delivery.headers
        key = stage.ordered and headers.get(wire.KEY, "")[:255].replace("\x00", "")
        if not key:
            return None
        after_id, after_at = wire.after(headers) or (None, None)
        return Turn(stage.name, key, stage.ordered == "skip", after_id, after_at)
