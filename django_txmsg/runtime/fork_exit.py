"""The exit of a child that `multiprocessing` has forked, which does not run
`atexit`."""

from __future__ import annotations

import sys
from collections.abc import Callable


def at_childs_end(work: Callable[[], object], *, turn: int) -> None:
    """Call a function when this process exits, if it is such a child; other processes
    need nothing. The highest turn is called first.

    Call it in the child, which drops what its parent registered.
    """
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        from multiprocessing.util import Finalize

        Finalize(None, work, exitpriority=turn)
