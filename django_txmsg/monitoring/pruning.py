"""Automatic pruning in a long-running process: `manage.py txmsg run`.

Any number of processes may prune, because each batch checks again whether its rows are
settled.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Sequence
from functools import partial

from ..runtime import database_health, liveness
from ..runtime.connections import recycle
from . import retention

log = logging.getLogger("django_txmsg.pruning")

#: Seconds until the first pruning, and between two. Each wait varies by up to a
#: quarter, so that processes that start together prune at different times.
FIRST, EVERY = 300.0, 3600.0


class Pruner:
    """Deletes rows past TXMSG["RETENTION"]. `run()` is the work of one thread, until
    `stop` is set."""

    def __init__(self, databases: Sequence[str], stop: threading.Event) -> None:
        self._databases, self._stop = databases, stop

    def run(self) -> None:
        """Prune every hour. After a failure, it is tried again an hour later."""
        pause = FIRST
        while not self._stop.wait(self._announced(pause)):
            pause = EVERY
            for using in self._databases:
                pruning = database_health.retry(
                    using, f"rows of database {using!r} stay"
                )
                pruning.run(partial(self._prune, using))
            recycle(idle=True)

    def _announced(self, pause: float) -> float:
        pause *= random.uniform(0.75, 1.25)  # noqa: S311 - jitter
        liveness.turned(pause)
        return pause

    def _prune(self, using: str) -> None:
        for kind in retention.kinds():
            deleted = retention.prune(
                kind, using, stop=self._stop, on_batch=lambda *_: liveness.turned()
            )
            if deleted:
                log.info("%s of database %r: %d deleted", kind.name, using, deleted)
