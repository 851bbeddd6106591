"""Circuit breaker for all hops: one log line when a server is down, then growing pauses
between probes.

Each relay, dispatcher, control connection and consumer has a circuit breaker for each
broker that it uses. The process has one for each database (`database_health.py`).
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from dataclasses import dataclass

from ..envelope.failure import stored_text
from ..errors import DispatchUnknown
from .per_process import Members, PerProcess

log = logging.getLogger("django_txmsg.breaker")

#: Seconds before a refused subscription is tried again. An operator has to permit it
#: first, and on RabbitMQ a refusal ends the connection, so that each try needs a new
#: one.
AFTER_REFUSAL = 1.0


#: Shortest pause, in seconds, after which a line says that an outage goes on.
SAY_AGAIN = 1.0

#: Seconds after which a failure is forgotten if sessions wait without an error. Its own
#: session may never ask again: the operator has paused the stage, for example.
QUIET = 60.0

#: The kind of a stage's subscription. The name is the stage's.
SUBSCRIPTION = "the subscription of stage"

#: Most characters stored of an error.
LONGEST = 500


@dataclass(frozen=True, slots=True)
class Outage:
    """A resource that cannot be used: its kind and name, how long it has been unusable,
    and the error."""

    kind: str
    name: str
    seconds: float
    error: str


class Breaker:
    """Remembers that a server is down, and when to probe it again, with growing pauses.

    `kind` and `name` identify the server in the log, and `follows` says what an outage
    means for the messages. `first_pause` and `max_pause` are seconds.
    """

    def __init__(
        self,
        name: str,
        max_pause: float,
        *,
        kind: str = "broker",
        follows: str = "its messages wait in the outbox and count no attempt",
        first_pause: float = 0.2,
    ) -> None:
        self.kind, self.name, self._max_pause = kind, name, max_pause
        self._follows, self._first_pause = follows, first_pause
        self._lock = threading.Lock()
        #: Held while connecting, by the users of this breaker: a server that has come
        #: back is not flooded.
        self.connecting = threading.Lock()
        self._failures = 0
        #: Whether the server has left a message without an answer in this outage.
        self._unanswered = False
        self._until = self._began = self._failed_at = 0.0
        #: Of the last outage that ended: its failures, its last pause, and when it
        #: ended.
        self._former, self._pause, self._ended = 0, 0.0, 0.0
        #: The last error, while the server is down.
        self.error: BaseException | None = None
        _breakers().add(self)

    @property
    def remaining(self) -> float:
        """Seconds until the next probe; 0 if the server may be used now."""
        return max(0.0, self._until - time.monotonic())

    @property
    def outage(self) -> Outage | None:
        """The current outage, or None."""
        error = self.error
        if error is None:
            return None
        seconds = time.monotonic() - self._began
        return Outage(self.kind, self.name, seconds, stored_text(error, LONGEST))

    def failed(self, error: BaseException, *, progress: bool = False) -> None:
        """Record that the server is down. Usually only the first failure of an outage
        is logged. With `progress`, the pauses start again with the shortest pause.

        If the server had worked again for a shorter time than the last pause, this
        failure continues the earlier outage. (On a full disk, for example, some writes
        succeed.) In this case, the log has already reported the end of the outage,
        which was too early. If the pauses have become long, another log line then
        reports that the outage continues.
        """
        with self._lock:
            self.error, self._failed_at = error, time.monotonic()
            cause = error.__cause__
            silent = isinstance(cause, DispatchUnknown) and not cause.hung_up
            self._unanswered |= silent
            if self.remaining:
                return  # another thread has reported this outage
            goes_on = not self._failures and (
                time.monotonic() - self._ended < self._pause
            )
            if goes_on:
                self._failures = self._former
            first = not self._failures
            if first:
                self._began = time.monotonic()
            self._failures = 1 if progress else self._failures + 1
            pause = self._first_pause * 2 ** min(self._failures - 1, 20)
            self._pause = pause = min(self._max_pause, pause)
            self._until = time.monotonic() + pause * random.uniform(0.75, 1.25)  # noqa: S311 - jitter
            goes_on &= pause >= min(SAY_AGAIN, self._max_pause)
        if first or goes_on:
            what = f"{self.kind} {self.name!r}"
            again = " after all" if goes_on else ""
            log.warning(
                "%s cannot be used%s; %s: %s", what, again, self._follows, error
            )

    def rest(self, seconds: float) -> None:
        """Postpone the next probe, without recording another failure."""
        with self._lock:
            self._until = time.monotonic() + seconds

    def worked(self, *, opened: float = math.inf) -> None:
        """Record that the server has answered, which ends an outage.

        If a session only waited, and neither sent nor received a message, `opened` must
        be the time at which the session was opened. If such a session was opened before
        the last failure, it proves nothing, because perhaps it has not used the server
        since that failure. The outage then ends only if no session has failed in the
        minute after the end of the pause. The same applies to every session that only
        waited if the server has left a message without an answer in this outage: a
        broker with a memory alarm, for example, still accepts sessions.
        """
        if not self._failures:
            return
        with self._lock:
            failures = self._failures
            proves = opened == math.inf or not self._unanswered
            asked = proves and opened > self._failed_at
            quiet = time.monotonic() - max(self._until, self._failed_at)
            if not failures or not (asked or quiet > QUIET):
                return
            self._failures, self._until, self._unanswered = 0, 0.0, False
            self._former, self._ended = failures, time.monotonic()
            self.error = None
        what = f"{self.kind} {self.name!r}"
        state = "works again" if asked else "has not failed for a minute"
        log.info("%s %s, after %d probes", what, state, failures)

    def forget(self) -> None:
        """Report no outage any more, because nothing uses the server through this
        breaker."""
        _breakers().discard(self)


_breakers: PerProcess[Members[Breaker]] = PerProcess(Members)


def outages() -> list[Outage]:
    """Return the outages that this process has recorded: of brokers, paused
    destinations, refused subscriptions and databases. Each resource is listed once, the
    longest outage first."""
    found: dict[tuple[str, str], Outage] = {}
    for one in sorted(
        filter(None, (breaker.outage for breaker in _breakers().all())),
        key=lambda outage: -outage.seconds,
    ):
        found.setdefault((one.kind, one.name), one)
    return list(found.values())
