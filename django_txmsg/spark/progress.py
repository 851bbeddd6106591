"""The progress bar of a job, on the error stream if that is a terminal. Also the hook
that is called between the steps of an archive: tests kill the process there."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from .engine import is_remote

if TYPE_CHECKING:
    from tqdm import tqdm


class Progress:
    """A progress bar that shows the finished amount, the total and a rate. It is
    redrawn on the same line."""

    def __init__(self, label: str, stream: TextIO | None, unit: str = "rows") -> None:
        self._bar: tqdm[Any] | None = None
        if stream is not None:
            # Executors import this module too, and need no bar.
            from tqdm import tqdm

            self._bar = tqdm(desc=label, unit=f" {unit}", file=stream, leave=False)

    @classmethod
    def silent(cls) -> Progress:
        """Return a bar that draws nothing."""
        return cls("", None)

    @classmethod
    def on_terminal(
        cls, label: str, *, quiet: bool = False, unit: str = "rows"
    ) -> Progress:
        """Return a bar on the error stream. If that is not a terminal, the bar draws
        nothing."""
        seen = sys.stderr.isatty() and not quiet
        return cls(label, sys.stderr if seen else None, unit)

    def start(self, total: int) -> None:
        """Start the bar with a total."""
        if self._bar is not None:
            self._bar.reset(total)

    def advance(self, count: int) -> None:
        """Add to the finished amount."""
        if self._bar is not None:
            self._bar.update(count)

    def say(self, note: str) -> None:
        """Show a note beside the bar."""
        if self._bar is not None:
            self._bar.set_postfix_str(note)

    @contextmanager
    def following(self, spark: SparkSession) -> Iterator[None]:
        """Show the progress of Spark's tasks while the block runs."""
        if self._bar is None or is_remote(spark):
            # No terminal, or Spark Connect, which shows no stages.
            yield
            return
        over = threading.Event()
        work = (self._bar, spark, over)
        watch = threading.Thread(target=_follow, args=work, daemon=True)
        watch.start()
        try:
            yield
        finally:
            over.set()
            watch.join()
            self.stop()

    def stop(self) -> None:
        """Remove the bar from the terminal."""
        if self._bar is not None:
            self._bar.clear()


def _follow(bar: tqdm[Any], spark: SparkSession, over: threading.Event) -> None:
    tracker = spark.sparkContext.statusTracker()
    while not over.wait(0.25):
        try:
            running = tracker.getActiveStageIds()
            stages = [tracker.getStageInfo(number) for number in running]
        except Py4JError:  # Spark is ending
            return
        bar.total = sum(one.numTasks for one in stages if one)
        bar.n = sum(one.numCompletedTasks for one in stages if one)
        bar.set_postfix_str(f"stage {max(running)}" if running else "")


#: Called with the name of the completed step.
Step = Callable[[str], None]


def no_step(step: str) -> None:
    """The default hook between two steps. It does nothing."""
