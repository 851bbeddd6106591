"""A consumer's thread that executes operators' bulk operations. The thread also
aggregates the counts for the admin's charts."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection

from ..dead_letters import bulk
from ..models.fields import clock
from ..models.monitoring import PERIOD
from ..monitoring import periods
from ..runtime import database_health, liveness, notifications
from ..runtime.connections import recycle
from ..runtime.liveness import RARELY, Activity
from . import go_back  # noqa: F401 - provides one kind of operation


class BulkThread:
    """Executes bulk operations in every database that holds messages. The thread's work
    is `run()`."""

    def __init__(
        self, databases: Collection[str], stop: threading.Event, activity: Activity
    ) -> None:
        self._stopping, self._activity = stop, activity
        self._retries = {
            using: database_health.Retry(
                using, f"bulk operations in database {using!r} wait"
            )
            for using in databases
        }
        self._looked = dict.fromkeys(databases, 0.0)

    def run(self) -> None:
        """Execute operations until the consumer stops."""
        wakeups = {
            using: notifications.Wakeup(using, notifications.WORK)
            for using in self._retries
        }
        kept_at = time.monotonic()
        while not self._stopping.wait(1.0):
            liveness.turned()
            counting = time.monotonic() - kept_at > PERIOD.total_seconds()
            kept_at = time.monotonic() if counting else kept_at
            for using, wakeup in wakeups.items():
                if self._is_time(using, wakeup, counting):
                    self._work_off(using, counting)

    def _is_time(
        self, using: str, wakeup: notifications.Wakeup, counting: bool
    ) -> bool:
        if not self._retries[using].ready:
            return False
        calm = wakeup.has_listener and self._activity.calm
        recent = time.monotonic() - self._looked[using] < RARELY
        return wakeup.due() or not (calm and recent) or counting

    def _work_off(self, using: str, counting: bool) -> None:
        self._looked[using] = time.monotonic()
        try:
            if bulk.work_off(using, self._stopping):
                self._activity.note()
            if counting:
                # Aggregated now, so that the chart need not wait for it later.
                periods.remember(using, clock(using))
            self._retries[using].worked()
        except Exception as error:
            self._retries[using].failed(error)
        finally:
            recycle()
