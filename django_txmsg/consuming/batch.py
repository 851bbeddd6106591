"""Hop 7 for a batch of messages: one transaction, with a savepoint for each message.

The steps and guarantees are the same as in `inbox.process()`. If one message fails,
only its work is rolled back. If the whole transaction fails, each message is processed
separately.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context

from django.db import Error, connections, transaction

from .. import tracing
from ..django_internals import Hook, must_roll_back, raw, under_savepoint
from ..errors import DecodeError, NewerCodeNeeded
from ..models.inbox_arrival import InboxRecord
from ..runtime import database_health
from . import decoding, failure, inbox, ordering, protocol
from .arrival import Arrival, Duplicate, Outcome, Processed
from .inbox import announce_processed, is_handlers
from .protocol import Undecided


class Savepoints:
    """One savepoint for each message, in the transaction that is open on `using`.

    On PostgreSQL, each message takes one round trip; with `transaction.atomic()` it
    would take two. The statement that begins a savepoint also releases the previous
    savepoint, and the commit releases the last savepoint. In all other respects these
    savepoints work like those of `atomic()` (docs/decisions/djangos-private-api.md).
    """

    def __init__(self, using: str) -> None:
        self._using = using
        self._numbers = itertools.count(1)
        self._last = ""

    @contextmanager
    def next(self) -> Iterator[None]:
        """Surround the work of one message, so that an exception rolls back only this
        work. If the rollback to the savepoint fails, the whole transaction must roll
        back, as with `atomic()`."""
        name = f"txmsg_{next(self._numbers)}"
        self._begin(name)
        try:
            with under_savepoint(connections[self._using], name, _alone):
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


def _alone(hook: Hook) -> Hook:
    """Return a hook that logs the error of `hook`: if it raised the error, Django would
    drop the hooks of the other messages."""

    def run() -> None:
        try:
            hook()
        except Exception as late:
            protocol.log_late(late)

    return run


Work = tuple[Arrival, InboxRecord]


def process(arrivals: Sequence[Arrival]) -> list[Outcome]:
    """Process arrivals of one stage and return their outcomes, in the same order.

    Raises the same errors as `inbox.process()` if the database or the broker fails. In
    that case none of the arrivals has an outcome.
    """
    if len(arrivals) == 1:
        return [inbox.process(arrivals[0])]
    together, alone = _readable(arrivals)
    batch = _Batch(together)
    batch.work()
    for arrival in [*alone, *batch.alone]:
        batch.outcomes[id(arrival)] = inbox.process(arrival)
    return [batch.outcomes[id(arrival)] for arrival in arrivals]


def _readable(arrivals: Sequence[Arrival]) -> tuple[list[Arrival], list[Arrival]]:
    """Decode the arrivals. Returns the arrivals that can run in one transaction, and
    the arrivals that must run alone."""
    readable: dict[object, Arrival] = {}
    alone: list[Arrival] = []
    for arrival in arrivals:
        if arrival.came_before:
            # It may have killed a worker, which must not happen to a batch again.
            alone.append(arrival)
            continue
        try:
            message = decoding.read(arrival.delivery, arrival.stage).attempted(1)
        except (DecodeError, MemoryError):
            alone.append(arrival)
            continue
        again = message.id in readable or arrival.record is not None
        if again or not arrival.has_identity:
            alone.append(arrival)
        else:
            arrival.message = message
            readable[message.id] = arrival
    return list(readable.values()), alone


class _Batch:
    """Messages of one stage that run together, and their outcomes."""

    def __init__(self, given: Sequence[Arrival]) -> None:
        self._given = [given[place] for place in ordering.in_order(given)]
        self.outcomes: dict[int, Outcome] = {}
        #: Those that are processed separately.
        self.alone: list[Arrival] = []
        self._failed: list[tuple[Work, BaseException, float]] = []
        self._early: list[Work] = []
        self._durations: dict[int, float] = {}
        self._locked: set[int] = set()

    def work(self) -> None:
        """Process the messages with the stage, in one transaction."""
        work = self._record()
        if not work:
            return
        mode = work[0][0].mode
        rows, using = mode.inbox, mode.using

        def take() -> bool:
            self._locked = rows.lock([record.id for _, record in work])
            return bool(self._locked)

        def finish(*_: object) -> None:
            rows.finish(list(self._durations))
            ordering.wake([one for one, record in work if record.id in self._durations])

        on = raw(connections[using])
        try:
            protocol.once(
                mode.stage.definition,
                take=take,
                run=lambda: self._run(work, Savepoints(using)),
                finish=finish,
            )
        except BaseException as error:
            refused = isinstance(error, Undecided | protocol.LostRace)
            if not refused and (mode.is_outage(error, on) or not is_handlers(error)):
                raise
            # The commit failed for all: run each in a transaction of its own, to find
            # the one at fault.
            self.alone += [arrival for arrival, _ in work]
            return
        self._decide(work)

    def _record(self) -> list[Work]:
        """Record the arrivals. Returns the arrivals that run in one transaction."""
        if not self._given:
            return []
        mode, messages = self._given[0].mode, [one.message for one in self._given]
        recorded = mode.inbox.record(mode.stage.name, messages, together=True)
        work: list[Work] = []
        for arrival in self._given:
            record = arrival.count(recorded[arrival.message.id], attempt=False)
            # A message that failed before, or killed its worker, must not take others
            # down again.
            ordinary = record.attempt == 0 and record.deliveries == 1
            if ordinary and not mode.reason_not_to_run(arrival, record):
                work.append((arrival, record))
            else:
                self.alone.append(arrival)
        return work

    def _run(self, work: Sequence[Work], savepoints: Savepoints) -> None:
        admission = ordering.Admission(
            [arrival for arrival, record in work if record.id in self._locked]
        )
        for item in work:
            arrival, record = item
            if record.id not in self._locked:
                continue
            if not admission.admits(arrival):
                self._early.append(item)
                continue
            self._run_one(item, savepoints)
            if record.id in self._durations:
                admission.note(record.message_id)

    def _run_one(self, item: Work, savepoints: Savepoints) -> None:
        arrival, record = item
        began = time.monotonic()
        try:
            copy_context().run(_handle, arrival, savepoints)
        except BaseException as error:
            if not is_handlers(error):
                raise
            lost = database_health.lost_conflict(error)
            whole = lost or must_roll_back(connections[arrival.using])
            if whole or database_health.lacks_resources(error):
                # The savepoint could not be rolled back, or the transaction cannot
                # commit any more, or is too large for the remaining resources: the
                # whole transaction ends.
                raise
            self._failed.append((item, error, time.monotonic() - began))
        else:
            self._durations[record.id] = time.monotonic() - began

    def _decide(self, work: Sequence[Work]) -> None:
        """Set the outcome of each message, after the commit."""
        for arrival, record in work:
            if record.id in self._durations:
                self.outcomes[id(arrival)] = Processed()
                duration = self._durations[record.id]
                announce_processed(arrival.stage, arrival.message, duration, True)
            elif record.id not in self._locked:
                self.alone.append(arrival)  # a copy settled it
        for (arrival, record), reason, duration in self._failed:
            if isinstance(reason, NewerCodeNeeded):
                self._note(arrival, failure.unreadable(arrival, reason))
                continue
            again = arrival.inbox.start_again(record.id)
            if not again:
                self._note(arrival, Duplicate(is_copy=False))  # revoked meanwhile
                continue
            arrival.count(record.attempted(again))
            self._note(arrival, failure.failed(arrival, reason, duration))
        for arrival, _ in self._early:
            self._note(arrival, ordering.out_of_turn(arrival, attempts=0))

    def _note(self, arrival: Arrival, outcome: Outcome | None) -> None:
        if outcome is None:
            # It is tried again at once (blocking redelivery), or its turn has come: its
            # predecessor was in this batch, and is dead.
            self.alone.append(arrival)
        else:
            self.outcomes[id(arrival)] = outcome


def _handle(arrival: Arrival, savepoints: Savepoints) -> None:
    message = arrival.message
    with tracing.processing(message, arrival.stage.name), savepoints.next():
        arrival.mode.handle(arrival, message)
