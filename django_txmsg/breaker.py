"""Keeps hop 4 away from a broker that is down: one log line, then growing pauses.

Used by the relay, by the dispatcher and by the control messages of HTTP requests.
"""

from __future__ import annotations

import logging
import random
import threading
import time

log = logging.getLogger("django_txmsg.breaker")


class Breaker:
    """Keeps away from a broker that is down, and probes it with growing pauses."""

    def __init__(self, name: str, max_pause: float) -> None:
        self._name, self._max_pause = name, max_pause
        self._lock = threading.Lock()
        #: Held while connecting, by those who share this breaker: a broker that has
        #: come back is not stormed.
        self.connecting = threading.Lock()
        self._failures = 0
        self._until = 0.0
        #: What went wrong last, while the broker is down.
        self.error: BaseException | None = None

    @property
    def remaining(self) -> float:
        """Seconds until the next probe; 0 when the broker may be asked."""
        return max(0.0, self._until - time.monotonic())

    def failed(self, error: BaseException) -> None:
        """Note that the broker is down: one log line an outage, then silence."""
        with self._lock:
            self._failures += 1
            self.error = error
            pause = min(self._max_pause, 0.2 * 2 ** min(self._failures - 1, 20))
            self._until = time.monotonic() + pause * random.uniform(0.75, 1.25)  # noqa: S311 - jitter
            first = self._failures == 1
        if first:
            log.warning(
                "broker %r cannot be used; its messages wait in the outbox and "
                "count no attempt: %s",
                self._name,
                error,
            )

    def worked(self) -> None:
        """Note that the broker answers again."""
        if self._failures:
            with self._lock:
                failures, self._failures, self._until = self._failures, 0, 0.0
                self.error = None
            log.info("broker %r works again, after %d probes", self._name, failures)
