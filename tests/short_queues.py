"""The embedded broker, but with queues of limited length.

`ROOM` is the number of messages that a destination still accepts. Further messages are
refused, as by a full queue. Later messages of the same key wait.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from django_txmsg.brokers.base import Outgoing, one_by_one
from django_txmsg.brokers.database import DatabaseBroker, DatabaseSession
from django_txmsg.errors import BrokerError, DestinationUnavailable

#: Destinations with a limit, and for how many messages there is room.
ROOM: dict[str, int] = {}
#: How many messages were sent to each destination, refused ones included.
TRIED: Counter[str] = Counter()
_lock = threading.Lock()


class ShortQueues(DatabaseBroker):
    """A database:// broker whose queues can be full."""

    def open(
        self, *, transacted: bool = False, subscriber: str | None = None
    ) -> DatabaseSession:
        return ShortSession(self.stored_in or "", 30.0, 0.01)


class ShortSession(DatabaseSession):
    def send(
        self,
        batch: Sequence[Outgoing],
        *,
        isolate: bool = False,
        timeout: float | None = None,
    ) -> list[BrokerError | None]:
        with _lock:
            outcomes = one_by_one(batch, _taken)
        sound = [one for one, bad in zip(batch, outcomes, strict=True) if bad is None]
        super().send(sound)
        return outcomes

    def enlist(self, outgoing: Outgoing) -> None:
        with _lock:
            error = _taken(outgoing)
        if error is not None:
            raise error
        super().enlist(outgoing)


def _taken(one: Outgoing) -> BrokerError | None:
    TRIED[one.destination] += 1
    room = ROOM.get(one.destination)
    if room is None:
        return None
    if room <= 0:
        return DestinationUnavailable(f"{one.destination} is full: 0 places left")
    ROOM[one.destination] = room - 1
    return None
