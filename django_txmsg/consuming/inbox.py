"""Hop 7 for one arrival: process the message, and return its outcome.

The steps are: record → begin → run the stage, which stores the messages that it sends →
finish → dispatch → settle. For a duplicate, the stage does not run. Only the messages
that the first processing stored are dispatched. `protocol.py` has the steps from record
to finish. The consumer settles the delivery by its outcome. This module decides what
follows if a step fails.
"""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from dataclasses import replace

from django.db import connections
from django.utils import timezone

from .. import signals, tracing, wire
from ..django_internals import abandon, raw
from ..envelope.failure import Failure, cause_of, is_interrupt, stored_text
from ..envelope.message import Message
from ..errors import (
    BrokerUnavailable,
    DecodeError,
    DestinationUnavailable,
    DispatchRejected,
    NewerCodeNeeded,
)
from ..models import OutboxMessage
from ..models.inbox_arrival import InboxRecord
from ..models.outbox import PENDING
from ..rules.dead_letters import BODY_TOO_LONG
from ..runtime import database_health, liveness
from ..runtime.connections import close_broken
from ..runtime.leases import Lease
from ..stages import Stage
from . import decoding, ordering
from .arrival import Arrival, Duplicate, Interrupted, Outcome, Processed, SentBack
from .failure import bury, failed, let_expire, postpone, unreadable
from .protocol import Conflicts, LostRace, Undecided

log = logging.getLogger("django_txmsg.inbox")

#: How often the database may have no room for a message's work before that counts as a
#: failed attempt: about a minute, if there is room for the probes.
MAX_CROWDED = 10
#: How long an attempt that is not the message's fault may take to be subtracted, in
#: seconds.
GIVEN_BACK_WITHIN = 1.0
#: Faults of messages that cannot wait for newer code, because their id cannot be
#: trusted, or their headers or body cannot be stored.
NAMELESS = (
    *("malformed_headers", "headers_too_large", "malformed_id", "missing_id"),
    BODY_TOO_LONG,
)


def process(arrival: Arrival) -> Outcome:
    """Process one arrival with its stage and return the outcome.

    Raises BrokerUnavailable or a database error if the broker or the database fails.
    Nothing is decided then: call this again with the same arrival.
    """
    if arrival.parked is None and arrival.turn is None:
        return _decided(arrival)
    with _lease(arrival), ordering.in_hand(arrival):
        return _decided(arrival)


def _decided(arrival: Arrival) -> Outcome:
    while True:
        outcome = _process(arrival)
        if not isinstance(outcome, Duplicate):
            return outcome
        if not _is_forgotten(arrival):
            # A message from the inbox is no copy: another worker has claimed it.
            if outcome.is_copy and arrival.parked is None:
                signals.announce(
                    signals.message_duplicate,
                    id=arrival.message_id,
                    destination=arrival.delivery.destination,
                    stage=arrival.stage.name,
                )
            return outcome


def _is_forgotten(arrival: Arrival) -> bool:
    """Return whether the inbox row of a recorded arrival no longer exists. A crash of
    the database server may have lost the row, because its commit does not wait for the
    disk. If so, the message is not a duplicate."""
    record = arrival.record
    if record is None or arrival.parked is not None:
        return False
    return _recalled(arrival, record) is None


def _process(arrival: Arrival) -> Outcome:
    try:
        if arrival.came_before:
            # Recorded before its body is decoded: that may have killed a worker.
            decoding.checked(arrival.delivery, arrival.stage)
            arrival.message = decoding.envelope(arrival.delivery, arrival.stage)
            outcome = _recorded(arrival)
            if outcome is not None:
                return outcome
        _read(arrival)
    except DecodeError as error:
        if isinstance(error, NewerCodeNeeded) and not arrival.has_identity:
            return _adopt(arrival)
        return _unreadable(arrival, error)
    outcome = None if arrival.came_before else _recorded(arrival)
    return outcome or _worked(arrival)


def _recorded(arrival: Arrival) -> Outcome | None:
    """Count the arrival durably. Return its outcome if the stage must not run now, or
    None."""
    if not arrival.has_identity:
        return _adopt(arrival)
    if not _is_recorded(arrival):
        arrival.mode.record(arrival)
    elif arrival.counted and not arrival.recorded.attempt:
        # It was revoked, or another worker has claimed it. In mode "none" no
        # transaction checks that before the handler runs.
        return Duplicate(is_copy=False)
    if arrival.record is None or arrival.begun:
        return None
    return _foregone(arrival, arrival.record)


def _worked(arrival: Arrival) -> Outcome:
    """Run the stage until the outcome is certain, and return that outcome. A failure
    that the message did not cause does not count as an attempt."""
    mode, conflicts = arrival.mode, Conflicts()
    while True:
        liveness.turned(arrival.stage.timeout or 0.0)
        attempt = arrival.record.attempt if arrival.record else 1
        on = raw(connections[arrival.using])
        began = time.monotonic()
        try:
            if arrival.short is not None:
                raise arrival.short
            # In a copy of this thread's context: context variables of one attempt do
            # not leak into the next.
            given = arrival.message.attempted(attempt)
            return copy_context().run(run, arrival, given)
        except LostRace:
            if mode.transacted:
                return Duplicate(is_copy=False)  # the broker gave it to another worker
            return ordering.lost(arrival)
        except Undecided as refused:
            # Raise the database's error itself: its cause tells what kind it is.
            raise refused.error from cause_of(refused.error)
        except BaseException as error:
            if not is_handlers(error):
                if mode.is_turned_away(error):
                    # A silent broker, or a refused statement: not the message's fault.
                    _given_back(arrival)
                raise
            if arrival.begun:
                abandon(connections[arrival.using])
            arrival.begun = False
            if not mode.transacted and mode.is_outage(error, on):
                # The message itself may crash the server.
                arrival.count_again(error)
                raise
            mode.roll_back(arrival)
            if _is_crowded_out(arrival, error):
                raise
            if mode.is_turned_away(error):
                # A destination of the stage takes no messages now: not the message's
                # fault.
                _given_back(arrival)
                raise
            _renew(arrival)
            if conflicts.mends(error):
                # Not the message's fault, so no attempt is counted: retried at once,
                # then at growing intervals.
                if arrival.stop.wait(conflicts.pause):
                    return _given_back(arrival)
                _read(arrival)
                continue
            if isinstance(error, NewerCodeNeeded):
                # Newer code is needed not for the body, but for what the handler
                # loaded.
                return unreadable(arrival, error)
            outcome = failed(arrival, error, time.monotonic() - began)
            if outcome is not None:
                return outcome
            # Read again: the handler may have changed the object it was given.
            arrival.sent = None
            _read(arrival)


def is_handlers(error: BaseException) -> bool:
    """Return whether this error counts as a failed attempt. Every exception of a
    handler counts, including time-outs and cancellations that are not an `Exception`.
    Failures of the broker, failures of the package's own statements, and an interrupt
    of the process do not count."""
    others = isinstance(error, BrokerUnavailable | Undecided) or is_interrupt(error)
    return not others


def run(arrival: Arrival, message: Message) -> Processed:
    """Run one attempt: the stage's transaction, and the middlewares around it.

    Raises LostRace, and the errors of a middleware, the handler or a commit.
    """
    outside = arrival.stage.outside
    with tracing.processing(message, arrival.stage.name):
        if outside is None:
            return _in_transaction(arrival, message)
        on = raw(connections[arrival.using])
        ended: list[Processed | LostRace] = []

        def transact(given: Message) -> None:
            try:
                ended.append(_in_transaction(arrival, given))
            except LostRace as lost:
                ended.append(lost)  # another worker processed it

        def final(error: BaseException) -> bool:
            """Return True if neither the message nor its handler has caused the error.
            The middlewares must not decide about such an error."""
            lost = database_health.lost_conflict(error)
            outage = arrival.mode.is_outage(error, on)
            return lost or outage or not is_handlers(error)

        try:
            outside.run(message, transact, final)
        except BaseException as late:
            if not ended or is_interrupt(late):
                raise
            arrival.on_error(late)
            log.exception(
                "a middleware around stage %r raised after the commit; the message is "
                "processed and is not processed again: %s",
                arrival.stage.name,
                late,
            )
    if isinstance(ended[0], LostRace):
        raise ended[0]
    return ended[0]


def _in_transaction(arrival: Arrival, message: Message) -> Processed:
    mode, began = arrival.mode, time.monotonic()
    employed = mode.run(arrival, message)
    announce_processed(arrival.stage, message, time.monotonic() - began, employed)
    return Processed(mode.transacted and arrival.parked is None)


def announce_processed(
    stage: Stage, message: Message, duration: float, employed: bool
) -> None:
    """Send the signal that a stage has processed a message. Call this after the
    commit."""
    if not signals.announced(signals.message_processed):
        return
    signals.announce(
        signals.message_processed,
        id=message.id,
        destination=message.destination,
        stage=stage.name,
        attempt=message.delivery_attempt,
        duration=duration,
        critical_time=_critical_time(message),
        db="used" if employed else "unused",
        employed=employed,
    )


def _critical_time(message: Message) -> float | None:
    """Return the seconds since the message was stored, or None if that time is unknown.
    The sender's clock may be ahead of ours, so never return a negative time: a sum that
    falls looks like the counter of a process that has started again."""
    if message.created_at is None:
        return None
    return max(0.0, (timezone.now() - message.created_at).total_seconds())


def _is_crowded_out(arrival: Arrival, error: BaseException) -> bool:
    """Return True if the handler failed because the database lacks disk space, memory
    or connections. The failure does not count as an attempt then. After MAX_CROWDED
    such failures of one message, return False, so that the message's further failures
    count."""
    if not database_health.lacks_resources(error):
        return False
    arrival.crowded += 1
    return arrival.crowded <= MAX_CROWDED


def _read(arrival: Arrival) -> None:
    """Decode the message. If this raises MemoryError, keep the error, which later
    counts as a failed attempt: the body may be too large, and endless retries would
    block all other messages."""
    delivery, stage = arrival.delivery, arrival.stage
    try:
        arrival.message, arrival.short = decoding.read(delivery, stage), None
    except MemoryError as error:
        arrival.message, arrival.short = decoding.envelope(delivery, stage), error


def _unreadable(arrival: Arrival, error: DecodeError) -> Outcome:
    """Bury a message that the stage cannot read, or park it for newer code. At an
    ordered stage the message first waits for its turn, because its followers look for
    its row in the inbox."""
    at_once = isinstance(error, NewerCodeNeeded) or error.reason in NAMELESS
    # If it came before, `_recorded()` has already waited for its turn.
    if arrival.turn is None or at_once or arrival.came_before:
        return Duplicate() if _is_a_copy(arrival) else unreadable(arrival, error)
    message = decoding.envelope(arrival.delivery, arrival.stage)
    rows = arrival.inbox.record(arrival.stage.name, [message], together=True)
    if arrival.count(rows[message.id], attempt=False).settled:
        return Duplicate()
    waiting = ordering.out_of_turn(arrival, attempts=0)
    return waiting or unreadable(arrival, error)


def _is_a_copy(arrival: Arrival) -> bool:
    """Return whether an unreadable arrival has the id of a message that the stage has
    processed, buried or parked. The arrival is then a duplicate, as if it could be
    read: this code may be older than the code that read the first copy. A dead letter
    would raise an alarm about a processed message, and its answer would revoke a parked
    one. If the row of the id is still open, the arrival is buried with that row."""
    if arrival.parked is not None:
        return False
    record = arrival.inbox.known(arrival.stage.name, arrival.message_id)
    arrival.record = record
    return record is not None and record.settled


def _given_back(arrival: Arrival) -> Interrupted:
    """Subtract an attempt that failed without the message's fault. If the message was
    parked, also release its lease."""
    rows, record = arrival.inbox, arrival.record
    if record is not None and arrival.token is not None:
        rows.unpark(record.id, arrival.token)
    elif record is not None:
        # If this fails, the arrival is tried again, and recorded again.
        arrival.record, arrival.counted = None, False
        rows.unrecord(record.id)
    return Interrupted()


def _adopt(arrival: Arrival) -> Outcome:
    """Give a message from another system a stable id before a stage processes it. The
    message is sent back to its queue with the id and arrives again. If the queue
    currently accepts no messages, the message is parked. If the broker rejects the
    message, it is buried."""
    delivery = decoding.named(arrival.delivery)
    try:
        decoding.send_back(delivery, arrival.session)
    except DestinationUnavailable as error:
        return postpone(replace(arrival, delivery=delivery), stored_text(error))
    except DispatchRejected as error:
        detail = f"it cannot go back to its queue under an id of ours: {error}"
        failure = Failure.because("rejected", detail)
        return bury(replace(arrival, delivery=delivery), "rejected", failure)
    return SentBack()


def _lease(arrival: Arrival) -> AbstractContextManager[object]:
    """Renew the lease of a parked message while the stage processes the message. If the
    stage keeps the message's row locked during that time (`Mode.locks_parked()`), do
    nothing: no other worker can claim the message."""
    parked, token = arrival.parked, arrival.token
    if parked is None or token is None or arrival.mode.locks_parked():
        return nullcontext()
    pk, seconds, rows = parked.record.id, parked.lease, arrival.inbox
    return Lease(
        arrival.using,
        seconds,
        lambda: rows.extend(pk, token, seconds),
        since=parked.since,
    )


def _renew(arrival: Arrival) -> None:
    """Renew the lease of a parked message whose row was locked until the attempt
    failed, so that nothing could renew it. Otherwise another worker might claim the
    message before its failure is recorded, or before it runs again.

    The connection may have ended while the handler ran. An error of the renewal would
    hide the handler's error, and the attempt would not count."""
    parked, token = arrival.parked, arrival.token
    if parked is None or token is None:
        return
    if time.monotonic() - parked.since > parked.lease / 2:
        close_broken(arrival.using)
        arrival.inbox.extend(parked.record.id, token, parked.lease)


def _is_recorded(arrival: Arrival) -> bool:
    """Return whether an arrival is recorded already. If so, also set `arrival.record`.
    A parked message was recorded before it was parked. An arrival that is tried again
    may have been recorded at its first try."""
    before, parked, inbox = arrival.record, arrival.parked, arrival.inbox
    arrival.begun = False
    if before is None:
        if parked is not None:
            arrival.count(parked.record)
        return parked is not None
    if parked is not None and arrival.token is not None:
        inbox.extend(before.id, arrival.token, parked.lease)
    arrival.record = record = _recalled(arrival, before)
    if record is None:
        return False
    if not arrival.counted and not arrival.mode.is_done(arrival, record):
        arrival.count(record.attempted(inbox.start_again(record.id, arrival.token)))
    return True


def _recalled(arrival: Arrival, before: InboxRecord) -> InboxRecord | None:
    found: InboxRecord | None = arrival.inbox.recall(
        before.id, arrival.stage.name, arrival.message_id
    )
    return found


def _foregone(arrival: Arrival, record: InboxRecord) -> Outcome | None:
    """Return the message's outcome if the stage must not run, or None if the stage must
    run."""
    mode = arrival.mode
    reason = mode.reason_not_to_run(arrival, record)
    if reason == "worker_lost" and mode.transacted and arrival.error is None:
        # A broker redelivers as soon as a connection ends. The thread that had the
        # message may be about to give its attempt back.
        stops = arrival.stop.wait(GIVEN_BACK_WITHIN)
        seen = _recalled(arrival, record)
        if stops:
            return _given_back(arrival)
        if seen is None:
            return Duplicate()  # of a row that is forgotten: it is recorded again
        arrival.record = record = seen
        reason = mode.reason_not_to_run(arrival, record)
    if reason == "settled":
        _ship_what_is_left(arrival)
        return Duplicate()
    waiting = None if arrival.turn is None else ordering.out_of_turn(arrival)
    if waiting is not None or not reason:
        return waiting
    if reason == "expired" and wire.is_request(arrival.delivery.headers):
        return let_expire(arrival)
    if reason == "expired":
        failure = Failure.because(reason, "expired before it was processed")
    elif arrival.error is not None:
        reason, failure = "attempts_exhausted", Failure.of(arrival.error)
    else:
        failure = _worker_lost(arrival.stage)
    return bury(arrival, reason, failure)


def _ship_what_is_left(arrival: Arrival) -> None:
    """When the stage processed a message for the first time, the stage may have stored
    other messages. Wake the dispatcher for those that are still pending."""
    waiting: dict[str, list[int]] = {}
    for pk, broker in (
        OutboxMessage.objects.using(arrival.using)
        .filter(PENDING, session_id=arrival.session_id)
        .values_list("id", "broker")
    ):
        waiting.setdefault(broker, []).append(pk)
    for broker, ids in waiting.items():
        signals.messages_committed.send_robust(
            sender=None, using=arrival.using, broker=broker, ids=ids
        )


def _worker_lost(stage: Stage) -> Failure:
    return Failure.because(
        "worker_lost",
        f"The last of {stage.policy.max_begun} attempts began and never ended: the "
        f"worker died with it. Look for memory, signals and native crashes.",
    )
