"""A consumer's thread that executes operators' bulk operations, including those that
send runs of flows back to a step. The thread also aggregates the counts for the admin's
charts."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from django.db import transaction
from django.db.models import QuerySet

from .. import conf
from ..dead_letters import bulk, selection
from ..dead_letters.resolution import Tally
from ..errors import TxmsgError
from ..flows import acts
from ..models import BulkOperation, Run
from ..models.bulk_operation import BulkKind
from ..models.fields import Holds, clock
from ..models.monitoring import PERIOD
from ..models.run import WaitsFor
from ..monitoring import periods
from ..rules import flows
from ..runtime import database_health, liveness, notifications
from ..runtime.connections import recycle
from ..runtime.liveness import RARELY, Activity


def matching(filters: Mapping[str, Any], using: str) -> QuerySet[Run]:
    """Return the runs that a filter selects: the waiting runs of one flow at one step.
    With the key "before", only the runs that have waited there since an earlier time
    are selected. A run that waits for its first step cannot go back, and is omitted."""
    service, ours = filters["service"], conf.get().services
    runs = Run.objects.using(using).filter(
        Holds(flows.WAITING),
        service__in=ours if service in ours else [service],
        flow=filters["flow"],
        step=filters["step"],
    )
    if "before" in filters:
        runs = runs.filter(since__lt=selection.instant(filters["before"]))
    return runs.exclude(waits_for=WaitsFor.START)


def filters_of(flow: str, step: str, to: str) -> dict[str, str]:
    """Return the filter for a bulk operation that sends this service's runs of `flow`
    from the step `step` back to the step `to`."""
    return {"service": conf.get().SERVICE, "flow": flow, "step": step, "to": to}


def _do(
    operation: BulkOperation, batch: Sequence[Run], tally: Tally, using: str
) -> None:
    given = acts.Given(to=operation.filter["to"], why=operation.why)
    for run in batch:
        try:
            with transaction.atomic(using=using):
                acts.act("go-back", run, given)
        except TxmsgError as error:
            tally.skipped[run.pk] = str(error)
        else:
            tally.done += 1


bulk.provide(BulkKind.GO_BACK, matching, _do)


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
