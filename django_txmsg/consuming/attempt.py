"""Around hop 8: one attempt, with the middlewares outside of its transaction.

`modes.py` begins, runs and commits; `inbox.py` and `failure.py` decide what an
exception means.
"""

from __future__ import annotations

import logging
import time

from django.db import connections
from django.utils import timezone

from .. import signals, tracing
from ..django_internals import raw
from ..envelope.failure import is_interrupt
from ..envelope.message import Message
from ..errors import BrokerUnavailable
from ..models.inbox import Seen
from ..stages import Stage
from . import modes
from .arrival import Arrival
from .outcomes import Processed
from .protocol import LostRace
from .transaction import Undecided, is_outage, lost_conflict

log = logging.getLogger("django_txmsg.inbox")


def is_handlers(error: BaseException) -> bool:
    """Return whether the handler's failure ended an attempt. Everything it raises
    counts, including time-outs and cancellations that are no `Exception`."""
    others = isinstance(error, BrokerUnavailable | Undecided) or is_interrupt(error)
    return not others


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
            log.exception(
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
    stage, began = arrival.stage, time.monotonic()
    mode = modes.of(stage)
    employed = mode.run(arrival, message, seen, begun)
    announce_processed(stage, message, time.monotonic() - began, employed)
    return Processed(mode.transacted and arrival.parked is None)


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


def _critical_time(message: Message) -> float | None:
    """Return the seconds since the message was stored, as far as the clocks agree."""
    if message.created_at is None:
        return None
    return (timezone.now() - message.created_at).total_seconds()
