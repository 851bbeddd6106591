"""Whoever holds rows under a lease keeps it for as long as the work on them takes.

A lease is short, so that what a killed process held is soon free again; a slow broker
or handler must not lose it for that. One thread of a process renews what has half run
out, and ends when nothing is held any more.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from django.db import connections

log = logging.getLogger("django_txmsg.leases")

#: Seconds without a lease after which the thread ends; most holders come back soon.
IDLE = 10.0


class Lease:
    """What one worker holds; renewed inside the `with` block.

    `renew` prolongs it to `seconds` from now, in one statement fenced by its token. It
    is called in another thread, and only when the work takes longer than usual.
    """

    def __init__(self, using: str, seconds: float, renew: Callable[[], object]) -> None:
        self.using, self.seconds, self._renew = using, seconds, renew
        self._until = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until it ends, as far as this process knows; never negative."""
        return max(0.0, self._until - time.monotonic())

    def renew(self) -> None:
        """Prolong it, if the database can be asked."""
        until = time.monotonic() + self.seconds
        try:
            self._renew()
        except Exception as error:
            # Whatever it was: the thread has the leases of others to renew.
            log.warning("a lease cannot be renewed: %s", error)
        else:
            self._until = until

    def __enter__(self) -> Lease:
        _keeper.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        _keeper.remove(self)


class _Keeper:
    """The thread that renews the leases of a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: set[Lease] = set()
        self._running = False
        self._short = threading.Event()

    def add(self, lease: Lease) -> None:
        with self._lock:
            self._held.add(lease)
            if not self._running:
                thread = threading.Thread(
                    target=self._run, name="txmsg-leases", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError as error:
                    # At the end of a process: the lease lasts as long as it lasts.
                    log.debug("leases are not renewed: %s", error)
                else:
                    self._running = True
        if lease.seconds < 4:
            self._short.set()

    def remove(self, lease: Lease) -> None:
        with self._lock:
            self._held.discard(lease)

    def _run(self) -> None:
        idle_since = time.monotonic()
        while True:
            with self._lock:
                held = list(self._held)
                if held:
                    idle_since = time.monotonic()
                elif time.monotonic() - idle_since > IDLE:
                    self._running = False
                    return
            due = [lease for lease in held if lease.left < lease.seconds / 2]
            for lease in due:
                lease.renew()
            for using in {lease.using for lease in due}:
                connections[using].close()
            self._short.wait(min([1.0, *(lease.seconds / 4 for lease in held)]))
            self._short.clear()


def _forget() -> None:
    """Threads do not survive a fork, and a child holds nothing."""
    global _keeper
    _keeper = _Keeper()


_keeper = _Keeper()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
