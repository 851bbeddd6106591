"""Hop 6 on AMQP: which deliveries the broker still waits for, and when it is told.

A busy consumer acknowledges in groups: what a crash costs is duplicates. A slow one at
once: RabbitMQ hangs up on who keeps a delivery for too long.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

from . import frames

#: Seconds for which acknowledgements are gathered at most.
LONGEST_GROUP = 1.0


class Acknowledgements:
    """The ledger of one channel's deliveries, by their tags."""

    def __init__(self, channel: int) -> None:
        self._channel = channel
        #: Tags that are not acknowledged, in their order -> whether they are to be.
        self._open: dict[int, bool] = {}
        self._gathered = 0
        self._told_at = time.monotonic()

    def delivered(self, tag: int) -> None:
        """Note a delivery."""
        self._open[tag] = False

    def unanswered(self, tags: Iterable[int]) -> list[int]:
        """Return those of the tags that nobody has acknowledged, not here either."""
        return [tag for tag in tags if self._open.get(tag) is False]

    def gather(self, tags: Collection[int], *, prefetch: int) -> bool:
        """Note deliveries as to be acknowledged. Returns whether it is time to tell the
        broker, which sends `prefetch` ahead."""
        for tag in tags:
            self._open[tag] = True
        self._gathered += len(tags)
        slow = time.monotonic() - self._told_at > LONGEST_GROUP
        return slow or self._gathered * 2 >= prefetch

    def written(self) -> bytearray:
        """Return the frames for all that is to be acknowledged, which are written next:
        one frame as far as nothing is open."""
        self._told_at = time.monotonic()
        made, upto, whole = bytearray(), 0, True
        if not self._gathered:
            return made
        for tag, wanted in list(self._open.items()):
            whole = whole and wanted
            if not wanted:
                continue
            del self._open[tag]
            if whole:
                upto = tag
            else:
                made += frames.acknowledged(tag, self._channel)
        if upto:
            made[:0] = frames.acknowledged(upto, self._channel, multiple=True)
        self._gathered = 0
        return made

    def settle(self, tags: Iterable[int]) -> None:
        """Note that the broker has been told of these in another way."""
        for tag in tags:
            self._open.pop(tag, None)
