"""Hop 7, the heart: one arrival of a message becomes one outcome.

record (a duplicate? then ship what is left) → begin → run the stage, which stores what
it sends → commit → dispatch → settle, which the consumer does by the outcome.
Whatever is killed between two of these steps, the next arrival goes on from there.
"""

from __future__ import annotations

import threading
import time
import uuid
from dataclasses import dataclass
from functools import partial
from typing import Any

from django.db import InterfaceError, OperationalError, connections, transaction
from django.utils import timezone

from . import arrival as arrivals
from . import conf, dead_letters, outbox, signals, tracing, wire
from .brokers.base import Delivery, Outgoing, Session
from .demarcation import Demarcation, guarded
from .errors import (
    BrokerError,
    BrokerUnavailable,
    DecodeError,
    DispatchRejected,
    InvalidMessage,
)
from .failure import Failure
from .message import Message
from .models import Attempt, InboxMessage, OutboxMessage
from .models.inbox import Parked, Seen
from .models.outbox import PENDING, NewMessage
from .redelivery import Dead, RedeliverAfter, decide
from .stages import Stage

#: Seconds in a handler from which on a row marked before it is marked again after it,
#: so that `processed_at` is no more than this too early.
MARK_AGAIN_AFTER = 0.02
#: What a handler may raise that is its failure. Everything else ends the worker.
HANDLER_ERRORS = (Exception, SystemExit)


@dataclass(frozen=True, slots=True)
class Processed:
    """The stage's transaction is committed."""

    acknowledged: bool = False
    """Whether the broker's own transaction has settled the delivery already."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Nothing was to be done but to drop this copy."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The worker is stopping: leave the delivery to the broker, unacknowledged."""


Outcome = Processed | Duplicate | RedeliverAfter | Dead | Interrupted


@dataclass(frozen=True)
class Arrival:
    """A delivery in the hands of one worker thread, for one stage.

    `parked` is set when it comes from the inbox's parking place and not from the
    broker; `token` is the lease it is held under then.
    """

    stage: Stage
    delivery: Delivery
    session: Session
    worker: str
    stop: threading.Event
    parked: Parked | None = None
    token: uuid.UUID | None = None

    @property
    def using(self) -> str:
        """The database alias of the stage's transaction, and of its inbox."""
        return self.stage.definition.using


class LostRace(Exception):
    """Another copy of the message was processed while this one waited for the lock."""


def process(arrival: Arrival) -> Outcome:
    """Take one arrival through the stage and return what became of it.

    Raises BrokerUnavailable or a database's OperationalError when the world broke and
    not the message: nothing was decided then, and the arrival comes again.
    """
    stage = arrival.stage
    try:
        message = arrivals.read(arrival.delivery, stage)
    except DecodeError as error:
        return bury(arrival, None, error.reason, Failure.of(error))
    seen = _record(arrival, message)
    if seen is not None:
        if _nothing_to_do(arrival, seen):
            _ship_what_is_left(arrival, message)
            return Duplicate()
        if seen.attempt > stage.policy.max_attempts:
            return bury(arrival, seen, "worker_lost", _worker_lost(stage))
        if arrivals.expired(message, arrival.delivery, seen.now):
            failure = Failure.because("expired", "expired before it was processed")
            return bury(arrival, seen, "expired", failure)
    while True:
        attempt = seen.attempt if seen else 1
        began = time.monotonic()
        try:
            return _run(arrival, message.attempted(attempt), seen)
        except LostRace:
            return Duplicate()
        except BrokerUnavailable:
            raise
        except HANDLER_ERRORS as error:
            duration = time.monotonic() - began
            outcome, seen = failed(arrival, message, seen, error, duration)
            if outcome is not None:
                return outcome


def _record(arrival: Arrival, message: Message) -> Seen | None:
    """Count the arrival durably. Stages without an inbox do so only for messages that
    arrived before, so that they need no database as long as all goes well."""
    if arrival.parked is not None:
        return arrival.parked.seen
    outbox_mode = arrival.stage.transaction == "outbox"
    if not outbox_mode and not arrivals.came_before(arrival.delivery):
        return None
    inbox = InboxMessage.objects.db_manager(arrival.using)
    recorded = inbox.record(arrival.stage.name, [message], idempotent=not outbox_mode)
    return recorded[message.id]


def _nothing_to_do(arrival: Arrival, seen: Seen) -> bool:
    if arrival.parked is not None:
        return False
    if arrival.stage.transaction == "outbox":
        return seen.settled
    return seen.dead or seen.parked


def _ship_what_is_left(arrival: Arrival, message: Message) -> None:
    """Have the dispatcher send what the first processing stored and did not send."""
    stage = arrival.stage
    signals.announce(
        signals.message_duplicate,
        id=message.id,
        destination=message.destination,
        stage=stage.name,
    )
    waiting: dict[str, list[int]] = {}
    for pk, broker in (
        OutboxMessage.objects.using(arrival.using)
        .filter(PENDING, session_id=wire.session_id(message.id, stage.name))
        .values_list("id", "broker")
    ):
        waiting.setdefault(broker, []).append(pk)
    for broker, ids in waiting.items():
        signals.messages_committed.send_robust(
            sender=None, using=arrival.using, broker=broker, ids=ids
        )


def _run(arrival: Arrival, message: Message, seen: Seen | None) -> Processed:
    """Begin, run the stage, commit: the database first, then the broker."""
    stage, session = arrival.stage, arrival.session
    began = time.monotonic()
    inbox = InboxMessage.objects.db_manager(arrival.using)
    with (
        tracing.processing(message, stage.name),
        outbox.scope(stage_scope(arrival, message)),
    ):
        if stage.transaction == "broker_only":
            stage.handler(message)
            employed = False
        else:
            with Demarcation(stage.definition) as demarcation:
                if stage.transaction == "outbox":
                    assert seen is not None
                    if not inbox.take(seen.id, arrival.token):
                        raise LostRace
                with guarded(arrival.using):
                    stage.handler(message)
                if stage.transaction != "outbox":
                    # The last moment at which a dead broker costs nothing.
                    session.ping()
                elif seen and time.monotonic() - began > MARK_AGAIN_AFTER:
                    inbox.finish([seen.id])
            employed = demarcation.employed
    acknowledged = stage.transaction != "outbox"
    if acknowledged:
        _commit_broker(arrival, employed)
        if seen is not None:
            inbox.finish([seen.id])
    announce_processed(stage, message, time.monotonic() - began, employed)
    return Processed(acknowledged and arrival.parked is None)


def _commit_broker(arrival: Arrival, employed: bool) -> None:
    """Commit the broker's transaction; the database's is committed already."""
    began = time.monotonic()
    error: BrokerError | None = None
    try:
        arrival.session.commit([arrival.delivery] if arrival.parked is None else [])
    except BrokerError as raised:
        error = raised
    seconds = time.monotonic() - began
    if arrival.stage.transaction == "best_effort_1pc":
        arrivals.note_dangerous_window(arrival.stage, seconds, error, employed)
    if isinstance(error, DispatchRejected):
        raise error  # rolled back, and the delivery is still in hand
    if error is not None:
        # The broker redelivers it, or has committed. Parked as well, it would run
        # once more than that.
        raise BrokerUnavailable(f"the end of the transaction is unknown: {error}")


def failed(
    arrival: Arrival,
    message: Message,
    seen: Seen | None,
    error: BaseException,
    duration: float,
) -> tuple[Outcome | None, Seen | None]:
    """Decide about a failed attempt and make the decision durable.

    Returns the outcome, or None when the stage is to run again at once (blocking).
    """
    stage = arrival.stage
    if stage.transaction != "outbox":
        arrival.session.rollback()
    discard_broken(arrival.using)
    inbox = InboxMessage.objects.db_manager(arrival.using)
    if seen is None:
        seen = inbox.record(stage.name, [message], idempotent=True)[message.id]
    decision = decide(stage.policy, seen.attempt, error)
    failure = Failure.of(error)
    note = partial(_note_attempt, arrival, seen, failure, duration)
    if isinstance(decision, Dead):
        return bury(arrival, seen, decision.reason, failure, note), seen
    signals.announce(
        signals.message_redelivered,
        id=message.id,
        destination=message.destination,
        stage=stage.name,
        attempt=seen.attempt,
        delay=decision.delay,
        error=failure.exception.partition("\n")[0],
    )
    mode = stage.policy.mode
    if mode == "blocking":
        note()
        if arrival.stop.wait(decision.delay):
            return Interrupted(), seen
        return None, arrivals.started_again(seen, inbox.start_again(seen.id))
    if mode == "broker" and arrival.parked is None:
        note()
        _hand_back(arrival, seen, decision.delay)
        return decision, seen
    with transaction.atomic(using=arrival.using):
        note()
        inbox.park(
            seen.id,
            delay=decision.delay,
            headers=arrivals.kept_headers(arrival.delivery),
            body=arrival.delivery.body,
            error=failure.exception,
        )
    return decision, seen


def bury(
    arrival: Arrival,
    seen: Seen | None,
    reason: str,
    failure: Failure,
    note: Any = None,
) -> Dead:
    """Make the message a dead letter, whole, in one transaction with its inbox row."""
    delivery, stage = arrival.delivery, arrival.stage
    discard_broken(arrival.using)
    with transaction.atomic(using=arrival.using):
        if note is not None:
            note()
        if seen is not None:
            InboxMessage.objects.db_manager(arrival.using).mark_dead(
                seen.id, failure.exception
            )
        attempts = min(seen.attempt, stage.policy.max_attempts) if seen else 0
        dead_letters.bury(
            using=arrival.using,
            message_id=arrivals.identity(delivery, stage.broker),
            stage=stage.name,
            broker=stage.broker,
            destination=delivery.destination,
            headers=arrivals.kept_headers(delivery),
            body=delivery.body,
            reason=reason,
            failure=failure,
            attempts=attempts,
        )
    return Dead(reason)


def stage_scope(arrival: Arrival, message: Message) -> outbox.Scope:
    """Return what the messages that the stage sends for `message` belong to."""
    stage = arrival.stage
    entered = outbox.Scope(
        session_id=wire.session_id(message.id, stage.name),
        using=arrival.using,
        cause=message,
        stage=stage.name,
    )
    if stage.transaction != "outbox":
        service = conf.get().SERVICE

        def enlist(row: NewMessage) -> None:
            if row.delay:
                raise InvalidMessage(
                    f"The message to {row.destination!r} has a delay, which belongs to "
                    f"the outbox: stage {stage.name!r} has "
                    f'transaction="{stage.transaction}" and sends into the broker\'s '
                    f'transaction. Use transaction="outbox".'
                )
            headers = outbox.wire_headers(row, service, timezone.now())
            arrival.session.enlist(Outgoing(row.destination, headers, row.body))

        entered.enlist = enlist
    return entered


def announce_processed(
    stage: Stage, message: Message, duration: float, employed: bool
) -> None:
    """Tell that a stage's transaction is committed."""
    if not signals.announced(signals.message_processed):
        return
    signals.announce(
        signals.message_processed,
        id=message.id,
        destination=message.destination,
        stage=stage.name,
        attempt=message.delivery_attempt,
        duration=duration,
        critical_time=arrivals.critical_time(message),
        db="used" if employed else "unused",
        employed=employed,
    )


def discard_broken(using: str) -> None:
    """Close a connection that died, so that the next query opens another."""
    connection = connections[using]
    if connection.connection is None or connection.in_atomic_block:
        return
    if connection.errors_occurred and not connection.is_usable():
        connection.close()


def is_outage(error: BaseException, using: str) -> bool:
    """Return whether it was the database or the broker that failed, not the message:
    a deadlock or a lock's time-out leaves the connection usable."""
    if isinstance(error, OperationalError | InterfaceError):
        return not connections[using].is_usable()
    return isinstance(error, BrokerUnavailable)


def _hand_back(arrival: Arrival, seen: Seen, delay: float) -> None:
    """Give the broker a delayed copy, with proof; the delivery is acknowledged next."""
    headers = arrivals.kept_headers(arrival.delivery)
    headers[wire.FAILED_ATTEMPT] = str(seen.attempt)
    copy = Outgoing(arrival.delivery.destination, headers, arrival.delivery.body, delay)
    for error in arrival.session.send_delayed([copy]):
        if error is not None:
            raise BrokerUnavailable(str(error)) from error


def _note_attempt(
    arrival: Arrival, seen: Seen, failure: Failure, duration: float
) -> None:
    Attempt.objects.using(arrival.using).create(
        message_id=seen.message_id,
        stage=arrival.stage.name,
        number=seen.attempt,
        worker=arrival.worker,
        duration=duration,
        exception=failure.exception,
        traceback=failure.traceback,
        fingerprint=failure.fingerprint,
    )


def _worker_lost(stage: Stage) -> Failure:
    return Failure.because(
        "worker_lost",
        f"The last of {stage.policy.max_attempts} attempts began and never ended: the "
        f"worker died with it. Look for memory, signals and native crashes.",
    )
