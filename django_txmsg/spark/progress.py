"""The progress bar of a job until Spark has started, on the error stream if that is a
terminal. (Spark draws its own bar.) Also the hook that is called between the steps of
an archive: tests kill the process there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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


#: Called with the name of the completed step.
Step = Callable[[str], None]


def no_step(step: str) -> None:
    """The default hook between two steps. It does nothing."""
