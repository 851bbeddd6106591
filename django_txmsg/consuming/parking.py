"""Hop 6's other source: a stage's parked messages, and their share of a thread's time.

They run when the broker has no deliveries. While it has some, they get a share of the
time, so that neither poison messages nor new deliveries block the others. Messages that
their predecessor has just released come first.
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from typing import cast

from ..brokers.base import Session
from ..errors import BrokerUnavailable
from ..models import InboxMessage
from ..models.inbox import Parked
from ..stages import Stage

#: Seconds that a claimed parked message belongs to one worker.
LEASE = 60.0
#: Deliveries that a busy stage processes between two parked messages.
SHARE = 16
#: Most messages in a row that run because the one before them has ended.
FOLLOWERS = 16
#: Shortest pause between two queries for parked messages that were not to be had.
_PAUSE = 0.02


class Parking:
    """The parked messages of a stage, as one thread claims them under its `token`."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        #: Set by the consumer when parked messages of the stage are due. It queries for
        #: all stages of the process at once, so a stage that uses no database opens no
        #: connection.
        self.due = threading.Event()
        #: Set when a message ends and releases others that waited for it.
        self.woken = threading.Event()
        self.token = uuid.uuid4()
        # Most parked messages of a stage with a rate have waited only for their slot.
        self._share = SHARE if stage.rate is None else 1
        self._since, self._followers = self._share, 0
        #: When the next one is due, of a stage with a rate, by this process's clock.
        self._next = math.inf

    def comes_first(self) -> bool:
        """Return whether a parked message must run before the broker is queried."""
        return self._since >= self._share or self.follows()

    def follows(self) -> bool:
        """Return whether a message has just released its followers: those are next, up
        to a limit in a row."""
        if not self.woken.is_set():
            self._followers = 0
            return False
        self.woken.clear()
        self.due.set()
        self._followers += 1
        return self._followers % FOLLOWERS > 0

    def had_its_share(self) -> None:
        """Record that a parked message has run."""
        self._since = 0

    def had_its_turn(self) -> None:
        """Record that no parked message was due: the next delivery comes first."""
        self._since = min(self._since, self._share - 1)

    def waited_for(self, deliveries: int) -> None:
        """Count deliveries that were processed while parked messages waited."""
        self._since += deliveries

    def claim(self) -> Parked | None:
        """Claim one due message, under a lease."""
        if not self.due.is_set() and self.pause:
            return None
        stage = self._stage
        rows = InboxMessage.objects.db_manager(stage.definition.using)
        parked = rows.claim_parked(stage.name, self.token, LEASE, stage.reads)
        if parked is None:
            self.due.clear()
            if stage.rate is not None:
                # Not by the consumer's poll: a slot that is used late is lost.
                after = rows.next_due(stage.name)
                pause = math.inf if after is None else max(_PAUSE, after)
                self._next = time.monotonic() + pause
        return parked

    @property
    def pause(self) -> float:
        """Seconds until the next parked message may be due, if that is known."""
        return max(0.0, self._next - time.monotonic())

    def give_back(self, parked: Parked) -> None:
        """Release a claimed message at once."""
        rows = InboxMessage.objects.db_manager(self._stage.definition.using)
        rows.unpark(parked.record.id, self.token)


class _NoSession:
    """Replaces a broker session where none is used."""

    def __getattr__(self, name: str) -> object:
        raise BrokerUnavailable(f"no broker to {name} with")


NO_SESSION = cast(Session, _NoSession())
