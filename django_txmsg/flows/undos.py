"""The undos of a run, as rows and as messages.

`sending.undoing` has the other side: the stage of an undo decides whether there is
anything to undo.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from django.db.models import QuerySet

from .. import wire
from ..models import FlowUndo, Run
from ..sending.outbox import Encoded, destination_name, encoded, send_parts
from ..sending.undoing import undo_delays
from .declaration import Declaration
from .values import Cancelled, Request

#: Rows in one INSERT, and rows read at a time.
AT_ONCE = 1000
#: The longest time for which an undo waits until the flow that was asked is cancelled.
MOST_HELD = dt.timedelta(days=7)


def register(run: Run, undos: Iterable[FlowUndo]) -> None:
    """Store new undos of a run. They are executed in the reverse order."""
    rows = list(undos)
    for one in rows:
        run.undos += 1
        one.run, one.number = run, run.undos
    FlowUndo.objects.using(run._state.db).bulk_create(rows, batch_size=AT_ONCE)


def new(destination: Any, body: Any, **columns: Any) -> FlowUndo:
    """Return an unsaved undo. Without a `request_id` it undoes a step's own work."""
    content, _, of = encoded(destination, body)
    name = destination_name(destination)
    return FlowUndo(destination=name, body=content, body_type=of, **columns)


def of_request(
    run: Run, asked: Request[Any], request_id: uuid.UUID
) -> Iterator[FlowUndo]:
    """Yield the unsaved undos of a request."""
    if asked.undo is not None:
        yield new(asked.undo, asked.body, request_id=request_id)
    if asked.of_flow:
        steps, why = asked.destination.name + wire.STEPS, Cancelled(f"by {run.flow}")
        yield new(steps, why, request_id=request_id, cancels=True)


def unconfirmed(run: Run) -> QuerySet[FlowUndo]:
    """Return the undos of a run that are not confirmed, the newest first. While the run
    goes back to a step, its older undos are left out."""
    rows: QuerySet[FlowUndo] = FlowUndo.objects.using(run._state.db).filter(
        run=run, confirmed_at=None, number__gt=run.kept_undos or 0
    )
    return rows.order_by("-number")


def note_answer(run: Run, request_id: uuid.UUID | None) -> None:
    """Record that a request was executed. The answer to the request proves this.

    The request may have called another flow, and so started a run of that flow. The
    undo of such a request cancels the called run. This undo is kept even after the
    answer, because the called run may answer first and undo its own work later. If the
    calling run fails later, it waits until the called run's undos are confirmed.
    """
    if run.undos:
        unconfirmed(run).filter(request_id=request_id).update(answered=True)


def forget(run: Run) -> None:
    """Delete the undos of a run that does not need them any more."""
    if run.undos:
        unconfirmed(run).delete()


def undoes(undo: FlowUndo) -> str:
    """Return the header that names the work that an undo reverses."""
    if undo.request_id is None:
        return wire.OWN_WORK
    return str(wire.Undone(undo.request_id, undo.created_at, undo.answered))


def send_left(
    declared: Declaration,
    run: Run,
    requests: Collection[uuid.UUID],
    headers: Mapping[str, str],
) -> None:
    """Send and delete the undos of a join's `requests` without an answer. The run does
    not wait for them. If such a request is cancelled and has an `undo=` too, the undo
    is held back until the answer to the cancel: else the flow could run a step after
    the undo."""
    undos = unconfirmed(run).filter(request_id__in=requests)
    place = {"using": declared.using, "broker": declared.broker}
    assert run.turn is not None  # it waits
    headers = {**headers, wire.HOP: "1"}  # as of any undo: it must not be refused
    cancels = [row for row in undos if row.cancels]
    given = [row for row in undos if not row.cancels]
    delays = undo_delays(undos, declared.using)
    delays |= {row.request_id: MOST_HELD for row in cancels}
    parts = [_part(row, run, headers, delays.get(row.request_id)) for row in given]
    sent = send_parts(parts, **place)
    held = {row.request_id: one.id for row, one in zip(given, sent, strict=True)}
    parts = []
    for row in cancels:
        back = {}
        if row.request_id in held:
            ticket = f"{wire.ticket(run.run_id, run.turn)}/u{held[row.request_id].hex}"
            back = {wire.REPLY_TO: declared.steps_name, wire.TICKET: ticket}
        parts.append(_part(row, run, {**headers, **back}, None))
    send_parts(parts, **place)
    undos.delete()


def _part(
    undo: FlowUndo, run: Run, headers: Mapping[str, str], delay: dt.timedelta | None
) -> tuple[dict[str, Any], dict[str, str]]:
    message = {
        "destination": undo.destination,
        "body": Encoded(bytes(undo.body), undo.body_type),
        "headers": {wire.CORRELATION_ID: run.correlation_id},
        "delay": delay,
    }
    return message, {**headers, wire.UNDOES: undoes(undo)}
