"""A progress bar on the error stream, and nothing where there is no terminal."""

from __future__ import annotations

import sys
import time
from typing import TextIO

WIDTH = 24


class Progress:
    """Rows done of rows to do, with a rate; redrawn in place."""

    def __init__(self, label: str, stream: TextIO | None) -> None:
        self.label, self.stream = label, stream
        self.total = self.done = 0
        self.started = time.monotonic()
        self.note = ""

    @classmethod
    def silent(cls) -> Progress:
        """Return a bar that draws nothing."""
        return cls("", None)

    @classmethod
    def on_terminal(cls, label: str, *, quiet: bool = False) -> Progress:
        """Return a bar on the error stream, if a person is looking at it."""
        return cls(label, sys.stderr if sys.stderr.isatty() and not quiet else None)

    def start(self, total: int) -> None:
        """Begin, with so many rows to do."""
        self.total, self.started = total, time.monotonic()
        self._draw()

    def advance(self, rows: int) -> None:
        """Count rows that are done."""
        self.done += rows
        self._draw()

    def say(self, note: str) -> None:
        """Show what is going on."""
        self.note = note
        self._draw()

    def stop(self) -> None:
        """Clear the line for what comes next."""
        if self.stream is not None:
            self.stream.write("\r\x1b[K")
            self.stream.flush()

    def _draw(self) -> None:
        if self.stream is None:
            return
        share = min(1.0, self.done / self.total) if self.total else 0.0
        bar = "█" * int(share * WIDTH)
        rate = self.done / max(0.001, time.monotonic() - self.started)
        counts = f"{self.done:,} of {self.total:,} rows" if self.total else ""
        speed = f"{rate:,.0f} rows/s" if self.done else ""
        line = f"{self.label} {bar:░<{WIDTH}} {share:4.0%} {counts} {speed} {self.note}"
        self.stream.write(f"\r\x1b[K{line}")
        self.stream.flush()
