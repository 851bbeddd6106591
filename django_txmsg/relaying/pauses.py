"""Hop 3's pauses: destinations that take no messages now, and the trials that end them.

A full queue or a missing permission is the state of a destination, and not the fault of
a message. All lanes of this process that relay from one database to one broker leave
such a destination out of their claims. When its pause ends, one lane tries it with a
small batch, and with a larger one each time all of it was stored.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Set as AbstractSet

from .. import conf
from ..errors import DestinationUnavailable
from ..runtime.breaker import Breaker

#: Messages of a trial after a refusal.
FIRST_TRIAL = 10
#: Seconds of the first pause.
FIRST_PAUSE = 0.5
#: Seconds without a refusal after which a destination to which nothing waits is paused
#: no longer: one that hovers about its limit is one outage, and not many.
SETTLED = 5.0
#: Seconds until a destination is looked at again to which nothing waited.
IDLE = 1.0


class Trial:
    """One lane's turn to try a destination, with at most `limit` messages."""

    def __init__(self, destination: str, breaker: Breaker) -> None:
        self.destination, self.breaker = destination, breaker
        self.limit = FIRST_TRIAL
        self.taken = False
        self.refused_at = time.monotonic()
        #: Whether all of the last trial was stored.
        self.passed = False

    @property
    def remaining(self) -> float | None:
        """Seconds until it is due; None while a lane has it."""
        return None if self.taken else self.breaker.remaining


class Pauses:
    """The paused destinations of one broker, for one database."""

    def __init__(self, broker: str) -> None:
        self._broker = broker
        self._lock = threading.Lock()
        self._trials: dict[str, Trial] = {}

    def held(self) -> AbstractSet[str]:
        """Return the destinations whose messages leave by trials only."""
        if not self._trials:
            return frozenset()
        with self._lock:
            return frozenset(self._trials)

    @property
    def errors(self) -> dict[str, BaseException]:
        """Why each of them takes nothing, by the names of the outages."""
        with self._lock:
            return {
                one.breaker.name: one.breaker.error
                for one in self._trials.values()
                if one.breaker.error is not None and not one.passed
            }

    def next_trial(self) -> float | None:
        """Return the seconds until a lane can begin the next trial, if any."""
        if not self._trials:
            return None
        with self._lock:
            due = [one.remaining for one in self._trials.values()]
        return min((one for one in due if one is not None), default=None)

    def refused(
        self, destination: str, error: DestinationUnavailable, *, progress: bool
    ) -> None:
        """Pause a destination. `progress` says that it took other messages of the same
        batch: the pause is a short one then."""
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
        """Take the turn of a destination whose pause has ended; `end_trial()` gives it
        back."""
        if not self._trials:
            return None
        with self._lock:
            for trial in self._trials.values():
                if trial.remaining == 0:
                    trial.taken = True
                    return trial
        return None

    def end_trial(self, trial: Trial, claimed: int | None, enough: int) -> None:
        """Note how many messages a trial has found; None where it came to no end. The
        outage is over when `enough` messages were stored at once."""
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
            elif settled:
                over = True
            elif not claimed:
                trial.breaker.rest(IDLE)
            if over:
                del self._trials[trial.destination]
        if over and trial.passed:
            trial.breaker.worked()

    def forget(self) -> None:
        """Pause nothing any more."""
        self._lock = threading.Lock()
        self._trials = {}


def of(using: str, broker: str) -> Pauses:
    """Return what all lanes of this process know."""
    with _lock:
        if (using, broker) not in _pauses:
            _pauses[using, broker] = Pauses(broker)
        return _pauses[using, broker]


def forget() -> None:
    """Pause nothing any more: a child process finds out for itself."""
    global _lock
    _lock = threading.Lock()
    for one in _pauses.values():
        one.forget()
    _pauses.clear()


_pauses: dict[tuple[str, str], Pauses] = {}
_lock = threading.Lock()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget)
