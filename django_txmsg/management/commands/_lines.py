"""Prints one readable line for each message that a process has handled."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from django.core.management.color import Style

from ... import signals
from ..terminal import printable


class Lines:
    """Reports the outcome of each message as it happens: `printing()`.

    `write` takes a line. A message dispatched to a destination in `consumed` is
    reported only when a stage of this process has processed it.
    """

    def __init__(self, write: Any, style: Style, consumed: Collection[str]) -> None:
        self._write, self._style, self._consumed = write, style, consumed
        self._broken = False

    @contextmanager
    def printing(self) -> Iterator[None]:
        """Print for the duration of the block."""
        heard = (
            (signals.message_dispatched, self._dispatched),
            (signals.message_processed, self._processed),
            (signals.message_duplicate, self._duplicate),
            (signals.message_redelivered, self._redelivered),
            (signals.message_buried, self._buried),
        )
        # If the user configured no log handlers, Python would print warnings a second
        # time.
        quiet = logging.NullHandler()
        if not signals.log.hasHandlers():
            signals.log.addHandler(quiet)
        for signal, receiver in heard:
            signal.connect(receiver)
        try:
            yield
        finally:
            for signal, receiver in heard:
                signal.disconnect(receiver)
            signals.log.removeHandler(quiet)

    def _dispatched(self, destination: str, broker: str, **facts: Any) -> None:
        if destination not in self._consumed:
            self._say(f"sent to broker {broker}", destination, **facts)

    def _processed(
        self, duration: float, stage: str, attempt: int, **facts: Any
    ) -> None:
        tries = f" at attempt {attempt}" if attempt > 1 else ""
        said = f"processed in {duration * 1000:.0f} ms{tries}"
        self._say(self._style.SUCCESS(said), stage, **facts)

    def _duplicate(self, stage: str, **facts: Any) -> None:
        self._say("a copy, dropped", stage, **facts)

    def _redelivered(
        self, stage: str, attempt: int, delay: float, error: str, **facts: Any
    ) -> None:
        said = f"attempt {attempt} failed, next in {delay:.1f} s: {printable(error)}"
        self._say(self._style.WARNING(said), stage, **facts)

    def _buried(
        self, stage: str, destination: str, reason: str, error: str, **facts: Any
    ) -> None:
        said = f"dead letter ({reason}): {printable(error)}"
        self._say(self._style.ERROR(said), stage or destination, **facts)

    def _say(self, what: str, where: str, *, id: object, **_: Any) -> None:
        now = time.strftime("%H:%M:%S")  # as the development server says it
        if self._broken:
            return
        try:
            self._write(f"{now} {printable(where)}: {what}  {id}")
        except (OSError, ValueError):
            # The reader of our output is gone, but the messages are not.
            self._broken = True
