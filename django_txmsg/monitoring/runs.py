"""Counts runs of flows that are open, undoing or stuck.

A run is *stuck* if it waits for an undo that has failed or takes too long. An undo has
failed if its message is an open dead letter in this database. An undo takes too long if
it has not been confirmed within an hour after it was due: the undo of a foreign request
may be sent only after the deadline of the request.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from dataclasses import dataclass

from django.db.models import Exists, OuterRef, Q

from ..models import DeadLetter, OutboxMessage, Run
from ..models.dead_letter import Resolution
from ..models.fields import Holds, Later, query
from ..models.run import Outcome
from ..rules import Rule, flows
from .waiting import CAP, OVERDUE, places_sql

#: How long an undo may take, with its redeliveries.
UNDONE = dt.timedelta(hours=1)

_TABLE = "django_txmsg_run"


@dataclass(frozen=True)
class Runs:
    """Three numbers about the runs of one flow: open runs, runs that undo their work,
    and runs that are stuck at an undo. Each is counted up to CAP."""

    service: str
    flow: str
    database: str
    open: int
    undoing: int
    stuck: int


def states() -> dict[str, Q]:
    """Return the query condition for each state of a run, by the state's name."""
    is_open, undoing = Q(Holds(flows.OPEN)), Q(Holds(flows.UNDOING))
    letters = DeadLetter.objects.filter(
        message_id=OuterRef("request_id"), resolution=Resolution.OPEN
    )
    ago = Later(-UNDONE.total_seconds())
    delayed = OutboxMessage.objects.filter(
        message_id=OuterRef("request_id"), dead_at=None, due_at__gt=ago
    )
    late = Q(since__lte=ago) & ~Q(Exists(delayed))
    return {
        "open": is_open,
        "waiting": Q(Holds(flows.WAITING)),
        "overdue": Q(due_at__lte=Later(-OVERDUE.total_seconds())),
        "undoing": undoing,
        "undo stuck": undoing & (late | Q(Exists(letters))),
        "answered": Q(outcome=Outcome.ANSWERED),
        "failed": Q(outcome=Outcome.FAILED),
        "handed over": Q(outcome=Outcome.HANDED_OVER),
    }


def stuck(using: str) -> Counter[tuple[str, str]]:
    """Return the number of stuck runs, by service and flow."""
    rows = Run.objects.using(using).filter(states()["undo stuck"]).order_by()
    return Counter(rows.values_list("service", "flow")[: CAP + 1])


def read(using: str) -> list[Runs]:
    """Return the numbers of runs in a database, by service and flow, in two queries."""
    found = stuck(using)

    def count(rule: Rule) -> str:
        return (
            f"(SELECT COUNT(*) FROM (SELECT 1 FROM {_TABLE} r WHERE"  # noqa: S608 - constants only
            f" r.service = o.service AND r.flow = o.flow AND {rule.sql('r')}"
            f" LIMIT {CAP + 1}) AS bounded)"
        )

    rows = query(
        using,
        f"{places_sql(_TABLE, ('service', 'flow'), flows.OPEN)} SELECT o.service,"  # noqa: S608 - constants only
        f" o.flow, {count(flows.OPEN)}, {count(flows.UNDOING)} FROM places"
        f" JOIN {_TABLE} o ON o.id = places.id ORDER BY o.service, o.flow",
    )
    return [
        Runs(service, flow, using, number, undoing, found[service, flow])
        for service, flow, number, undoing in rows
    ]
