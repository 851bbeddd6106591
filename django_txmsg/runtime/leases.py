"""Renews leases while their holders work.

A lease is short, so that other workers can soon claim the rows of a killed process. But
the lease must not expire because a broker or a handler is slow. So a thread renews each
lease when half of its time has passed. Each database has its own thread, so that a
database that does not answer cannot delay the renewals in the others. A thread ends
when it has no more leases.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from django.db import connections

from . import database_health
from .per_process import PerProcess
from .thread_group import start_daemon

log = logging.getLogger("django_txmsg.leases")

#: Seconds without a lease after which the thread ends; most holders soon need another.
IDLE = 10.0


class Lease:
    """The lease of one worker. The lease is renewed while the `with` block runs, or
    from `begin()` to `end()`.

    The function `renew` must extend the lease to `seconds` from now, in one statement
    that checks the lease's fencing token. Another thread calls this function when half
    of the lease's time has passed. The lease began with the claim of the rows; `since`
    is the value of `time.monotonic()` just before that claim.
    """

    def __init__(
        self,
        using: str,
        seconds: float,
        renew: Callable[[], object],
        *,
        since: float,
    ) -> None:
        self.using, self.seconds, self._renew = using, seconds, renew
        self._until = since + seconds
        self._lapsed = False

    @property
    def lapsed(self) -> bool:
        """Whether the lease has ever expired, for example while the process was
        suspended. If so, another worker may have claimed the rows, even if the lease
        was renewed later."""
        return self._lapsed or not self.left

    @property
    def left(self) -> float:
        """Seconds until the lease expires, according to this process's clock; never
        negative."""
        return max(0.0, self._until - time.monotonic())

    def renew(self) -> None:
        """Extend the lease, if the database can be used."""
        if not database_health.usable(self.using):
            return
        until = time.monotonic() + self.seconds
        try:
            self._renew()
        except Exception as error:
            # Any error: the thread has other leases to renew.
            database_health.note(self.using, error)
            database_health.report("a lease cannot be renewed", error)
        else:
            self._lapsed = self.lapsed
            self._until = until

    def begin(self) -> None:
        """Begin to renew the lease."""
        _keeper(self.using).add(self)

    def end(self) -> None:
        """Stop renewing the lease."""
        _keeper(self.using).remove(self)

    def __enter__(self) -> Lease:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class _Keeper:
    """The thread that renews the leases of a process in one database."""

    def __init__(self, using: str) -> None:
        self._using = using
        self._lock = threading.Lock()
        self._held: set[Lease] = set()
        self._running = False
        self._short = threading.Event()

    def add(self, lease: Lease) -> None:
        """Add a lease to renew."""
        with self._lock:
            self._held.add(lease)
            if not self._running:
                try:
                    start_daemon(f"txmsg-leases-{self._using}", self._run)
                except RuntimeError as error:
                    # At the end of a process no thread starts: the lease lasts until
                    # its end.
                    log.debug("leases are not renewed: %s", error)
                else:
                    self._running = True
        if lease.seconds < 4:
            self._short.set()

    def remove(self, lease: Lease) -> None:
        """Remove a lease."""
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
            due = [lease.renew for lease in held if lease.left < lease.seconds / 2]
            for step in [*due, connections[self._using].close] if due else []:
                try:
                    step()
                except Exception as error:
                    # Any error: without this thread, no lease would be renewed.
                    database_health.report("a lease cannot be renewed", error)
            self._short.wait(min([1.0, *(lease.seconds / 4 for lease in held)]))
            self._short.clear()


_keeper = PerProcess(_Keeper)
