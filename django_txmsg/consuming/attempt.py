"""Around hop 8: one attempt, from the beginning of its transaction to its commit.

Begin → run the stage, which stores what it sends → commit; and around it all, the
middlewares outside of the transaction. `inbox.py` and `failure.py` decide what an
exception means.
"""

from __future__ import annotations

import logging
import time
import uuid

from django.db import Error as AnyDatabaseError
from django.db import connections
from django.utils import timezone

from .. import conf, signals, tracing, wire
from ..brokers.base import Outgoing
from ..django_internals import raw
from ..envelope.failure import is_interrupt
from ..envelope.message import Message
from ..errors import (
    BrokerError,
    BrokerUnavailable,
    DeliveryLost,
    DestinationUnavailable,
    DispatchRejected,
    InvalidMessage,
)
from ..models import InboxMessage
from ..models.inbox_record import Seen
from ..models.outbox_store import NewMessage
from ..sending.scope import Scope, in_scope
from ..stages import Stage
from . import ordering
from .outcomes import Arrival, Processed
from .transaction import (
    StageTransaction,
    Undecided,
    guarded,
    is_outage,
    lost_conflict,
    ours,
)

#: Not named after this module: log configurations refer to the existing names.
log = logging.getLogger("django_txmsg.arrival")
inbox_log = logging.getLogger("django_txmsg.inbox")

#: If a handler took this many seconds, a row marked before it is marked again after it,
#: so that `processed_at` is at most this much too early.
MARK_AGAIN_AFTER = 0.02


def is_handlers(error: BaseException) -> bool:
    """Return whether the handler's failure ended an attempt. Everything it raises
    counts, including time-outs and cancellations that are no `Exception`."""
    others = isinstance(error, BrokerUnavailable | Undecided) or is_interrupt(error)
    return not others


class LostRace(Exception):
    """Another copy of the message was processed while this one waited for the lock, or
    another worker has taken it."""


def run(
    arrival: Arrival, message: Message, seen: Seen | None, begun: bool
) -> Processed:
    """Run one attempt, with the stage's middlewares around its transaction. `begun`
    means that the transaction has begun already, and has taken the message's row.

    Raises LostRace, and whatever a middleware, the handler or a commit raises.
    """
    outside, on = arrival.stage.outside, raw(connections[arrival.using])
    with tracing.processing(message, arrival.stage.name):
        if outside is None:
            return _in_transaction(arrival, message, seen, begun)
        ended: list[Processed | LostRace] = []

        def transact(given: Message) -> None:
            try:
                ended.append(_in_transaction(arrival, given, seen, begun))
            except LostRace as lost:
                ended.append(lost)  # processed, by somebody else

        def final(error: BaseException) -> bool:
            """Errors that are not the message's fault bypass the middlewares."""
            faultless = lost_conflict(error) or is_outage(error, on)
            return faultless or not is_handlers(error)

        try:
            outside.run(message, transact, final)
        except BaseException as late:
            if not ended or is_interrupt(late):
                raise
            inbox_log.exception(
                "a middleware around stage %r raised after the commit; the message is "
                "processed and is not processed again: %s",
                arrival.stage.name,
                late,
            )
    if isinstance(ended[0], LostRace):
        raise ended[0]
    return ended[0]


def _in_transaction(
    arrival: Arrival, message: Message, seen: Seen | None, begun: bool
) -> Processed:
    """Begin, run the stage, commit: the database first, then the broker."""
    stage, session = arrival.stage, arrival.session
    began = time.monotonic()
    inbox = InboxMessage.objects.db_manager(arrival.using)
    scope = stage_scope(arrival, message)
    if stage.transaction == "broker_only":
        with in_scope(scope):
            stage.handler(message)
        employed = False
    else:
        with StageTransaction(stage.definition, begun=begun) as transaction:
            if stage.transaction == "outbox" and not begun:
                assert seen is not None
                with ours():
                    taken = inbox.take(seen.id, arrival.token, arrival.turn)
                if not taken:
                    raise LostRace
            # Left before the commit: its hooks do not belong to the stage any more.
            with in_scope(scope), guarded(arrival.using):
                stage.handler(message)
            if stage.transaction != "outbox":
                # The last moment at which a dead broker costs nothing.
                session.ping()
            with ours():
                late = time.monotonic() - began > MARK_AGAIN_AFTER
                if stage.transaction == "outbox" and seen and late:
                    inbox.finish([seen.id])
                if stage.ordered:
                    ordering.wake(arrival)
        employed = transaction.employed
    acknowledged = stage.transaction != "outbox"
    if acknowledged:
        _commit_broker(arrival, employed)
        if seen is not None:
            _note_processed(arrival, seen)
    announce_processed(stage, message, time.monotonic() - began, employed)
    return Processed(acknowledged and arrival.parked is None)


def _note_processed(arrival: Arrival, seen: Seen) -> None:
    """Mark the inbox rows of a message whose work is committed everywhere. If that is
    refused, only the mark is lost."""
    try:
        InboxMessage.objects.db_manager(arrival.using).finish([seen.id])
    except AnyDatabaseError as error:
        log.warning(
            "stage %r: message %s is processed, and cannot be marked so: %s",
            arrival.stage.name,
            seen.message_id,
            error,
        )


def stage_scope(arrival: Arrival, message: Message) -> Scope:
    """Return the scope of the messages that the stage sends for `message`."""
    stage = arrival.stage
    entered = Scope(
        session_id=session_id(message, stage),
        using=arrival.using,
        cause=message,
        stage=stage.name,
        worker=arrival.worker,
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
    return entered


def session_id(message: Message, stage: Stage) -> uuid.UUID:
    return wire.session_id(conf.get().SERVICE, message.id, stage.name)


def announce_processed(
    stage: Stage, message: Message, duration: float, employed: bool
) -> None:
    """Announce that a stage's transaction is committed."""
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
        _note_dangerous_window(arrival.stage, seconds, error, employed)
    if isinstance(error, DeliveryLost):
        log.warning(
            "stage %r: the work is done here, and %s", arrival.stage.name, error
        )
        raise LostRace  # no failure: who has it by now ends it
    if isinstance(error, DispatchRejected | DestinationUnavailable):
        raise error  # rolled back, and the delivery is still in hand
    if error is not None:
        # The broker redelivers it, or has committed. If it were parked as well, it
        # would run once more than that.
        raise BrokerUnavailable(f"the end of the transaction is unknown: {error}")


def _note_dangerous_window(
    stage: Stage, seconds: float, error: BrokerError | None, employed: bool
) -> None:
    """Measure the time between the database's commit and the broker's, and log an error
    if the second failed."""
    if error is not None:
        log.log(
            logging.ERROR if employed else logging.WARNING,
            "stage %r: the broker's commit failed after the database's (%s); the "
            "message comes again, to a handler that must be idempotent: %s",
            stage.name,
            "db=used" if employed else "db=unused",
            error,
        )
    signals.dangerous_window.send_robust(
        sender=None,
        stage=stage.name,
        seconds=seconds,
        failed=error is not None,
        employed=employed,
    )


def _critical_time(message: Message) -> float | None:
    """Return the seconds since the message was stored, as far as the clocks agree."""
    if message.created_at is None:
        return None
    return (timezone.now() - message.created_at).total_seconds()
