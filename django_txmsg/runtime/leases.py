"""Renews leases while their holders work.

A lease is short, so that other workers can soon claim the rows of a killed process. But
the lease must not expire because a broker or a handler is slow. So a thread renews each
lease when half of its time has passed. Each database has its own thread, so that a
database that does not answer cannot delay the renewals in the others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from django.db import connections

from . import database_health
from .per_process import PerProcess
from .thread_group import Watch

log = logging.getLogger("django_txmsg.leases")

#: Seconds after which a renewal counts as hanging.
HANGS = 5.0


def _suspended() -> float:
    """Return the seconds for which this machine has been suspended since it booted:
    `time.monotonic()` does not count them. Only Linux has a clock that does."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return 0.0 if clock is None else time.clock_gettime(clock) - time.monotonic()


class Lease:
    """The lease of one worker. The lease is renewed while the `with` block runs, or
    from `begin()` to `end()`.

    The function `renew` must extend the lease to `seconds` from now, in one statement
    that checks the lease's fencing token. It returns False if it could not extend the
    lease of all rows. Another thread calls this function when half of the lease's time
    has passed. The lease began with the claim of the rows; `since`
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
        self._until = since + seconds + _suspended()
        #: When to renew it, or to try that again.
        self.due = since + seconds / 2
        self._lapsed = False
        self._renewing = threading.Lock()
        #: Whether the worker waits for a renewal to end, or no renewal may begin.
        self._paused = False

    @property
    def lapsed(self) -> bool:
        """Whether the lease has ever expired, for example while the process or the
        machine was suspended, or was renewed for only some of the rows. If so, another
        worker may have claimed rows, even if their lease was renewed later."""
        return self._lapsed or not self.left

    @property
    def left(self) -> float:
        """Seconds until the lease expires, according to this process's clock; never
        negative."""
        return max(0.0, self._until - time.monotonic() - _suspended())

    def renew(self) -> None:
        """Extend the lease, if the database can be used."""
        self.due = time.monotonic() + min(1.0, self.seconds / 4)
        if self._paused or not database_health.usable(self.using):
            return
        # Without waiting: its worker's statement may hang, and the thread has other
        # leases to renew.
        if not self._renewing.acquire(blocking=False):
            return
        until, suspended = time.monotonic() + self.seconds, _suspended()
        try:
            try:
                whole = self._renew() is not False
            finally:
                self._renewing.release()
        except Exception as error:
            # Any error: the thread has other leases to renew.
            database_health.note(self.using, error)
            database_health.report("a lease cannot be renewed", error)
        else:
            self._lapsed = self.lapsed or not whole
            self._until, self.due = until + suspended, until - self.seconds / 2

    @contextmanager
    def between_renewals(self) -> Iterator[None]:
        """Surround a statement that skips locked rows: during the block, no renewal
        locks the rows. But do not wait longer than HANGS for a renewal to end."""
        # A renewal that takes long is due again at once: it must not begin first.
        self._paused = True
        held = self._renewing.acquire(timeout=HANGS)
        try:
            yield
        finally:
            self._paused = False
            if held:
                self._renewing.release()

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


def _renew(using: str, leases: list[Lease]) -> None:
    for step in [*(one.renew for one in leases), connections[using].close]:
        try:
            step()
        except Exception as error:
            # Any error: without this thread, no lease would be renewed.
            database_health.report("a lease cannot be renewed", error)


def _begin(using: str) -> Watch[Lease]:
    # Without a thread, a lease lasts until its end.
    refused = partial(log.debug, "leases are not renewed: %s")
    return Watch(f"txmsg-leases-{using}", partial(_renew, using), refused)


_keeper = PerProcess(_begin)
