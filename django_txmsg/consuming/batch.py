"""Hop 7 for many messages at once: one transaction, a savepoint for each message.

The same steps and guarantees as `inbox.process()`. A message that fails rolls back
alone; if the transaction as a whole fails, each message is processed separately.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context

from django.db import Error, connections, transaction

from .. import tracing
from ..django_internals import must_roll_back, raw, under_savepoint
from ..envelope.message import Message
from ..errors import DecodeError
from ..models.inbox import InboxRecord
from ..runtime import database_health
from . import decoding, failure, inbox, modes, ordering, protocol
from .decoding import Arrival
from .inbox import announce_processed, is_handlers
from .outcomes import Outcome, Processed
from .protocol import Undecided, is_outage, lost_conflict


class Savepoints:
    """The savepoints of one transaction, which must be open on `using`: one for each
    message, one after another.

    Like those of `transaction.atomic()`, with one difference: a savepoint is released
    together with the start of the next one, and the last one by the commit. On
    PostgreSQL that is one round trip for each message instead of two
    (docs/decisions/djangos-private-api.md).
    """

    def __init__(self, using: str) -> None:
        self._using = using
        self._numbers = itertools.count(1)
        self._last = ""

    @contextmanager
    def next(self) -> Iterator[None]:
        """Surround the work of one message: an exception rolls back only that work. If
        even this fails, the transaction must roll back, as with `atomic()`."""
        name = f"txmsg_{next(self._numbers)}"
        self._begin(name)
        try:
            with under_savepoint(connections[self._using], name):
                yield
        except BaseException:
            try:
                transaction.savepoint_rollback(name, using=self._using)
            except Error:
                transaction.set_rollback(True, using=self._using)
            else:
                transaction.set_rollback(False, using=self._using)
            raise

    def _begin(self, name: str) -> None:
        sql = [f"SAVEPOINT {name}"]
        if self._last:
            sql.insert(0, f"RELEASE SAVEPOINT {self._last}")
        if connections[self._using].vendor == "postgresql":
            sql = ["; ".join(sql)]
        with connections[self._using].cursor() as cursor:
            for statement in sql:
                cursor.execute(statement)
        self._last = name


Work = tuple[Arrival, Message, InboxRecord]


def process(arrivals: Sequence[Arrival]) -> list[Outcome]:
    """Process arrivals of one stage and return an outcome for each, in order.

    Raises like `inbox.process()` if database or broker fail rather than a message: then
    nothing was decided.
    """
    if len(arrivals) == 1:
        return [inbox.process(arrivals[0])]
    together, alone = _readable(arrivals)
    batch = _Batch(together)
    batch.work()
    for arrival in [*alone, *batch.alone]:
        batch.outcomes[id(arrival)] = inbox.process(arrival)
    return [batch.outcomes[id(arrival)] for arrival in arrivals]


def _readable(
    arrivals: Sequence[Arrival],
) -> tuple[list[tuple[Arrival, Message]], list[Arrival]]:
    """Return the arrivals that can run together, with their messages, and those that
    must run alone."""
    readable: dict[object, tuple[Arrival, Message]] = {}
    alone: list[Arrival] = []
    for arrival in arrivals:
        try:
            message = decoding.read(arrival.delivery, arrival.stage)
        except (DecodeError, MemoryError):
            alone.append(arrival)
            continue
        again = message.id in readable or arrival.counted.row is not None
        if again or not arrival.has_identity:
            alone.append(arrival)
        else:
            readable[message.id] = (arrival, message)
    return list(readable.values()), alone


class _Batch:
    """Messages of one stage that run together, and their outcomes."""

    def __init__(self, given: Sequence[tuple[Arrival, Message]]) -> None:
        places = ordering.in_order([arrival for arrival, _ in given])
        self._given = [given[place] for place in places]
        self.outcomes: dict[int, Outcome] = {}
        #: Those that are processed separately.
        self.alone: list[Arrival] = []
        self._failed: list[tuple[Work, BaseException, float]] = []
        self._early: list[Work] = []
        self._durations: dict[int, float] = {}
        self._locked: set[int] = set()

    def work(self) -> None:
        """Process them with the stage, in one transaction."""
        work = self._record()
        if not work:
            return
        stage, using = work[0][0].stage, work[0][0].using
        rows, mode = work[0][0].inbox, modes.of(stage)

        def take() -> bool:
            self._locked = rows.lock([record.id for _, _, record in work])
            return bool(self._locked)

        def finish(*_: object) -> None:
            rows.finish(list(self._durations))
            mode.end([one for one, _, record in work if record.id in self._durations])

        on = raw(connections[using])
        try:
            protocol.once(
                stage.definition,
                take=take,
                run=lambda: self._run(work, Savepoints(using)),
                finish=finish,
            )
        except BaseException as error:
            refused = isinstance(error, Undecided | protocol.LostRace)
            if not refused and (is_outage(error, on) or not is_handlers(error)):
                raise
            # The commit failed for all: run each in a transaction of its own, to find
            # the one at fault.
            self.alone += [arrival for arrival, _, _ in work]
            return
        self._decide(work)

    def _record(self) -> list[Work]:
        """Count the arrivals. Returns those that run together."""
        if not self._given:
            return []
        first, messages = self._given[0][0], [message for _, message in self._given]
        recorded = first.inbox.record(first.stage.name, messages, together=True)
        work: list[Work] = []
        for arrival, message in self._given:
            record = arrival.count(recorded[message.id], attempt=False)
            # A message that failed before, or killed its worker, must not take others
            # down again.
            ordinary = (
                not record.settled and record.attempt == 0 and record.deliveries == 1
            )
            if ordinary and not decoding.expired(arrival.delivery, record.now):
                work.append((arrival, message.attempted(1), record))
            else:
                self.alone.append(arrival)
        return work

    def _run(self, work: Sequence[Work], savepoints: Savepoints) -> None:
        admission = ordering.Admission(
            [arrival for arrival, _, record in work if record.id in self._locked]
        )
        for item in work:
            arrival, message, record = item
            if record.id not in self._locked:
                continue
            if not admission.admits(arrival):
                self._early.append(item)
                continue
            self._run_one(item, savepoints)
            if record.id in self._durations:
                admission.note(message.id)

    def _run_one(self, item: Work, savepoints: Savepoints) -> None:
        arrival, message, record = item
        began = time.monotonic()
        try:
            copy_context().run(_handle, arrival, message, savepoints)
        except BaseException as error:
            if not is_handlers(error):
                raise
            whole = must_roll_back(connections[arrival.using]) or lost_conflict(error)
            if whole or database_health.lacks_resources(error):
                # The savepoint could not be rolled back, or the transaction cannot
                # commit any more, or is too large for the remaining resources: the
                # whole transaction ends.
                raise
            self._failed.append((item, error, time.monotonic() - began))
        else:
            self._durations[record.id] = time.monotonic() - began

    def _decide(self, work: Sequence[Work]) -> None:
        """Return the outcome of each, after the commit."""
        for arrival, message, record in work:
            if record.id in self._durations:
                self.outcomes[id(arrival)] = Processed()
                duration = self._durations[record.id]
                announce_processed(arrival.stage, message, duration, True)
            elif record.id not in self._locked:
                self.alone.append(arrival)  # a copy settled it
        for (arrival, message, record), reason, duration in self._failed:
            again = arrival.inbox.start_again(record.id)
            record = arrival.count(record.attempted(again))
            self._note(
                arrival, failure.failed(arrival, message, record, reason, duration)[0]
            )
        for arrival, _, record in self._early:
            waiting = modes.of(arrival.stage).out_of_turn(arrival, record, attempts=0)
            self._note(arrival, waiting)

    def _note(self, arrival: Arrival, outcome: Outcome | None) -> None:
        if outcome is None:
            # It is tried again at once (blocking redelivery), or its turn has come: its
            # predecessor was in this batch, and is dead.
            self.alone.append(arrival)
        else:
            self.outcomes[id(arrival)] = outcome


def _handle(arrival: Arrival, message: Message, savepoints: Savepoints) -> None:
    with tracing.processing(message, arrival.stage.name), savepoints.next():
        modes.of(arrival.stage).handle(arrival, message)
