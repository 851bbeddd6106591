"""Hop 6 on AMQP: unacknowledged deliveries, and when their acknowledgements are sent.

A busy consumer acknowledges in groups: a crash costs duplicates. A slow one
acknowledges at once: RabbitMQ closes the connection of a consumer that holds a delivery
for too long.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

from . import frames

#: Longest time, in seconds, for which acknowledgements are gathered.
LONGEST_GROUP = 1.0


class Acknowledgements:
    """The deliveries of one channel, by their tags."""

    def __init__(self, channel: int) -> None:
        self._channel = channel
        #: Tags of unacknowledged deliveries in order -> whether to acknowledge them.
        self._open: dict[int, bool] = {}
        self._gathered = 0
        self._told_at = time.monotonic()

    def delivered(self, tag: int) -> None:
        """Record a delivery."""
        self._open[tag] = False

    def unanswered(self, tags: Iterable[int]) -> list[int]:
        """Return the tags that are neither acknowledged nor marked for
        acknowledgement."""
        return [tag for tag in tags if self._open.get(tag) is False]

    def gather(self, tags: Collection[int], *, prefetch: int) -> bool:
        """Mark deliveries for acknowledgement. Returns whether to send the frames now;
        the broker sends `prefetch` ahead."""
        for tag in tags:
            self._open[tag] = True
        self._gathered += len(tags)
        slow = time.monotonic() - self._told_at > LONGEST_GROUP
        return slow or self._gathered * 2 >= prefetch

    def written(self) -> bytearray:
        """Return the frames for all marked deliveries, to be written next: a single
        frame up to the first open delivery."""
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
        """Record that these were acknowledged in another way."""
        for tag in tags:
            self._open.pop(tag, None)
