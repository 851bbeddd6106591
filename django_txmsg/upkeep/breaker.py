"""Keeps all hops away from a server that is down: one log line, then growing pauses.

One for each broker that a relay, a dispatcher, a channel or a consumer talks to, and
one for each database of the process (`outage.py`).
"""

from __future__ import annotations

import logging
import random
import threading
import time

log = logging.getLogger("django_txmsg.breaker")

#: Seconds before a subscription is tried again that the broker refused. Somebody has to
#: allow it first, and on RabbitMQ a refusal ends the connection: each try makes one.
AFTER_REFUSAL = 1.0


class Breaker:
    """Keeps away from a server that is down, and probes it with growing pauses.

    `kind` and `name` say to the reader of the log which one it is, `follows` what an
    outage of it means. `first_pause` and `max_pause` are seconds.
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
        self._name, self._max_pause = f"{kind} {name!r}", max_pause
        self._follows, self._first_pause = follows, first_pause
        self._lock = threading.Lock()
        #: Held while connecting, by those who share this breaker: a server that has
        #: come back is not stormed.
        self.connecting = threading.Lock()
        self._failures = 0
        self._until = 0.0
        #: What went wrong last, while the server is down.
        self.error: BaseException | None = None

    @property
    def remaining(self) -> float:
        """Seconds until the next probe; 0 when the server may be asked."""
        return max(0.0, self._until - time.monotonic())

    def failed(self, error: BaseException) -> None:
        """Note that the server is down: one log line an outage, then silence."""
        with self._lock:
            self.error = error
            if self.remaining:
                return  # another thread has met the same outage
            self._failures += 1
            pause = self._first_pause * 2 ** min(self._failures - 1, 20)
            pause = min(self._max_pause, pause)
            self._until = time.monotonic() + pause * random.uniform(0.75, 1.25)  # noqa: S311 - jitter
            first = self._failures == 1
        if first:
            log.warning("%s cannot be used; %s: %s", self._name, self._follows, error)

    def worked(self) -> None:
        """Note that the server answers again."""
        if self._failures:
            with self._lock:
                failures, self._failures, self._until = self._failures, 0, 0.0
                self.error = None
            log.info("%s works again, after %d probes", self._name, failures)
