"""For hops 5 and 6 on `database://`: limits the size of all bodies that the sessions of
one process have claimed.

A claim copies a body several times, so only one session at a time claims large bodies.
The other sessions go on claiming small bodies, because a handler may need an hour for a
large body.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .per_process import Members, PerProcess

#: More bytes than any body has.
UNLIMITED = 2**62
#: Seconds of large bodies without a break, after which no more are claimed until all
#: are settled: a body larger than the limit can only be claimed then.
PATIENCE = 5.0


@dataclass(frozen=True, slots=True)
class Room:
    """The limit of one claim: bodies of `total` bytes together, or a single body of at
    most `alone` bytes."""

    total: int
    alone: int

    @property
    def complete(self) -> bool:
        """Whether a single body of any size may be claimed."""
        return self.alone == UNLIMITED

    @property
    def largest(self) -> int:
        """The size of the largest body that the claim may load."""
        return max(self.total, self.alone)


class Share:
    """One session's share of the process's limit."""

    def __init__(self) -> None:
        #: Bytes of its deliveries that are not settled.
        self.held = 0
        _claims().members.add(self)

    @contextmanager
    def claim(self, limit: int, wait: float) -> Iterator[Room]:
        """Yield the limit of what the block may claim. `limit` is the largest number of
        bytes for all sessions of the process together. Waits up to `wait` seconds for
        another session's claim to end.

        The block must increase `held` by the number of bytes that it has claimed.
        """
        claims = _claims()
        alone = not self.held and claims.large.acquire(timeout=wait)
        try:
            yield claims.room(self, limit, alone=alone)
        finally:
            if alone:
                claims.large.release()

    def leave(self) -> None:
        """Give up this session's share, so that other sessions can use it."""
        self.held = 0
        _claims().members.discard(self)


class _Claims:
    """The shares of all sessions of a process."""

    def __init__(self) -> None:
        self.members: Members[Share] = Members()
        #: Held by a session while it claims, if the claim may find a large body.
        self.large = threading.Lock()
        #: Since when there has always been a large body.
        self._crowded: float | None = None

    def room(self, share: Share, limit: int, *, alone: bool) -> Room:
        members = self.members.all()
        part = limit // max(1, len(members))
        total = max(0, part - share.held)
        if not alone:
            return Room(total, 0)
        large = sum(one.held for one in members if one.held > part)
        if not large:
            self._crowded = None
            return Room(total, UNLIMITED)
        now = time.monotonic()
        self._crowded = now if self._crowded is None else self._crowded
        patient = now - self._crowded < PATIENCE
        return Room(total, max(0, limit - large) if patient else 0)


_claims = PerProcess(_Claims)
