"""A consumer's loop that executes operators' bulk operations, including those that send
runs of flows back to a step. The loop also aggregates the counts for the admin's
charts."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
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
from ..runtime import notifications
from ..runtime.liveness import RARELY, Activity
from ..scheduling.time_loop import TimeLoop


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


class Bulk(TimeLoop):
    """Executes bulk operations, and counts finished periods for the charts."""

    refused = "bulk operations wait"
    survives = Exception

    def __init__(
        self, using: Sequence[str], stop: threading.Event, activity: Activity
    ) -> None:
        super().__init__(using)
        self._stop, self._activity = stop, activity
        self._wakeups = {
            one: notifications.Wakeup(one, notifications.WORK) for one in using
        }
        self._looked = dict.fromkeys(using, 0.0)
        self._counted = dict.fromkeys(using, time.monotonic())

    def _keep(self, using: str) -> float:
        wakeup, now = self._wakeups[using], time.monotonic()
        calm = wakeup.has_listener and self._activity.calm
        recent = now - self._looked[using] < RARELY
        counting = now - self._counted[using] > PERIOD.total_seconds()
        if wakeup.due() or not (calm and recent) or counting:
            self._looked[using] = now
            if bulk.work_off(using, self._stop):
                self._activity.note()
            if counting:
                self._counted[using] = now
                periods.remember(using, clock(using))
        return 1.0
