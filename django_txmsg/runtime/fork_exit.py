"""The end of a child that `multiprocessing` has forked: it asks no `atexit`."""

from __future__ import annotations

import sys
from collections.abc import Callable


def at_childs_end(work: Callable[[], object], *, turn: int) -> None:
    """Have it done when this process ends, if it is such a child; elsewhere nothing is
    to be done. What has the highest turn is done first.

    To be called in the child: it forgets what its parent has registered.
    """
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        from multiprocessing.util import Finalize

        Finalize(None, work, exitpriority=turn)
