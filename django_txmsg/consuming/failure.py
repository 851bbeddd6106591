"""Hop 7 after a failure of a stage: parks, redelivers or buries the message durably.

`redelivery.decide()` decides whether the message is dead or gets another attempt. Until
that attempt, the message waits in the inbox table, in its thread, or in the broker.
This module carries out the decision before the delivery is acknowledged.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from django.db import transaction

from .. import signals, wire
from ..brokers.base import Outgoing, insist
from ..dead_letters import burial
from ..envelope.failure import Failure
from ..envelope.redelivery import Dead, decide
from ..errors import (
    DecodeError,
    DestinationUnavailable,
    DispatchRejected,
    NewerCodeNeeded,
)
from ..models import Attempt
from ..models.inbox_arrival import InboxRecord
from ..runtime import liveness
from ..runtime.connections import close_broken
from . import decoding, ordering
from .arrival import Arrival, Duplicate, Interrupted, Outcome, Postponed
from .protocol import despite_conflicts

log = logging.getLogger("django_txmsg.inbox")

Made = TypeVar("Made")

#: Seconds until a stage claims a message again that it has parked with NewerCodeNeeded,
#: although it reads the named type: only its handler, or one step of a flow, does not.
#: Without a delay, the stage would claim the message again and again.
ASK_AGAIN = 10.0
#: What a DecodeError quotes from the message.
_QUOTED = re.compile(r"""(['"])(?:\\.|(?!\1)[^\\])*\1""")


def failed(arrival: Arrival, error: BaseException, duration: float) -> Outcome | None:
    """Decide what follows a failed attempt, and make the decision durable.

    Returns the outcome, or None if the stage must run again immediately (blocking
    redelivery).
    """
    message, stage = arrival.message, arrival.stage
    arrival.on_error(error)
    close_broken(arrival.using)
    inbox = arrival.inbox
    if arrival.record is None:
        rows = inbox.record(stage.name, [message], idempotent=True)
        arrival.count(rows[message.id])
    record = arrival.recorded
    decision = decide(stage.policy, record.attempt, error)
    failure = Failure.of(error)
    note = partial(_note_attempt, arrival, record, failure, duration)
    if isinstance(decision, Dead):
        return bury(arrival, decision.reason, failure, note)
    announce = partial(
        signals.announce,
        signals.message_redelivered,
        id=message.id,
        destination=message.destination,
        stage=stage.name,
        attempt=record.attempt,
        delay=decision.delay,
        error=failure.exception.partition("\n")[0],
    )
    if stage.policy.mode == "blocking":
        note()
        ordering.put_aside(arrival)
        announce()
        liveness.pauses(decision.delay)
        if arrival.stop.wait(decision.delay) or arrival.paused.is_set():
            if arrival.token is not None:
                inbox.unpark(record.id, arrival.token, attempts=0)
            return Interrupted()
        attempt = inbox.start_again(record.id, arrival.token)
        arrival.record = record.attempted(attempt)
        return None if attempt else Duplicate(is_copy=False)
    noted = (
        stage.policy.mode == "broker"
        and arrival.parked is None
        # At an ordered stage the copy would go to the end of the queue. If the messages
        # behind this one in the order fill the stage, it no longer receives.
        and arrival.turn is None
    )
    if noted:
        note()  # first: a kill after the hand-back must not lose the attempt's error
        ordering.put_aside(arrival)
        if _hand_back(arrival, record, decision.delay):
            announce()
            return decision

    def park() -> Outcome:
        parked = inbox.park(
            record.id,
            delay=decision.delay,
            headers=ordering.kept_headers(arrival),
            body=arrival.delivery.body,
            error=failure.exception,
            token=arrival.token,
        )
        if not parked:
            return Duplicate()
        ordering.put_aside(arrival)
        if not noted:
            note()
        return decision

    outcome = _durably(arrival, park)
    if outcome is decision:
        announce()
    return outcome


def unreadable(arrival: Arrival, error: DecodeError) -> Outcome:
    """Bury a message that the stage cannot read. If newer code could read the message,
    park it instead, without counting an attempt."""
    if arrival.parked is not None:
        arrival.record = arrival.parked.record
    if isinstance(error, NewerCodeNeeded):
        needs, reads = (error.name, error.version), arrival.stage.reads
        claims = reads is None or any(
            name == error.name and version >= error.version for name, version in reads
        )
        delay = ASK_AGAIN if claims else 0.0
        return postpone(arrival, str(error), needs=needs, delay=delay)
    failure = Failure.of(error)
    if error.reason == "invalid_body":
        # Grouped by the fault, not by the line of our code that found it, nor by what
        # the sender wrote: each group costs every reader of the state a row.
        fault = str(error)
        failure = Failure.because(error.reason, fault, _QUOTED.sub("", fault))
    return bury(arrival, error.reason, failure)


def bury(
    arrival: Arrival, reason: str, failure: Failure, note: Any = None
) -> Dead | Duplicate:
    """Make the message a dead letter, and mark its inbox row as dead, in one
    transaction.

    Changes nothing and returns Duplicate if the row no longer belongs to this worker:
    the message was already processed (perhaps by this worker, in a commit whose answer
    was lost), or the lease has ended and another worker has claimed the message.
    """
    delivery, stage, record = arrival.delivery, arrival.stage, arrival.record
    close_broken(arrival.using)

    def bury_it() -> Dead | Duplicate:
        if record is not None and not arrival.inbox.mark_dead(
            record.id, failure.exception, arrival.token
        ):
            return Duplicate()
        if note is not None:
            note()
        attempts = min(record.attempt, arrival.mode.max_begun) if record else 0
        burial.bury(
            using=arrival.using,
            message_id=record.message_id if record else arrival.message_id,
            stage=stage.name,
            broker=stage.broker,
            destination=delivery.destination,
            headers=ordering.kept_headers(arrival),
            body=delivery.body,
            reason=reason,
            failure=failure,
            attempts=attempts,
        )
        if record is not None:
            ordering.put_aside(arrival)
            ordering.wake([arrival])
        return Dead(reason)

    return _durably(arrival, bury_it)


def let_expire(arrival: Arrival) -> Duplicate:
    """Mark a flow's request as expired: the flow no longer waits for the answer, so the
    stage never processes the request. There is no dead letter, because an operator has
    nothing to decide."""

    headers, record = arrival.delivery.headers, arrival.recorded
    # The first time may be by another database's clock, that of the flow's service.
    log.info(
        "stage %r drops request %s of service %r: it expired at %s, and it is %s now",
        arrival.stage.name,
        record.message_id,
        headers.get(wire.SERVICE, ""),
        wire.expires(headers),
        record.now,
    )

    def revoke() -> Duplicate:
        why = "expired: its flow no longer waits for the answer"
        if arrival.inbox.mark_dead(record.id, why, arrival.token, revoked=True):
            ordering.put_aside(arrival)
            ordering.wake([arrival])
        return Duplicate(is_copy=False)

    return _durably(arrival, revoke)


def _durably(arrival: Arrival, decide_it: Callable[[], Made]) -> Made:
    """Call a function in a transaction, and repeat that after a conflict. Otherwise a
    conflict would make the handler run again, or would leave the message waiting until
    its lease ends."""
    return despite_conflicts(
        transaction.atomic(using=arrival.using)(decide_it), arrival.stop
    )


def postpone(
    arrival: Arrival,
    error: str,
    *,
    needs: tuple[str, int] | None = None,
    delay: float = 0.0,
    slot: int | None = None,
    key: str = "",
) -> Outcome:
    """Park a message for `delay` seconds without counting an attempt."""
    delivery, stage = arrival.delivery, arrival.stage
    inbox, record = arrival.inbox, arrival.record
    if arrival.parked is not None:
        record = record or arrival.parked.record
    while True:
        row = record
        if row is None:
            message = decoding.envelope(delivery, stage)
            row = inbox.record(stage.name, [message], together=True)[message.id]
            if row.settled:
                return Duplicate()
        parked = inbox.park(
            row.id,
            delay=delay,
            headers=arrival.kept_headers,
            body=delivery.body,
            error=error,
            token=arrival.token,
            needs=needs,
            slot=slot,
            key=key,
            turn=arrival.turn,
            # A claim counts an attempt, and so does most recording.
            uncounted=int(arrival.counted or arrival.token is not None),
        )
        if parked:
            return Postponed(readable=needs is None)
        # A crash of the server may lose the record, whose commit does not wait for the
        # disk; a transaction pooler in between hides the crash.
        if record or inbox.recall(row.id, stage.name, row.message_id):
            return Duplicate()


def _hand_back(arrival: Arrival, record: InboxRecord, delay: float) -> bool:
    """Send the broker a delayed copy of the message, and wait for the receipt. The
    caller then acknowledges the delivery. Returns False if the broker refuses the copy;
    then the caller parks the message."""
    headers = decoding.copied_headers(arrival.delivery.headers)
    # A foreign message gets its identity here: its copy has another broker's id.
    headers.setdefault(wire.MESSAGE_ID, str(record.message_id))
    headers[wire.FAILED_ATTEMPT] = str(record.attempt)
    copy = Outgoing(arrival.delivery.destination, headers, arrival.delivery.body, delay)
    outcomes = arrival.session.send_delayed([copy])
    try:
        for error in outcomes:
            insist(error)
    except (DestinationUnavailable, DispatchRejected) as refusal:
        log.info(
            "stage %r: the broker does not take message %s back, so it waits in "
            "the inbox: %s",
            arrival.stage.name,
            record.message_id,
            refusal,
        )
        return False
    return True


def _note_attempt(
    arrival: Arrival, record: InboxRecord, failure: Failure, duration: float
) -> None:
    Attempt.objects.using(arrival.using).create(
        message_id=record.message_id,
        stage=arrival.stage.name,
        number=record.attempt,
        worker=arrival.worker,
        duration=duration,
        exception=failure.exception,
        traceback=failure.traceback,
        fingerprint=failure.fingerprint,
    )
