"""Bulk operations that send runs of flows back to a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.db import transaction
from django.db.models import QuerySet

from .. import conf
from ..dead_letters import bulk
from ..dead_letters.resolution import Tally
from ..errors import TxmsgError
from ..flows import acts
from ..models import BulkOperation, Run
from ..models.bulk_operation import BulkKind
from ..models.fields import Holds
from ..models.run import WaitsFor
from ..rules import flows


def matching(filters: Mapping[str, Any], using: str) -> QuerySet[Run]:
    """Return the runs that a filter selects: the waiting runs of one flow at one step.
    A run that waits for its first step cannot go back, and is omitted."""
    runs = Run.objects.using(using).filter(
        Holds(flows.WAITING),
        service=filters["service"],
        flow=filters["flow"],
        step=filters["step"],
    )
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
