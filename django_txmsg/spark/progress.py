"""How far a job is: a progress bar on the error stream, if that is a terminal. Also the
steps of a protocol, between which the tests kill a process."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from .cores import is_remote

WIDTH = 24


class Progress:
    """The amount that is done and the whole amount, with a rate, redrawn in place."""

    def __init__(self, label: str, stream: TextIO | None, unit: str = "rows") -> None:
        self.label, self.stream, self.unit = label, stream, unit
        self.total = self.done = 0
        self.started = time.monotonic()
        self.note = ""

    @classmethod
    def silent(cls) -> Progress:
        """Return a bar that draws nothing."""
        return cls("", None)

    @classmethod
    def on_terminal(
        cls, label: str, *, quiet: bool = False, unit: str = "rows"
    ) -> Progress:
        """Return a bar on the error stream, if that is a terminal."""
        seen = sys.stderr.isatty() and not quiet
        return cls(label, sys.stderr if seen else None, unit)

    def start(self, total: int) -> None:
        """Begin, with `total` to do."""
        self.total, self.started = total, time.monotonic()
        self._draw()

    def advance(self, count: int) -> None:
        """Add to the amount that is done."""
        self.done += count
        self._draw()

    def say(self, note: str) -> None:
        """Show what is happening."""
        self.note = note
        self._draw()

    @contextmanager
    def following(self, spark: SparkSession) -> Iterator[None]:
        """Show the tasks of Spark's running stages while the block runs."""
        if self.stream is None or is_remote(spark):
            # No terminal, or Spark Connect, which shows no stages.
            yield
            return
        over = threading.Event()
        watch = threading.Thread(target=self._follow, args=(spark, over), daemon=True)
        watch.start()
        try:
            yield
        finally:
            over.set()
            watch.join()
            self.stop()

    def stop(self) -> None:
        """Remove the bar from the terminal, so that the next line has its place."""
        if self.stream is not None:
            self.stream.write("\r\x1b[K")
            self.stream.flush()

    def _follow(self, spark: SparkSession, over: threading.Event) -> None:
        tracker = spark.sparkContext.statusTracker()
        while not over.wait(0.25):
            try:
                running = tracker.getActiveStageIds()
                stages = [tracker.getStageInfo(number) for number in running]
            except Py4JError:  # Spark is ending
                return
            self.total = sum(one.numTasks for one in stages if one)
            self.done = sum(one.numCompletedTasks for one in stages if one)
            spent = time.monotonic() - self.started
            stage = f"stage {max(running)}, " if running else ""
            self.say(f"{stage}{spent:.0f} s")

    def _draw(self) -> None:
        if self.stream is None:
            return
        share = min(1.0, self.done / self.total) if self.total else 0.0
        bar = "█" * int(share * WIDTH)
        rate = self.done / max(0.001, time.monotonic() - self.started)
        counts = f"{self.done:,} of {self.total:,} {self.unit}" if self.total else ""
        speed = f"{rate:,.0f} rows/s" if self.done and self.unit == "rows" else ""
        parts = [self.label, f"{bar:░<{WIDTH}}", f"{share:4.0%}", counts, speed]
        line = " ".join(filter(None, [*parts, self.note]))
        self.stream.write(f"\r\x1b[K{line}")
        self.stream.flush()


#: Called with the name of the completed step.
Step = Callable[[str], None]


def no_step(step: str) -> None:
    """Do nothing between the steps of the protocol."""
