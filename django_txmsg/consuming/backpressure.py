"""Hop 6 in order: limits how many messages wait at an ordered stage.

At a limit the stage stops receiving, so that a blocked key does not fill the database.
It still receives a message now and then, which may be the one that others wait for.
"""

from __future__ import annotations

import logging
import math
import threading
import time

from .. import conf
from ..brokers.base import Delivery
from ..models import InboxMessage, StageState
from ..stages import Stage
from .arrival import Outcome, Waiting

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
    """The limit of one ordered stage, shared by its threads."""

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
        """Return whether the stage may receive: only one message, if it is full."""
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
        """Count one more waiting message."""
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
        """Count the waiting messages, if the last count is old enough, and record in
        the database whether the stage is full."""
        if self._most == self._most_bytes == math.inf:
            return
        began = time.monotonic()
        if began < self._look_at:
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
