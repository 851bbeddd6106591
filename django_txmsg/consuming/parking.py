"""Hop 6's other source: a stage's parked messages, and their share of a thread's time.

They run when the broker has no deliveries. While it has some, they get a share of the
time, so that neither poison messages nor new deliveries block the others. Messages that
their predecessor has just released come first.
"""

from __future__ import annotations

import threading
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
        self._since, self._followers = SHARE, 0

    def comes_first(self) -> bool:
        """Return whether a parked message must run before the broker is queried."""
        return self._since >= SHARE or self.follows()

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
        self._since = min(self._since, SHARE - 1)

    def waited_for(self, deliveries: int) -> None:
        """Count deliveries that were processed while parked messages waited."""
        self._since += deliveries

    def claim(self) -> Parked | None:
        """Claim one due message, under a lease."""
        if not self.due.is_set():
            return None
        stage = self._stage
        rows = InboxMessage.objects.db_manager(stage.definition.using)
        parked = rows.claim_parked(stage.name, self.token, LEASE, stage.reads)
        if parked is None:
            self.due.clear()
        return parked

    def give_back(self, parked: Parked) -> None:
        """Release a claimed message at once."""
        rows = InboxMessage.objects.db_manager(self._stage.definition.using)
        rows.unpark(parked.seen.id, self.token)


class _NoSession:
    """Replaces a broker session where none is used."""

    def __getattr__(self, name: str) -> object:
        raise BrokerUnavailable(f"no broker to {name} with")


NO_SESSION = cast(Session, _NoSession())
