"""A delivery held by one worker thread, and the values derived from it, each computed
once."""

from __future__ import annotations

import threading
import uuid
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .. import wire
from ..brokers.base import Delivery, Session
from ..models import InboxMessage
from ..models.inbox import Parked, Seen
from ..models.inbox_order import Turn
from ..stages import Stage
from . import decoding


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
        return decoding.identity(self.delivery, self.stage.broker)

    @cached_property
    def has_identity(self) -> bool:
        """Whether the message can be recognised when it is delivered again."""
        return decoding.has_identity(self.delivery)

    @cached_property
    def came_before(self) -> bool:
        """Whether the message was delivered before."""
        return decoding.came_before(self.delivery)

    @cached_property
    def kept_headers(self) -> dict[str, str]:
        """The headers to keep with the message: all except the delivery's own."""
        return decoding.kept_headers(self.delivery)

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

    def count(self, seen: Seen, *, attempt: bool = True) -> Seen:
        """Note that the arrival is recorded as `seen`, with an attempt or without."""
        self.counted.row, self.counted.attempt = seen.id, attempt
        return seen

    def count_again(self, error: BaseException) -> None:
        """Count the next try as another attempt: this error may occur each time, and
        the message must end."""
        self.counted.attempt, self.counted.error = False, error
