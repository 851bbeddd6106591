"""What the lanes of one process share: turns at the database, memory for bodies, and
paused destinations.

Without turns, the lanes would all use the database at the same time, and then all wait
for the broker. So either the database or the broker would always be idle. Memory is
limited because a body is copied several times while it is sent. This limit applies to
all lanes of a database and broker together.

A full queue or a missing permission is a state of the destination, not a fault of a
message. The lanes exclude a paused destination from their claims. When the pause ends,
one lane tries to send a small batch. After each batch that the broker stores
completely, the next batch is larger.

A broker can declare that its destinations must not be paused, because one destination
stands for several queues (`Broker.pauses_destinations`). Their outages are only
reported: the refused messages themselves wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass

from .. import conf
from ..brokers import get_broker
from ..errors import DestinationUnavailable
from ..models import claiming
from ..runtime.breaker import Breaker
from ..runtime.per_process import PerProcess

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


#: Messages in a trial after a refusal.
FIRST_TRIAL = 10
#: Seconds of the first pause.
FIRST_PAUSE = 0.5
#: Seconds without a refusal after which an idle destination is no longer paused: one
#: that hovers about its limit is one outage, not many.
SETTLED = 5.0
#: Seconds until a destination without waiting messages is checked again.
IDLE = 1.0


class Trial:
    """A trial of a paused destination: one lane sends at most `limit` messages."""

    def __init__(self, destination: str, breaker: Breaker) -> None:
        self.destination, self.breaker = destination, breaker
        self.limit = FIRST_TRIAL
        self.taken = False
        self.refused_at = time.monotonic()
        #: Whether the whole last trial was stored.
        self.passed = False

    @property
    def remaining(self) -> float | None:
        """Seconds until the trial is due; None while a lane is running the trial."""
        return None if self.taken else self.breaker.remaining


class Pauses:
    """The paused destinations of one broker, for the lanes of one database."""

    def __init__(self, broker: str) -> None:
        self._broker = broker
        self._lock = threading.Lock()
        self._trials: dict[str, Trial] = {}

    def held(self) -> AbstractSet[str]:
        """Return the paused destinations."""
        if not self._trials or self._only_reports:
            return frozenset()
        with self._lock:
            return frozenset(self._trials)

    @property
    def errors(self) -> dict[str, BaseException]:
        """The paused destinations, as "DESTINATION on BROKER", each with the error that
        caused its pause."""
        with self._lock:
            return {
                one.breaker.name: one.breaker.error
                for one in self._trials.values()
                if one.breaker.error is not None and not one.passed
            }

    def next_trial(self) -> float | None:
        """Return the seconds until a lane can start the next trial, if any."""
        if not self._trials or self._only_reports:
            return None
        with self._lock:
            due = [one.remaining for one in self._trials.values()]
        return min((one for one in due if one is not None), default=None)

    def refused(
        self, destination: str, error: DestinationUnavailable, *, progress: bool
    ) -> None:
        """Pause a destination. Pass `progress` if the broker has stored other messages
        of the same batch there. The pause is then short."""
        with self._lock:
            trial = self._trials.get(destination)
            if trial is None:
                breaker = Breaker(
                    f"{destination} on {self._broker}",
                    conf.get().RELAY.BREAKER_MAX_PAUSE,
                    kind="destination",
                    first_pause=FIRST_PAUSE,
                )
                trial = self._trials[destination] = Trial(destination, breaker)
            trial.limit, trial.passed = FIRST_TRIAL, False
            trial.refused_at = time.monotonic()
        trial.breaker.failed(error, progress=progress)

    def begin_trial(self) -> Trial | None:
        """Start the trial of a destination whose pause has ended. The caller must then
        call `end_trial()`. Returns None if no trial is due."""
        if not self._trials:
            return None
        if self._only_reports:
            self._end_reports()
            return None
        with self._lock:
            for trial in self._trials.values():
                if trial.remaining == 0:
                    trial.taken = True
                    return trial
        return None

    @property
    def _only_reports(self) -> bool:
        return not get_broker(self._broker).pauses_destinations

    def _end_reports(self) -> None:
        """End the outages of destinations that have refused no message for longer than
        refused messages wait."""
        patience = 2 * conf.get().RELAY.BREAKER_MAX_PAUSE
        with self._lock:
            trials = list(self._trials.values())
            over = [t for t in trials if time.monotonic() - t.refused_at > patience]
            for trial in over:
                del self._trials[trial.destination]
        for trial in over:
            trial.breaker.worked()

    def end_trial(
        self, trial: Trial, claimed: int | None, enough: int, *, whole: bool = True
    ) -> None:
        """End a trial. `claimed` is the number of messages in the trial, or None if the
        trial did not finish. The pause ends when the broker has stored a trial of at
        least `enough` messages, or when the broker's last refusal is some time ago.
        With whole=False, due messages were left out, so the pause does not end without
        any message."""
        over = False
        with self._lock:
            trial.taken = False
            if claimed is None or trial.breaker.remaining:
                return  # refused again, or the broker has gone
            settled = time.monotonic() - trial.refused_at >= SETTLED
            trial.passed |= claimed > 0
            if claimed >= trial.limit:
                over = trial.limit >= enough
                trial.limit *= 2
            elif settled and (whole or claimed):
                over = True
            elif not claimed:
                trial.breaker.rest(IDLE)
            if over:
                del self._trials[trial.destination]
        if over and trial.passed:
            trial.breaker.worked()


#: The pauses shared by all lanes of this process, by database alias and broker.
pauses: PerProcess[Pauses] = PerProcess(lambda using, broker: Pauses(broker))
