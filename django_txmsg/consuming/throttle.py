"""Hop 6's throttle: a stage that fails repeatedly processes one message at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..envelope.redelivery import Dead, RedeliverAfter
from .arrival import Outcome, Processed

log = logging.getLogger("django_txmsg.throttle")


class Throttle:
    """After `after` failures in a row: one message at a time, with a pause after each.

    Shared by all threads of a stage in this process; one success ends it.
    """

    def __init__(self, after: int, pause: float) -> None:
        self._after, self._pause = after, pause
        self._failures = 0
        self._one_at_a_time = threading.Lock()

    @property
    def on(self) -> bool:
        """Whether the stage is being throttled."""
        return bool(self._after) and self._failures >= self._after

    def note(self, outcome: Outcome) -> None:
        """Count an outcome."""
        if isinstance(outcome, RedeliverAfter | Dead):
            self._failures += 1
            if self._failures == self._after:
                log.warning(
                    "%d failures in a row: the stage processes one message at a time "
                    "until one succeeds",
                    self._after,
                )
        elif isinstance(outcome, Processed):
            self._failures = 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for this thread's turn, if the stage is being throttled."""
        if not self.on:
            yield
            return
        with self._one_at_a_time:
            yield
