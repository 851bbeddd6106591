"""Hop 6's limits: for a stage that fails repeatedly, for the messages that wait at an
ordered stage, and for the memory and the number of messages of a process."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .. import conf
from ..brokers.base import Delivery
from ..envelope.redelivery import Dead, RedeliverAfter
from ..models import InboxMessage, StageState
from ..runtime import liveness
from ..stages import Stage
from .arrival import Outcome, Processed, Waiting

# Hop 6's throttle: a stage that fails repeatedly processes one message at a time.

_throttle_log = logging.getLogger("django_txmsg.throttle")


class Throttle:
    """Slows down a failing stage. After `after` failures in a row, only one thread of
    the stage at a time processes a message. The first success ends the throttling. All
    threads of a stage in this process share a throttle."""

    def __init__(self, after: int) -> None:
        self._after = after
        self._failures = 0
        self._one_at_a_time = threading.Lock()

    @property
    def on(self) -> bool:
        """Whether the stage is throttled now."""
        return bool(self._after) and self._failures >= self._after

    def note(self, outcome: Outcome) -> None:
        """Count an outcome: a failure, or a success that ends the throttling."""
        if isinstance(outcome, RedeliverAfter | Dead):
            self._failures += 1
            if self._failures == self._after:
                _throttle_log.warning(
                    "%d failures in a row: the stage processes one message at a time "
                    "until one succeeds",
                    self._after,
                )
        elif isinstance(outcome, Processed):
            self._failures = 0

    @contextmanager
    def turn(self, ends: Callable[[], bool]) -> Iterator[bool]:
        """Surround the processing of a message. While the stage is throttled, only one
        thread at a time enters the block. Yields whether the message may be processed:
        False if `ends` returns True, also while the thread waits."""
        entered = False
        while self.on and not entered and not ends():
            liveness.turned()
            entered = self._one_at_a_time.acquire(timeout=0.5)
        try:
            yield not ends()
        finally:
            if entered:
                self._one_at_a_time.release()


# Hop 6 in order: limits how many messages wait at an ordered stage.
#
# At a limit the stage stops receiving, so that a blocked key does not fill the
# database. It still receives a message now and then, which may be the one that others
# wait for.

log = logging.getLogger("django_txmsg.consumer")

#: Two counts are at least LOOK seconds apart, and at least SHARE times as long as a
#: count takes: counting a million rows takes a while.
LOOK, SHARE = 5.0, 100
#: The share of the limit below which a full stage receives again.
ENOUGH = 0.9
#: Seconds until a full stage receives a single message, at first and at most; doubled
#: each time.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0


class Room:
    """Limits how many messages may wait at one ordered stage. The stage's threads in
    this process share this object."""

    def __init__(self, stage: Stage) -> None:
        settings = conf.get()
        self._stage, self._using = stage.name, stage.definition.using
        self._most = settings.ORDER_MAX_WAITING or math.inf
        self._most_bytes = settings.ORDER_MAX_BYTES or math.inf
        self._lock = threading.Lock()
        #: The last count, and the messages that this process has parked since.
        self._count, self._bytes = 0, 0
        self._look_at = 0.0
        self._reported: bool | None = None
        self._pause, self._next_at = FIRST_PAUSE, 0.0
        self.full = False

    def admits(self) -> bool:
        """Return whether a thread of the stage may receive a message now. While the
        stage is full, this returns True only at growing intervals."""
        if not self.full:
            return True
        with self._lock:
            now = time.monotonic()
            if now < self._next_at:
                return False
            self._next_at = now + self._pause
            self._pause = min(LONGEST_PAUSE, 2 * self._pause)
            return True

    def note(self, delivery: Delivery, outcome: Outcome) -> None:
        """Count a delivery as waiting if its message was parked behind its
        predecessor."""
        if not isinstance(outcome, Waiting):
            return
        size = len(delivery.body) + sum(
            len(name) + len(value) for name, value in delivery.headers.items()
        )
        with self._lock:
            self._count += 1
            self._bytes += size
            if not self.full and self._fills():
                self._fill()
                self._look_at = 0.0  # some may have gone since the last look

    def look(self) -> None:
        """Count the waiting messages again, unless the last count is recent. Records in
        the database whether the stage is full."""
        began = time.monotonic()
        if began < self._look_at or self._most == self._most_bytes == math.inf:
            return
        rows = InboxMessage.order.db_manager(self._using)
        cap = None if self._most == math.inf else int(self._most)
        count, size = rows.waiting(self._stage, cap)
        took = time.monotonic() - began
        with self._lock:
            self._count, self._bytes = count, size
            self._look_at = began + max(LOOK, SHARE * took)
            if not self.full and self._fills():
                self._fill()
            elif self.full and not self._fills(ENOUGH):
                self.full = False
                log.info("ordered stage %r receives again", self._stage)
            full = self.full
        if self._reported is not full:
            StageState.objects.db_manager(self._using).full(self._stage, full)
            self._reported = full

    def _fills(self, share: float = 1.0) -> bool:
        return (
            self._count >= share * self._most or self._bytes >= share * self._most_bytes
        )

    def _fill(self) -> None:
        self.full = True
        self._pause = FIRST_PAUSE
        self._next_at = time.monotonic() + self._pause
        log.warning(
            "ordered stage %r stops receiving: %d messages of %d bytes wait for the "
            'ones before them, and TXMSG["ORDER_MAX_WAITING"] or '
            '["ORDER_MAX_BYTES"] allows no more',
            self._stage,
            self._count,
            self._bytes,
        )


# Limits after which `consume` drains and ends, so that its supervisor restarts it:
# against memory leaks, in a handler or in a library.


MIB = 2**20


class Allowance:
    """Calls `stop` when the process has handled `max_messages` deliveries or uses more
    than `max_memory` MiB. 0 means no limit. The threads of a process share this
    object."""

    def __init__(
        self, max_messages: int, max_memory: float, stop: Callable[[], None]
    ) -> None:
        self._max_messages, self._max_memory = max_messages, max_memory
        self._stop = stop
        self._lock = threading.Lock()
        self._spent = 0
        #: Why the process ends, if it does because of a limit.
        self.over = ""

    def spend(self) -> None:
        """Count one handled delivery."""
        with self._lock:
            self._spent += 1
        if self._max_messages and self._spent >= self._max_messages:
            self._end(f"{self._max_messages} deliveries are handled")

    def look(self) -> None:
        """Check the memory, but only after the first message: a process that ended
        before its first message would be restarted for ever."""
        if self._max_memory and self._spent:
            used = resident()
            if used > self._max_memory:
                self._end(f"{used:.0f} MiB of memory, limit {self._max_memory:g}")

    def _end(self, why: str) -> None:
        if not self.over:
            self.over = why
            log.info("draining before the process ends: %s", why)
            self._stop()


def resident() -> float:
    """Return how many MiB of memory this process uses. Some systems report only the
    peak."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (MIB if sys.platform == "darwin" else 1024)
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB
