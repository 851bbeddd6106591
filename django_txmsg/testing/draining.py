"""Processes all messages in the thread of a project's test.

`drain()` does the work of `manage.py relay` and `manage.py consume` in the thread and
the database connection of the test. It dispatches the outbox and runs the stages until
no message is left. So it works inside a `TestCase`, whose rows no other process sees.
Only the broker differs: `drain()` uses the embedded broker instead of TXMSG["BROKERS"].
Before `drain()` begins, a test that commits dispatches its messages to these brokers,
unless it uses `embedded()`.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any, TypeVar

from django.conf import settings
from django.db import router
from django.db.models import F, Min, Q
from django.db.models.functions import Now
from django.test import override_settings

from .. import conf, stages, wire
from ..brokers import find_broker, get_broker
from ..brokers.base import Delivery, Session
from ..consuming import batch, decoding, modes
from ..consuming.arrival import (
    Arrival,
    Duplicate,
    Outcome,
    Processed,
    to_acknowledge,
)
from ..consuming.stage_middleware import prepared
from ..envelope.message import Message
from ..envelope.redelivery import Dead, RedeliverAfter
from ..errors import DecodeError, Redeliver, Refuse
from ..flows.deadlines import Deadlines
from ..models import InboxMessage, OutboxMessage, Run
from ..models.fields import clock
from ..models.inbox_arrival import Parked
from ..models.outbox import PENDING
from ..models.queue import QueueMessage
from ..monitoring.databases import with_tables
from ..relaying.dispatcher import stop_dispatchers
from ..relaying.lane import Lane
from ..runtime.notifications import stop_notifiers
from ..sending.destination import Destination
from ..sending.unique import message_of
from ..stages import Stage, find

#: Seconds of a test's lease: longer than any debugging session.
_LEASE = 86_400
_UNSENT = "django_txmsg.testing.unsent.Unsent"


@dataclasses.dataclass
class Drained:
    """The result of `drain()`: counts, and the exceptions that handlers raised.

    `dead` counts dead letters, also of messages that expired in the outbox. `tasks`
    counts the rows that are stored for Celery's workers. The tasks are not executed.
    """

    dispatched: int = 0
    processed: int = 0
    duplicates: int = 0
    redelivered: int = 0
    dead: int = 0
    tasks: int = 0
    errors: list[BaseException] = dataclasses.field(default_factory=list)

    def on_error(self, error: BaseException) -> None:
        """Keep the error of an attempt, unless it is a decision of the handler."""
        if not isinstance(error, Refuse | Redeliver | DecodeError):
            self.errors.append(error)

    def note(self, outcome: Outcome) -> None:
        """Count the outcome of one message at a stage."""
        match outcome:
            case Processed():
                self.processed += 1
            case Duplicate():
                self.duplicates += 1
            case RedeliverAfter():
                self.redelivered += 1
            case Dead():
                self.dead += 1


def drain(
    *stages: str,
    ahead: dt.timedelta = dt.timedelta(0),
    raises: bool = True,
    limit: int = 1000,
) -> Drained:
    """Dispatch stored messages and run the stages until no message is left.

    `stages` names the stages to run. The default is all whose database the test may
    use. With `ahead`, `drain()` acts as if this much time passed: when nothing is left
    to do, it goes on to the time at which the next delayed message, redelivery or flow
    deadline is due. The times of several calls add up.

    With `raises`, `drain()` ends by raising the first exception of a handler. Refuse
    and Redeliver are never raised, because they are decisions of the handler. A message
    that its stage cannot read reaches no handler: it is only counted as `dead`. If a
    stage has more than `limit` outcomes, `drain()` raises AssertionError, because the
    stage may send messages in an endless loop.

    A `TestCase` never commits, so on_commit hooks of handlers do not run. To run these
    hooks, wrap the call in `captureOnCommitCallbacks(execute=True)`.
    """
    if not isinstance(ahead, dt.timedelta) or ahead < dt.timedelta(0):
        raise ValueError(f"drain(): ahead must be a timedelta >= 0, not {ahead!r}.")
    drained = Drained()
    with ExitStack() as stack:
        # Messages that a dispatcher's thread holds would be missed here, and an open
        # connection would keep the test database from being dropped.
        stop_dispatchers(timeout=60)
        stop_notifiers(timeout=60)
        stack.enter_context(embedded())
        workers = [
            _Worker(stage, drained)
            for stage in find(stages)
            if stages or _is_allowed(stage.definition.using)
        ]
        aliases = {router.db_for_write(OutboxMessage)}
        aliases |= {worker.using for worker in workers}
        aliases |= set(filter(_is_allowed, with_tables()))
        brokers = list(conf.get().BROKERS)
        lanes = [
            stack.enter_context(closing(Lane(alias, broker)))
            for alias in sorted(aliases)
            for broker in filter(_is_consumable, brokers)
        ]
        # Before anything is dispatched: a topic copies only to existing subscriptions,
        # also to those of stages that a later call runs.
        topics = [one for one in find(()) if wire.is_topic(one.destination)]
        for one in topics if stages else ():
            if _is_allowed(get_broker(one.broker).stored_in or ""):
                stack.enter_context(_Worker(one, drained).open())
        for worker in workers:
            stack.enter_context(worker.open())
        deadlines = Deadlines(sorted(aliases))
        until = {alias: clock(alias) + ahead for alias in aliases}
        moved = True
        while moved or (ahead and _hasten(until)):
            deadlines.tick()
            sent = sum(lane.dispatch() for lane in lanes)
            handled = sum(worker.work(limit) for worker in workers)
            moved = bool(sent or handled)
        drained.dispatched = sum(lane.counts["dispatched"] for lane in lanes)
        drained.dead += sum(lane.counts["dead"] for lane in lanes)
        of_celery = Q(broker__in=[one for one in brokers if not _is_consumable(one)])
        drained.tasks = sum(
            OutboxMessage.objects.using(alias).filter(PENDING, of_celery).count()
            for alias in aliases
        )
    if raises and drained.errors:
        raise drained.errors[0]
    return drained


def outbox_messages(
    destination: str | None = None, *, using: str | None = None
) -> list[Message]:
    """Return the messages that are stored in the outbox of one database, dispatched or
    not, in the order of storing. The default is the outbox's database."""
    rows = OutboxMessage.objects.using(using or router.db_for_write(OutboxMessage))
    if destination is not None:
        rows = rows.filter(destination=destination)
    return [message_of(row) for row in rows.order_by("id")]


class _Hurry(threading.Event):
    """Replaces the event on which a consumer waits before a blocking redelivery, so
    that a test does not wait."""

    def wait(self, timeout: float | None = None) -> bool:
        """Return immediately, without waiting."""
        return self.is_set()


class _Worker:
    """Runs one stage in this thread."""

    def __init__(self, stage: Stage, drained: Drained) -> None:
        self._mode = modes.of(prepared(stage))
        self._stage, self.using = self._mode.stage, self._mode.using
        self._drained = drained
        self._token = uuid.uuid4()
        self._outcomes = 0

    @contextmanager
    def open(self) -> Iterator[None]:
        stage = self._stage
        subscriber = stage.subscriber
        transacted = self._mode.transacted
        broker = get_broker(stage.broker)
        with broker.open(transacted=transacted, subscriber=subscriber) as session:
            prefetch = 1 if transacted else stage.batch
            session.subscribe(
                stage.destination, prefetch=prefetch, subscriber=subscriber
            )
            self._session: Session = session
            yield

    def work(self, limit: int) -> int:
        """Process all messages that have arrived for the stage. Return the number of
        outcomes."""
        before = self._outcomes
        rows = InboxMessage.objects.db_manager(self.using)
        while deliveries := self._receive():
            outcomes = self._process([self._arrival(one) for one in deliveries], limit)
            settled = to_acknowledge(deliveries, outcomes)
            if settled:
                self._session.ack(settled)
        stage = self._stage
        while parked := rows.claim_parked(stage.name, self._token, _LEASE, stage.reads):
            arrival = self._arrival(decoding.from_parked(parked), parked)
            self._process([arrival], limit)
        return self._outcomes - before

    def _receive(self) -> list[Delivery]:
        found: list[Delivery] = []
        while len(found) < self._stage.batch:
            delivery = self._session.receive(0)
            if delivery is None:
                break
            found.append(delivery)
        return found

    def _arrival(self, delivery: Delivery, parked: Parked | None = None) -> Arrival:
        return Arrival(
            self._mode,
            delivery,
            session=self._session,
            worker="drain",
            stop=_Hurry(),
            on_error=self._drained.on_error,
            parked=parked,
            token=None if parked is None else self._token,
        )

    def _process(self, arrivals: Sequence[Arrival], limit: int) -> list[Outcome]:
        outcomes = batch.process(arrivals)
        for outcome in outcomes:
            self._drained.note(outcome)
        self._outcomes += len(outcomes)
        if self._outcomes > limit:
            raise AssertionError(
                f"Stage {self._stage.name!r} has had {self._outcomes} outcomes and "
                f"there are more messages still. Do its messages go in a circle? "
                f"Else give drain() a higher limit than {limit}."
            )
        return outcomes


@contextmanager
def embedded(*, dispatch_on_commit: str = "off") -> Iterator[None]:
    """Replace the brokers of TXMSG["BROKERS"] by the embedded broker while the block
    runs. Other processes are not notified of new messages.

    In the block, the argument `dispatch_on_commit` overrides the setting
    DISPATCH_ON_COMMIT. The block also replaces the broker of a Celery app by `Unsent`:
    a call of a task stores a row, and the row is never sent.
    """
    brokers = {}
    for alias, options in conf.get().BROKERS.items():
        broker = find_broker(alias)
        if not _is_consumable(alias):
            brokers[alias] = {**options, "BACKEND": _UNSENT}
            continue
        database = broker and broker.stored_in
        database = database or router.db_for_write(OutboxMessage)
        brokers[alias] = {"URL": f"database://{database}?lease={_LEASE}"}
    given = getattr(settings, "TXMSG", None) or {}
    with override_settings(
        TXMSG={
            **given,
            "BROKERS": brokers,
            "DISPATCH_ON_COMMIT": dispatch_on_commit,
            "NOTIFY": False,
        }
    ):
        yield


def _is_consumable(alias: str) -> bool:
    broker = find_broker(alias)
    return broker is None or broker.consumable


def _is_allowed(alias: str) -> bool:
    """Return whether the test may use a database. A test stores no messages in a
    database that its `databases` does not name."""
    try:
        clock(alias)
    except AssertionError:  # Django's DatabaseOperationForbidden
        return False
    return True


def _hasten(until: dict[str, dt.datetime]) -> bool:
    """Go on to the time at which the next row is due, or to the end: subtract the time
    until then from the times of all later rows. `until` maps each database to the time
    at which drain() ends, and is changed likewise. Returns False at the end."""
    waits = [
        first - clock(alias)
        for alias, end in until.items()
        for rows, due, *_ in _later(alias)
        if (first := rows.aggregate(first=Min(due))["first"]) and first <= end
    ]
    rest = min(end - clock(alias) for alias, end in until.items())
    wait = min(waits, default=max(rest, dt.timedelta(0)))
    for alias, end in until.items():
        for rows, *columns in _later(alias):
            rows.update(**{one: F(one) - wait for one in columns})
        until[alias] = end - wait
    return bool(waits)


def _later(alias: str) -> list[tuple[Any, ...]]:
    """Return the rows of a database that become due later, as querysets, each with the
    columns that contain times. The first column is the due time."""
    due, available = Q(due_at__gt=Now()), Q(available_at__gt=Now())
    outbox = OutboxMessage.objects.using(alias).filter(PENDING, due)
    # A message that waits for its predecessor is released when the predecessor ends.
    inbox = InboxMessage.objects.using(alias).filter(due, waits_for=None)
    runs = Run.objects.using(alias).filter(due)
    queue = QueueMessage.objects.using(alias).filter(available, lease_token=None)
    return [
        (outbox, "due_at", "expires_at"),
        (inbox, "due_at"),
        (runs, "due_at"),
        (queue, "available_at"),
    ]


Body = TypeVar("Body")
Reply = TypeVar("Reply")


@contextmanager
def answers(
    destination: Destination[Body, Reply], reply: Reply | Exception
) -> Iterator[list[Body]]:
    """Replace the stage of a destination while the block runs. The replacement answers
    each request with `reply`, or raises `reply` if it is an exception. Yield a list to
    which each received request is appended. The test calls `drain()` inside the
    block."""
    real = [one for one in stages.all_stages() if one.destination == destination.name]
    came: list[Body] = []

    def answer(body: Any) -> Any:
        came.append(body)
        if isinstance(reply, Exception):
            raise reply
        return reply

    answer.__annotations__["body"] = destination.body
    where: dict[str, Any] = {}
    if real:
        where = {"broker": real[0].broker, "using": real[0].definition.using}
    for one in real:
        stages.unregister(one.name)
    try:
        stages.stage(destination, **where)(answer)
        try:
            yield came
        finally:
            stages.unregister(destination.name)
    finally:
        for one in real:
            stages.register(one)
