"""The progress bar of a job, on the error stream if that is a terminal. Also the hook
that is called between the steps of an archive: tests kill the process there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from .engine import is_remote

if TYPE_CHECKING:
    from tqdm import tqdm


def progress_bar(label: str, *, quiet: bool = False, unit: str = "rows") -> tqdm[Any]:
    """Return a progress bar that shows the finished amount, the total and a rate. It is
    redrawn on the same line. If `quiet` is true, or if the error stream is not a
    terminal, it draws nothing."""
    # Executors import this module too, and need no bar.
    from tqdm import tqdm

    # By default its lock works between processes too: Python 3.14 would start another
    # process for it.
    tqdm.set_lock(threading.RLock())
    return tqdm(desc=label, unit=f" {unit}", leave=False, disable=quiet or None)


@contextmanager
def following(bar: tqdm[Any], spark: SparkSession) -> Iterator[None]:
    """Show the progress of Spark's tasks while the block runs."""
    if bar.disable or is_remote(spark):
        # Nothing is drawn, or Spark Connect shows no stages.
        yield
        return
    over = threading.Event()
    watch = threading.Thread(target=_follow, args=(bar, spark, over), daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()
        watch.join()
        bar.clear()


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
