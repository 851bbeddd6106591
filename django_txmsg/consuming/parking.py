"""Hop 6's other source: a stage's parked messages, and their share of a thread's time.

They get what the broker's deliveries leave of it, and a share when nothing is left:
poison must not hold up the others, nor they it for ever. What a message has woken that
has just ended is next.
"""

from __future__ import annotations

import threading
import uuid
from typing import cast

from ..brokers.base import Session
from ..errors import BrokerUnavailable
from ..models import InboxMessage
from ..models.inbox_parked import Parked
from ..stages import Stage

#: Seconds that a parked message, once claimed, belongs to one worker.
LEASE = 60.0
#: Deliveries that a busy stage takes between two parked messages.
SHARE = 16
#: Messages in a row that it takes because the one before them has ended.
FOLLOWERS = 16


class Parking:
    """The parked messages of a stage, as one thread takes them under its `token`."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        #: Set by the consumer when parked messages of the stage are due: one query a
        #: process finds out, and a stage that uses no database stays without one.
        self.due = threading.Event()
        #: Set by what ends and makes others due that have waited for it.
        self.woken = threading.Event()
        self.token = uuid.uuid4()
        self._since, self._followers = SHARE, 0

    def comes_first(self) -> bool:
        """Return whether one of them is to run before the broker is asked."""
        return self._since >= SHARE or self.follows()

    def follows(self) -> bool:
        """Return whether a message has just ended for which others have waited: they
        are next, so many in a row at most."""
        if not self.woken.is_set():
            self._followers = 0
            return False
        self.woken.clear()
        self.due.set()
        self._followers += 1
        return self._followers % FOLLOWERS > 0

    def had_its_share(self) -> None:
        """Note that one has run."""
        self._since = 0

    def had_its_turn(self) -> None:
        """Note that none was there to run: the next delivery comes before them."""
        self._since = min(self._since, SHARE - 1)

    def waited_for(self, deliveries: int) -> None:
        """Note how many of the broker's have come before them."""
        self._since += deliveries

    def claim(self) -> Parked | None:
        """Take one that has become due, under a lease."""
        if not self.due.is_set():
            return None
        stage = self._stage
        rows = InboxMessage.objects.db_manager(stage.definition.using)
        parked = rows.claim_parked(stage.name, self.token, LEASE, stage.reads)
        if parked is None:
            self.due.clear()
        return parked

    def give_back(self, parked: Parked) -> None:
        """Let others have it at once."""
        rows = InboxMessage.objects.db_manager(self._stage.definition.using)
        rows.unpark(parked.seen.id, self.token)


class _NoSession:
    """Stands in for a broker session where none is used."""

    def __getattr__(self, name: str) -> object:
        raise BrokerUnavailable(f"no broker to {name} with")


NO_SESSION = cast(Session, _NoSession())
