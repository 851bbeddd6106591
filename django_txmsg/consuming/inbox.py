"""Hop 7, the heart: one arrival of a message becomes one outcome.

record (a duplicate? then ship what is left) → begin → run the stage, which stores what
it sends → commit → dispatch → settle, which the consumer does by the outcome.
Whatever is killed between two of these steps, the next arrival goes on from there.
"""

from __future__ import annotations

import random
import time
import uuid
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from django.db import DatabaseError, connections
from django.utils import timezone

from .. import conf, signals, tracing, wire
from ..brokers.base import Outgoing
from ..envelope.failure import Failure
from ..envelope.message import Message
from ..errors import (
    BrokerError,
    BrokerUnavailable,
    DecodeError,
    DispatchRejected,
    InvalidMessage,
)
from ..models import InboxMessage, OutboxMessage
from ..models.inbox_seen import Seen
from ..models.outbox import PENDING
from ..models.outbox_store import NewMessage
from ..sending import storing
from ..sending.scope import Scope, in_scope
from ..stages import Stage
from ..upkeep import outage
from ..upkeep.leases import Lease
from . import arrival as arrivals
from .arrival import Arrival, Duplicate, Interrupted, Outcome, Processed
from .failing import bury, failed, is_outage
from .transaction import Demarcation, abandon, begins_early, guarded, lost_conflict

#: Seconds in a handler from which on a row marked before it is marked again after it,
#: so that `processed_at` is no more than this too early.
MARK_AGAIN_AFTER = 0.02
#: What ends the attempt and is not the handler's failure. Whatever else it raises is,
#: the time-outs and cancellations that are no `Exception` included.
NOT_HANDLERS = (BrokerUnavailable, KeyboardInterrupt)


#: Times that a stage runs again at once after its transaction lost against another.
MAX_CONFLICTS = 10


class LostRace(Exception):
    """Another copy of the message was processed while this one waited for the lock."""


def process(arrival: Arrival) -> Outcome:
    """Take one arrival through the stage and return what became of it.

    Raises BrokerUnavailable or a database's error when the world broke and not the
    message: nothing was decided then. Ask again with the same arrival.
    """
    with _lease(arrival):
        return _process(arrival)


def _process(arrival: Arrival) -> Outcome:
    stage = arrival.stage
    try:
        message = arrivals.read(arrival.delivery, stage)
    except DecodeError as error:
        seen = None if arrival.parked is None else arrival.parked.seen
        return bury(arrival, seen, error.reason, Failure.of(error))
    if not arrivals.has_identity(arrival.delivery):
        return _adopt(arrival)
    seen, begun = _record(arrival, message)
    if seen is not None and not begun:
        outcome = _foregone(arrival, message, seen)
        if outcome is not None:
            return outcome
    conflicts = 0
    while True:
        attempt = seen.attempt if seen else 1
        raw = connections[arrival.using].connection
        began = time.monotonic()
        try:
            return _run(arrival, message.attempted(attempt), seen, begun)
        except LostRace:
            return Duplicate()
        except NOT_HANDLERS:
            raise
        except BaseException as error:
            if begun:
                abandon(arrival.using)
            begun = False
            if stage.transaction == "outbox" and is_outage(error, raw):
                raise
            if conflicts < MAX_CONFLICTS and lost_conflict(error):
                # Nobody's fault, and no attempt: at once again, then further apart.
                conflicts += 1
                if stage.transaction != "outbox":
                    arrival.session.rollback()
                if arrival.stop.wait(random.uniform(0, min(0.5, 0.002 * 2**conflicts))):  # noqa: S311
                    return Interrupted()
                message = arrivals.read(arrival.delivery, stage)
                continue
            duration = time.monotonic() - began
            outcome, seen = failed(arrival, message, seen, error, duration)
            if outcome is not None:
                return outcome
            # Read again: the handler may have changed what it was given.
            message = arrivals.read(arrival.delivery, stage)


def _adopt(arrival: Arrival) -> Outcome:
    """Give a foreign message an identity that lasts, before anything is done for it:
    it comes again under that one. What the broker does not take back is buried."""
    delivery = arrivals.named(arrival.delivery)
    try:
        return arrivals.send_back(delivery, arrival.session)
    except DispatchRejected as error:
        detail = f"it cannot go back to its queue under an id of ours: {error}"
        failure = Failure.because("rejected", detail)
        return bury(replace(arrival, delivery=delivery), None, "rejected", failure)


def _lease(arrival: Arrival) -> AbstractContextManager[object]:
    """Keep a parked message for as long as it takes. In mode outbox the lock on its
    row keeps others away, until a blocking redelivery waits without one."""
    stage, parked, token = arrival.stage, arrival.parked, arrival.token
    locked = stage.transaction == "outbox" and stage.policy.mode != "blocking"
    if parked is None or token is None or locked:
        return nullcontext()
    pk, seconds = parked.seen.id, parked.lease
    rows = InboxMessage.objects.db_manager(arrival.using)
    return Lease(arrival.using, seconds, lambda: rows.extend(pk, token, seconds))


def _record(arrival: Arrival, message: Message) -> tuple[Seen | None, bool]:
    """Count the arrival durably. Stages without an inbox do so only for messages that
    arrived before, so that they need no database as long as all goes well.

    Returns what is known of the message, and whether its transaction has begun.
    """
    if arrival.parked is not None:
        return arrival.parked.seen, False
    stage, using = arrival.stage, arrival.using
    inbox = InboxMessage.objects.db_manager(using)
    if stage.transaction != "outbox":
        if not arrivals.came_before(arrival.delivery):
            return None, False
        return inbox.record(stage.name, [message], idempotent=True)[message.id], False
    connections[using].ensure_connection()
    if begins_early(using):
        mark = str(uuid.uuid4())
        try:
            seen, taken = inbox.record_and_begin(
                stage.name, message, stage.definition.isolation, mark
            )
        except DatabaseError as error:
            if outage.is_away(error):
                raise
            # A lock's time-out, perhaps: once more, step by step.
            abandon(using)
            already = inbox.recorded(stage.name, message, mark)
            if already is not None:
                return already, False
        else:
            if taken and not _reason_not_to_run(arrival, message, seen):
                return seen, True
            abandon(using)
            return seen, False
    return inbox.record(stage.name, [message])[message.id], False


def _foregone(arrival: Arrival, message: Message, seen: Seen) -> Outcome | None:
    """Return what becomes of a message without running its stage; None to run it."""
    match _reason_not_to_run(arrival, message, seen):
        case "settled":
            _ship_what_is_left(arrival, message)
            return Duplicate()
        case "worker_lost" as reason:
            return bury(arrival, seen, reason, _worker_lost(arrival.stage))
        case "expired" as reason:
            failure = Failure.because(reason, "expired before it was processed")
            return bury(arrival, seen, reason, failure)
    return None


def _reason_not_to_run(arrival: Arrival, message: Message, seen: Seen) -> str:
    if _nothing_to_do(arrival, seen):
        return "settled"
    if seen.attempt > arrival.stage.policy.max_attempts:
        return "worker_lost"
    return "expired" if arrivals.expired(message, arrival.delivery, seen.now) else ""


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
        .filter(PENDING, session_id=_session_id(message, stage))
        .values_list("id", "broker")
    ):
        waiting.setdefault(broker, []).append(pk)
    for broker, ids in waiting.items():
        signals.messages_committed.send_robust(
            sender=None, using=arrival.using, broker=broker, ids=ids
        )


def _run(
    arrival: Arrival, message: Message, seen: Seen | None, begun: bool
) -> Processed:
    """Begin, run the stage, commit: the database first, then the broker."""
    stage, session = arrival.stage, arrival.session
    began = time.monotonic()
    inbox = InboxMessage.objects.db_manager(arrival.using)
    scope = stage_scope(arrival, message)
    with tracing.processing(message, stage.name):
        if stage.transaction == "broker_only":
            with in_scope(scope):
                stage.handler(message)
            employed = False
        else:
            with Demarcation(stage.definition, begun=begun) as demarcation:
                if stage.transaction == "outbox" and not begun:
                    assert seen is not None
                    if not inbox.take(seen.id, arrival.token):
                        raise LostRace
                # Left before the commit: its hooks are no part of the stage any more.
                with in_scope(scope):
                    with guarded(arrival.using):
                        stage.handler(message)
                    storing.flush(arrival.using)
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


def stage_scope(arrival: Arrival, message: Message) -> Scope:
    """Return what the messages that the stage sends for `message` belong to."""
    stage = arrival.stage
    entered = Scope(
        session_id=_session_id(message, stage),
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
            created = wire.format_instant(timezone.now())
            headers = wire.headers_of(row, service, created)
            arrival.session.enlist(Outgoing(row.destination, headers, row.body))

        entered.enlist = enlist
    else:
        entered.gathers = connections[arrival.using]
    return entered


def _session_id(message: Message, stage: Stage) -> uuid.UUID:
    return wire.session_id(conf.get().SERVICE, message.id, stage.name)


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


def _worker_lost(stage: Stage) -> Failure:
    return Failure.because(
        "worker_lost",
        f"The last of {stage.policy.max_attempts} attempts began and never ended: the "
        f"worker died with it. Look for memory, signals and native crashes.",
    )
