"""Limits after which `consume` drains and ends, so that its supervisor restarts it:
against memory leaks, in a handler or in a library."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger("django_txmsg.consumer")

MIB = 2**20


class Allowance:
    """Calls `stop` after `max_messages` deliveries or above `max_memory` MiB; 0: no
    limit. Shared by the threads of a process."""

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
        """Count a settled delivery."""
        with self._lock:
            self._spent += 1
        if self._max_messages and self._spent >= self._max_messages:
            self._end(f"{self._max_messages} deliveries are handled")

    def look(self) -> None:
        """Check the memory. Not before the first message: a process that ended without
        processing any would be restarted for ever."""
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
    """Return the MiB of memory that this process uses; its peak, if the system reports
    nothing better."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (MIB if sys.platform == "darwin" else 1024)
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB
