"""Hop 7 for many messages at once: one transaction, a savepoint for each message.

The same steps and guarantees as `inbox.process()`. A message that fails rolls back
alone; if the transaction as a whole fails, each message is processed separately.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextvars import copy_context

from django.db import connections

from .. import tracing
from ..django_internals import must_roll_back, raw
from ..envelope.message import Message
from ..errors import DecodeError
from ..models import InboxMessage
from ..models.inbox_record import Seen
from ..runtime import database_health
from ..sending.scope import in_scope
from . import decoding, failure, inbox, ordering
from .attempt import announce_processed, is_handlers, stage_scope
from .outcomes import Arrival, Outcome, Processed
from .savepoints import Savepoints
from .transaction import StageTransaction, guarded, is_outage, lost_conflict

Work = tuple[Arrival, Message, Seen]


def process(batch: Sequence[Arrival]) -> list[Outcome]:
    """Process arrivals of one stage and return an outcome for each, in order.

    Raises like `inbox.process()` if database or broker fail rather than a message: then
    nothing was decided.
    """
    if len(batch) == 1:
        return [inbox.process(batch[0])]
    readable: dict[object, tuple[Arrival, Message]] = {}
    alone: list[Arrival] = []
    for arrival in batch:
        try:
            message = decoding.read(arrival.delivery, arrival.stage)
        except (DecodeError, MemoryError):
            alone.append(arrival)
            continue
        again = message.id in readable or arrival.counted.row is not None
        if again or not decoding.has_identity(arrival.delivery):
            alone.append(arrival)
        else:
            readable[message.id] = (arrival, message)
    outcomes: dict[int, Outcome] = {}
    if readable:
        _together(list(readable.values()), outcomes, alone)
    for arrival in alone:
        outcomes[id(arrival)] = inbox.process(arrival)
    return [outcomes[id(arrival)] for arrival in batch]


def _together(
    given: Sequence[tuple[Arrival, Message]],
    outcomes: dict[int, Outcome],
    alone: list[Arrival],
) -> None:
    if given[0][0].stage.ordered:
        places = ordering.in_order([arrival for arrival, _ in given])
        given = [given[place] for place in places]
    first = given[0][0]
    stage, using = first.stage, first.using
    rows = InboxMessage.objects.db_manager(using)
    messages = [message for _, message in given]
    recorded = rows.record(stage.name, messages, together=True)
    work: list[Work] = []
    for arrival, message in given:
        seen = arrival.count(recorded[message.id], attempt=False)
        # A message that failed before, or killed its worker, must not take others down
        # again.
        ordinary = not seen.settled and seen.attempt == 0 and seen.deliveries == 1
        if ordinary and not decoding.expired(message, arrival.delivery, seen.now):
            work.append((arrival, message.attempted(1), seen))
        else:
            alone.append(arrival)
    if not work:
        return
    failures: list[tuple[Work, BaseException, float]] = []
    early: list[Work] = []
    durations: dict[int, float] = {}
    on = raw(connections[using])
    try:
        with StageTransaction(stage.definition):
            locked = rows.lock([seen.id for _, _, seen in work])
            savepoints = Savepoints(using)
            here = [arrival for arrival, _, seen in work if seen.id in locked]
            admission = ordering.Admission(here)
            for item in work:
                arrival, message, seen = item
                if seen.id not in locked:
                    continue
                if not admission.admits(arrival):
                    early.append(item)
                    continue
                _run_one(item, using, savepoints, failures, durations)
                if seen.id in durations:
                    admission.note(message.id)
            rows.finish(list(durations))
            ordering.wake_all([one for one, _, seen in work if seen.id in durations])
    except BaseException as error:
        if is_outage(error, on) or not is_handlers(error):
            raise
        # The commit failed for all: run each in a transaction of its own, to find the
        # one at fault.
        alone += [arrival for arrival, _, _ in work]
        return
    for arrival, message, seen in work:
        if seen.id in durations:
            outcomes[id(arrival)] = Processed()
            announce_processed(stage, message, durations[seen.id], True)
        elif seen.id not in locked:
            alone.append(arrival)  # settled by a copy, as it finds out
    for (arrival, message, seen), reason, duration in failures:
        seen = arrival.count(seen.attempted(rows.start_again(seen.id)))
        outcome, _ = failure.failed(arrival, message, seen, reason, duration)
        if outcome is None:
            alone.append(arrival)  # blocking redelivery has counted the attempt
        else:
            outcomes[id(arrival)] = outcome
    for arrival, _, seen in early:
        waiting = ordering.out_of_turn(arrival, seen, attempts=0)
        if waiting is None:
            # Its turn has come by now: a message of the batch before it is dead, and
            # passed.
            alone.append(arrival)
        else:
            outcomes[id(arrival)] = waiting


def _run_one(
    item: Work,
    using: str,
    savepoints: Savepoints,
    failures: list[tuple[Work, BaseException, float]],
    durations: dict[int, float],
) -> None:
    arrival, message, seen = item
    began = time.monotonic()
    try:
        copy_context().run(_handle, arrival, message, using, savepoints)
    except BaseException as error:
        if not is_handlers(error):
            raise
        whole = must_roll_back(connections[using]) or lost_conflict(error)
        if whole or database_health.lacks_resources(error):
            # The savepoint could not be rolled back, or the transaction cannot commit
            # any more, or is too large for the remaining resources: this ends it as a
            # whole.
            raise
        failures.append((item, error, time.monotonic() - began))
    else:
        durations[seen.id] = time.monotonic() - began


def _handle(
    arrival: Arrival, message: Message, using: str, savepoints: Savepoints
) -> None:
    with (
        tracing.processing(message, arrival.stage.name),
        in_scope(stage_scope(arrival, message)),
        savepoints.next(),
        guarded(using),
    ):
        arrival.stage.handler(message)
