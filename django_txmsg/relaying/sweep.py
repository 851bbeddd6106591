"""Hop 3's scan of the table: a busy lane starts its search where the last one ended.

Settled rows leave dead index entries behind, which cannot be removed while an old
snapshot is open anywhere. See docs/decisions/dispatch-floor-and-sweep.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..models.outbox_claim import Claimed

Claim = Callable[[str | None], list[Claimed]]


class Sweep:
    """The place at which one lane's next search may begin."""

    #: The share of a busy lane's time that may be spent on looking for late commits.
    SHARE = 0.05

    def __init__(self) -> None:
        self._floor: str | None = None
        self._swept_at = self._cost = 0.0

    def rewind(self) -> None:
        """Start from the beginning next time: there is more to claim."""
        self._floor = None

    def claim(self, claim: Claim) -> list[Claimed]:
        """Claim from where the last search ended; from the beginning if that finds
        nothing, or if enough time has passed."""
        began = time.monotonic()
        due = began - self._swept_at >= max(1.0, self._cost / self.SHARE)
        claimed = claim(self._floor) if self._floor and not due else []
        if not claimed:
            began = time.monotonic()
            claimed = claim(None)
            self._swept_at = time.monotonic()
            self._cost = self._swept_at - began
            if not claimed:
                self._floor = None
        if claimed:
            # Texts of one database sort like their instants, except after a change of
            # its clock's zone, which the next sweep corrects.
            first = claimed[0].floor
            self._floor = max(self._floor, first) if self._floor else first
        return claimed
