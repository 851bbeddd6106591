"""Actions of an operator on a run, from a page or a command.

Each action runs in the caller's transaction, or raises FlowError.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from django.db import models
from django.db.models.functions import Now

from .. import codecs, conf, wire
from ..envelope import serializers
from ..envelope.message import Message, new_id
from ..envelope.typed_body import BodyReader
from ..errors import DecodeError, FlowError
from ..models import FlowStep, OutboxMessage, Run
from ..models.monitoring import Deed, Done
from ..models.run import Outcome, WaitsFor
from ..sending.outbox import Encoded
from ..sending.undoing import IN_DOUBT, overtaken
from . import sending
from .declaration import Declaration, Step
from .going import Going
from .starting import latest
from .values import Dead, deadline_id

#: The reason that a flow gets if an operator answers its request as failed.
BY_OPERATOR = "answered_as_failed"


@dataclass(frozen=True, kw_only=True)
class Given:
    """An operator's input. `value` is the JSON of a step's argument. `type` names the
    type of the argument, if the step accepts several types. `to` is the name of a step,
    or the number of the step's row in the history."""

    why: str = ""
    value: str = ""
    type: str = ""
    to: str = ""


def _resume(run: Run, given: Given) -> str:
    assert run.turn is not None  # it waits
    _check_time_out(run)
    step = sending.awaited_step(run)
    value = None if step.takes_nothing else _argument(step, given)[1]
    sending.resume(wire.ticket(run.run_id, run.turn), value)
    return "Resumed"


def _time_out(run: Run, given: Given) -> str:
    _check_time_out(run)
    Run.objects.using(run._state.db).filter(pk=run.pk).update(due_at=Now())
    return "Timed out"


def _check_time_out(run: Run) -> None:
    """Raise FlowError if the run's time-out is stored already."""
    assert run.turn is not None  # it waits
    stored = OutboxMessage.objects.using(run._state.db)
    if stored.filter(message_id=deadline_id(run.turn)).exists():
        raise FlowError(
            f"The time-out of run {run.run_id} is stored already. If it is a dead "
            f"letter, redeliver it; restore it first if it was discarded."
        )


def _cancel(run: Run, given: Given) -> str:
    sending.cancel(run, given.why)
    if run.outcome == Outcome.HANDED_OVER:
        return f"Cancelled run {run.request_id} of {run.asked}, successor of"
    return "Cancelled"


def _answer(run: Run, given: Given) -> str:
    assert run.turn is not None  # it waits
    declared = sending.declaration_of(run)
    overtaken(run, run.turn, declared.using)
    declared.continue_run(run, run.turn, Dead(BY_OPERATOR))
    return "Answered as failed"


def _go_back(run: Run, given: Given) -> str:
    declared = sending.declaration_of(run)
    rows = FlowStep.objects.using(declared.using).filter(run=run, left=False)
    rows = rows.order_by("pk")
    named = {"pk": int(given.to)} if given.to.isdecimal() else {"step": given.to}
    row = rows.filter(**named).last()
    if row is None or row.step not in declared.steps:
        raise FlowError(
            f"Run {run.run_id} cannot go back to step {given.to!r}: the step must be "
            f"in the history of the run, must still exist in this code, and must not "
            f"have been left by going back before."
        )
    argument = _argument_of(declared, row, given)
    before = rows.filter(pk__lt=row.pk).last()
    if before is None and declared.steps[row.step] is not declared.steps["start"]:
        raise FlowError(
            f"Run {run.run_id} cannot go back to step {row.step!r}: the state before "
            f'it is unknown, because FLOWS["HISTORY"] was off when the run began.'
        )
    message = Message(id=new_id(), destination=declared.steps_name, body=None)
    going = Going(declared, run, message)
    rows.filter(pk__gte=row.pk).update(left=True)
    if before is None:
        fresh = declared.encode(declared.cls())
        going.go_back(row.step, argument, 0, fresh, declared.version)
    else:
        kept, state, version = before.undos, before.state, before.version
        going.go_back(row.step, argument, kept, state, version)
    return f"Sent back to step {row.step}"


@dataclass(frozen=True)
class Act:
    """One action: its function, its permission, and the kinds of wait during which the
    action is possible."""

    do: Callable[[Run, Given], str]
    permission: str
    waits: Collection[str]


_ANSWERED = (WaitsFor.ANSWER, WaitsFor.RESUME)

#: The acts by their names in commands and addresses: continue a run that waits for a
#: person's word; let a deadline pass, or a sleep end, now; cancel; answer with `Dead`
#: for the participant; undo what came since a step, and call that step again.
ACTS = {
    "resume": Act(_resume, "resume_run", (WaitsFor.RESUME,)),
    "time-out": Act(
        _time_out, "time_out_run", (*_ANSWERED, WaitsFor.TIME, WaitsFor.JOIN)
    ),
    "cancel": Act(_cancel, "cancel_run", WaitsFor),
    "answer": Act(_answer, "answer_run", _ANSWERED),
    "go-back": Act(_go_back, "go_back_run", set(WaitsFor) - {WaitsFor.START}),
}


def act(name: str, run: Run, given: Given, *, seen: str = "") -> Done:
    """Apply one of ACTS to the run. `seen` is the value of `since` that the run had
    when the operator chose it.

    Raises FlowError if the action is not possible, if the run has continued since it
    was chosen, or if the step does not accept the operator's value.
    """
    now = Run.objects.db_manager(run._state.db).locked(run.run_id)
    if now is None or (seen and seen != now.since.isoformat()):
        raise FlowError(
            f"Nothing is done: run {run.run_id} has gone on. Look at it again."
        )
    if why := refused(name, now):
        raise FlowError(why)
    why = f": {given.why}" if given.why else "."
    said = f"{ACTS[name].do(now, given)} run {run.run_id} of flow {now.flow}{why}"
    return run, Deed.RUN, said


def refused(name: str, run: Run) -> str:
    """Return the reason why an action is not possible for a run, or "" if the action is
    possible."""
    if run.outcome == Outcome.HANDED_OVER:
        last = latest(run) if name == "cancel" else None
        why = refused(name, last) if last else ""
        if name == "cancel" and not why:
            return ""
        to = f"run {run.request_id} of {run.asked}"
        return f"Run {run.run_id} has handed over to {to}. {why}".rstrip()
    if run.ended_at is not None or run.failing:
        how = "has ended" if run.ended_at else "is undoing its work"
        return (
            f"Run {run.run_id} {how}. If an undo is stuck, redeliver its dead letter. "
            f"Discard the dead letter only if its reason is {IN_DOUBT}."
        )
    if run.waits_for not in ACTS[name].waits:
        waits = WaitsFor(run.waits_for).label
        return f"Run {run.run_id} waits for {waits}: {name} is not possible."
    return ""


def find(using: str, **by: Any) -> models.QuerySet[Run]:
    """Return the runs of this service in the database `using`, filtered by the given
    fields."""
    runs: models.QuerySet[Run] = Run.objects.using(using)
    return runs.filter(service__in=conf.get().services, **by)


def _argument(step: Step, given: Given) -> tuple[Encoded, Any]:
    """Return a step's argument from the operator's JSON, as bytes and as an object.
    Raises FlowError if the operator gave no value, or if the value does not fit."""
    if not given.value:
        raise FlowError(f"Step {step.name!r} takes a value: give it as JSON.")
    reader: BodyReader = codecs.reader(step.annotation)
    names = [one.name for one in reader.types if one.name]
    name = given.type or (names[0] if len(names) == 1 else "")
    try:
        value = reader.read(given.value.encode(), wire.JSON, name or None)
    except DecodeError as error:
        takes = inspect.formatannotation(step.annotation)
        raise FlowError(f"Step {step.name!r} takes {takes}: {error}") from error
    return Encoded(given.value.encode(), name), value


def _argument_of(declared: Declaration, row: FlowStep, given: Given) -> Encoded:
    """Return the argument for the repeated call of a step: the operator's value, or the
    argument of the step's earlier call."""
    step = declared.step(row.step)
    if step.joins:
        raise FlowError(
            f"Step {row.step!r} takes the answers of a gather, which are kept for one "
            f"call. Go back to the step that asks."
        )
    if step.takes_nothing:
        return Encoded(b"null", "")
    if given.value:
        return _argument(step, given)[0]
    stored = OutboxMessage.objects.using(declared.using)
    message = stored.filter(message_id=row.message_id).order_by("-pk").first()
    if message is None or not serializers.is_json(message.content_type):
        raise FlowError(
            f"The message of step {row.step!r} is not stored here any more, or was "
            f"sent by another service: give the value of the step, as JSON."
        )
    return Encoded(bytes(message.body), message.headers.get(wire.TYPE, ""))
