"""Stores the messages that start, signal, resume or cancel a run of a flow. Code
outside the flow's steps sends these messages."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Callable

from django.db import connections, transaction
from django.db.models.functions import Now

from .. import wire
from ..django_internals import in_block
from ..envelope.message import check_key, new_id
from ..errors import AlreadyResumed, FlowError, InvalidMessage
from ..models import OutboxMessage, Run
from ..models.fields import clock
from ..models.run import WaitsFor
from ..sending import undoing
from ..sending.outbox import require_transaction
from ..sending.scope import current_scope
from .declaration import Declaration, Step, declarations
from .values import deadline_id


def identify(
    declared: Declaration, content: Callable[[], tuple[object, ...]], messages: int = 1
) -> tuple[uuid.UUID, Run | None]:
    """Return the id of a run that is to be started, and the run itself if it already
    exists. Otherwise the second value is None.

    Outside a stage, the id is new. Inside a stage, each attempt derives the same id
    from the content, and from a number: how many runs of this content the attempt has
    started and not rolled back. So the run exists if an earlier attempt has committed
    it. The caller then does not send the run's first messages again.

    `messages` is how many first messages the run has. If the caller does not send them
    again, this function skips their positions in the sequence of the stage's messages.
    So the stage's later messages get the same ids as in the earlier attempt.
    """
    current = current_scope()
    if current is None or current.cause is None:
        return new_id(), None
    using = declared.using
    run_id = current.derived_id(using, content, by_content=True)
    known = Run.objects.using(using).filter(run_id=run_id).first()
    for _ in range(messages if known else 0):
        current.derived_id(using)
    return run_id, known


def send_signal(
    declared: Declaration,
    key: str,
    body: object,
    *,
    since: dt.datetime | None = None,
    delay: dt.timedelta | None = None,
) -> None:
    """Store a signal that is delivered after `delay`. If the signal's run has not begun
    yet when the signal is delivered, the flow stores the signal again. `since` is then
    the time when the signal was first stored."""
    taking = {one.name: one for one in declared.signals.values()}.values()
    fitting = [
        one
        for one in taking
        if any(type(body) is known.cls for known in one.reader.types)
    ]
    if len(fitting) != 1:
        raise InvalidMessage(
            f"No signal of flow {declared.name!r} takes {type(body).__name__}; it has "
            f"{', '.join(one.name for one in taking) or 'none'}."
        )
    at = wire.format_instant(since or clock(declared.using))
    declared.send(
        body,
        {wire.TICKET: f"{wire.SIGNAL};{fitting[0].name};{at};{check_key(key)}"},
        to=declared.address_of(fitting[0]),
        delay=delay,
    )


def resume(token: str, value: object = None) -> None:
    """Continue the run that waits for this token, in the caller's transaction.

    `value` is the step's argument. Raises AlreadyResumed if the run was resumed before,
    if its deadline has passed, or if the run has continued in another way. Raises
    InvalidMessage for a value of another type. Raises FlowError if this process does
    not have the step for which the run waits, because newer code has asked. Also raises
    FlowError in a stage whose `transaction` is not "outbox", except inside an outbox
    session.
    """
    try:
        run_id, turn = wire.read_ticket(token)
    except ValueError:
        raise FlowError("This is not the token of a waiting run.") from None
    databases = sorted({one.using for one in declarations()})
    # The run's database is one with a transaction. Another one may not answer.
    for using in sorted(databases, key=lambda one: not in_block(connections[one])):
        runs = Run.objects.using(using).filter(
            run_id=run_id, turn=turn, waits_for=WaitsFor.RESUME, failing=False
        )
        run = runs.first()
        if run is not None:
            break
    else:
        raise AlreadyResumed(_RESUMED)
    declared, taken = declaration_of(run), awaited_step(run)
    insist_on_one_transaction(using, declared.steps_name)
    with transaction.atomic(using=using):
        # The update locks the row, as storing its time-out does.
        if not runs.filter(resumed_at=None).update(resumed_at=Now()):
            raise AlreadyResumed(_RESUMED)
        stored = OutboxMessage.objects.using(using)
        if stored.filter(message_id=deadline_id(turn)).exists():
            raise AlreadyResumed(_RESUMED)
        declared.continue_run(run, turn, value, to=declared.address_of(taken))


_RESUMED = (
    "Nothing waits for this token any more: the run was resumed before, its deadline "
    "has passed, or it has ended."
)


def cancel(run: Run, why: str = "") -> None:
    """Cancel a run, in the caller's transaction. The flow's signal method for
    `Cancelled` decides how the run continues. Without such a method the run fails, and
    undoes its work. A run that has ended does not change. If the run has handed over to
    another flow, the run of the other flow is cancelled."""
    declared = declaration_of(run)
    undoing.cancel(run, why, declared.using, declared.broker)


def insist_on_one_transaction(using: str, destination: str) -> None:
    """Raise TransactionRequired if no transaction is open. Raise FlowError if the
    message would not be stored in the same transaction as the run's row. This is so in
    a stage whose `transaction` is not "outbox", except inside an outbox session."""
    current = current_scope()
    if current is not None and current.enlist is not None:
        raise FlowError(
            f"The transaction= of stage {current.stage!r} is not 'outbox', so a run "
            f"and its message to {destination!r} might not be one transaction. "
            f'Give the stage transaction="outbox", or let it send a message to another '
            f"stage, one with that transaction, which starts the run."
        )
    require_transaction(using, destination)


def declaration_of(run: Run) -> Declaration:
    """Return the declaration of a run's flow. Raises FlowError if this process does not
    declare the flow."""
    for one in declarations():
        if one.name == run.flow:
            return one
    raise FlowError(
        f"Flow {run.flow!r} is not declared in this process. Import its module in the "
        "stages module of an app."
    )


def awaited_step(run: Run) -> Step:
    """Return the step for which a run waits. Raises FlowError if this process does not
    have the step."""
    steps = declaration_of(run).steps
    if run.step not in steps:
        raise FlowError(
            f"Run {run.run_id} waits for step {run.step!r} of flow {run.flow!r}, which "
            f"this process does not have. Try again when the code with that step is "
            f"deployed everywhere."
        )
    return steps[run.step]
