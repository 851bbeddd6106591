"""Limits that the lanes of one process share: how many lanes use the database at the
same time, and how much memory the bodies take.

Without the first limit, the lanes would all use the database at the same time, and then
all wait for the broker. So either the database or the broker would always be idle. The
second limit exists because a body is copied several times while it is sent. This limit
applies to all lanes of a database and broker together.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..models import claiming

#: Seconds that a lane waits for its turn: a statement that waits for another session's
#: lock must not hold up the other lanes.
LONGEST = 0.1


class Turn:
    """A semaphore that lanes share. It limits how many lanes use the database at the
    same time, to claim or to mark their rows. The limit is `places`, and twice as high
    while the broker is idle."""

    def __init__(self, places: int = 1) -> None:
        self._places = places
        self._at_database = self._at_broker = 0
        self._changed = threading.Condition()

    @contextmanager
    def at_database(self) -> Iterator[None]:
        """Surround the use of the database. Waits at most LONGEST seconds for a free
        place, and then goes on without a place."""
        with self._changed:
            self._changed.wait_for(self._is_free, LONGEST)
            self._at_database += 1
        try:
            yield
        finally:
            with self._changed:
                self._at_database -= 1
                self._changed.notify()

    @contextmanager
    def at_broker(self) -> Iterator[None]:
        """Surround the use of the broker: while any lane is in the block, the broker is
        not idle."""
        with self._changed:
            self._at_broker += 1
        try:
            yield
        finally:
            with self._changed:
                self._at_broker -= 1
                self._changed.notify_all()

    def _is_free(self) -> bool:
        places = self._places if self._at_broker else 2 * self._places
        return self._at_database < places


@dataclass(slots=True, eq=False)
class Part:
    """One lane's share of the budget: `max_bytes` of bodies. With `larger`, the lane
    may claim a single larger body instead."""

    max_bytes: int
    larger: bool
    #: Bytes that count against the budget: those it may claim, then those claimed.
    held: int
    #: Set at the end: whether its lane, having claimed nothing, must try again. Another
    #: lane may have locked a larger body for a moment without claiming it, and no other
    #: lane is left to do so.
    is_to_claim_again: bool = False


class Budget:
    """The memory budget for message bodies. All lanes of one database and broker share
    the budget.

    A body that is larger than a lane's share is sent only while no other lane holds
    bodies. Until then, a lane that finds such a body claims nothing. The last lane that
    holds bodies tries to claim the large body after it has sent its own bodies.
    """

    def __init__(self, lanes: int = 1, budgets: int = 1) -> None:
        """Create a budget for `lanes` lanes. The process divides its memory for bodies
        equally among `budgets` budgets."""
        self._limit = claiming.MAX_BYTES // budgets
        self._share = self._limit // lanes
        self._parts: set[Part] = set()
        #: Whether a lane that could not claim a larger body has claimed nothing.
        self._passed = False
        self._changed = threading.Condition()

    @contextmanager
    def part(self, stop: threading.Event) -> Iterator[Part | None]:
        """Wait until a lane's share of the memory is free, and reserve the share during
        the block. Yields None if `stop` is set first."""
        with self._changed:
            while not self._has_room() and not stop.is_set():
                self._changed.wait(0.5)
            if stop.is_set():
                part = None
            else:
                part = Part(self._share, not self._parts, self._share)
                self._parts.add(part)
        try:
            yield part
        finally:
            if part is not None:
                with self._changed:
                    self._parts.discard(part)
                    self._passed |= not (part.larger or part.held)
                    if not self._parts:
                        part.is_to_claim_again, self._passed = self._passed, False
                    self._changed.notify_all()

    def claimed(self, part: Part, size: int) -> None:
        """Record how many bytes a lane has claimed. Other lanes may then use the rest
        of that lane's share."""
        with self._changed:
            part.held = size
            self._changed.notify_all()

    def _has_room(self) -> bool:
        held = sum(part.held for part in self._parts)
        return held == 0 or held + self._share <= self._limit
