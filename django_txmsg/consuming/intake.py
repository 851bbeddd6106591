"""Makes dead letters of the messages in the broker's own dead-letter queues, with the
broker's reason.

Runs in `manage.py consume`, for the queues in TXMSG["DEAD_LETTER_DESTINATIONS"].
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import Any

from django.db import OperationalError, connections, router, transaction

from .. import conf, signals, wire
from ..brokers import get_broker
from ..brokers.base import Broker, Delivery, Session
from ..dead_letters import burial
from ..envelope.failure import Failure
from ..envelope.message import check_destination
from ..errors import (
    BrokerUnavailable,
    DestinationUnavailable,
    DispatchRejected,
    InvalidMessage,
)
from ..models import DeadLetter, InboxMessage
from ..models.fields import limit_waits
from ..models.inbox_order import PATIENCE
from ..rules.dead_letters import BODY_TOO_LONG
from ..runtime import database_health, liveness
from ..runtime.breaker import Breaker
from ..runtime.connections import recycle
from ..runtime.liveness import Activity
from ..stages import Stage, all_stages
from . import decoding
from .arrival import turn_of

log = logging.getLogger("django_txmsg.intake")


class IntakeThread:
    """Makes dead letters of the messages in one dead-letter queue of the broker. The
    thread's work is `run()`."""

    def __init__(
        self, broker: str, destination: str, stop: threading.Event, activity: Activity
    ) -> None:
        self._broker, self._destination = broker, destination
        self._stopping, self._activity = stop, activity
        self._breaker = Breaker(
            broker,
            conf.get().RELAY.BREAKER_MAX_PAUSE,
            follows=f"messages stay in {destination}",
        )
        self._using = router.db_for_write(DeadLetter)

    def run(self) -> None:
        """Run until stopped."""
        while not self._stopping.is_set():
            liveness.turned()
            try:
                broker = get_broker(self._broker)
                with broker.open() as session:
                    session.subscribe(self._destination, prefetch=10)
                    self._take_in(broker, session)
            except BrokerUnavailable as error:
                self._breaker.failed(error)
                liveness.turned(self._breaker.remaining)
                self._stopping.wait(self._breaker.remaining)
            except Exception:
                log.exception("%s: unexpected error; continuing", self._destination)
                self._stopping.wait(1.0)

    def _take_in(self, broker: Broker, session: Session) -> None:
        # Deliveries that cannot be buried yet. The prefetch limits their number.
        kept: list[Delivery] = []
        while database_health.wait(self._using, self._stopping):
            liveness.turned()
            delivery = session.receive(0.5)
            self._breaker.worked()
            recycle(idle=delivery is None, but=broker.stored_in)
            if self._stopping.is_set():
                continue
            if delivery is not None:
                kept += _identified(delivery, session)
                self._activity.note()
            kept = [one for one in kept if not self._settled(one, session)]

    def _settled(self, delivery: Delivery, session: Session) -> bool:
        if not self._buried(delivery):
            return False
        session.ack([delivery])
        self._activity.note()
        return True

    def _buried(self, delivery: Delivery) -> bool:
        """Bury a delivery. Returns False if this must be tried again, after the next
        delivery: a worker has locked the message's row, or the database of the
        message's stage has failed.

        After a failure of the intake's own database, try again until that succeeds, or
        until the consumer stops."""
        what = f"{self._destination}: a message cannot be taken in, and is kept"
        while True:
            liveness.turned()
            using = self._using
            try:
                stage, letter = self._letter(delivery)
                if stage is not None:
                    using = stage.definition.using
                elsewhere = using != self._using
                if elsewhere and not database_health.retry(using, what).ready:
                    return False
                given_up = stage is not None and _given_up(stage, delivery, letter)
                if given_up is False:
                    using = self._using
                    with transaction.atomic(using=using):
                        burial.bury(**letter, using=using, stage="", attempts=0)
            except Exception as error:
                retry = database_health.retry(using, what)
                if using != self._using:
                    retry.failed(error)
                    return False
                if not retry.after(error, self._stopping):
                    return False
            else:
                database_health.retry(using, what).worked()
                return given_up is not None

    def _letter(self, delivery: Delivery) -> tuple[Stage | None, dict[str, Any]]:
        """Return the stage that may have received a delivery's message, and the values
        of the message's dead letter."""
        broker = get_broker(self._broker)
        reason, named = broker.dead_letter_cause(delivery.headers)
        origin = _sendable(named) or self._destination
        code, why = "broker", reason or f"found in {self._destination}"
        if delivery.cut:
            code, why = BODY_TOO_LONG, delivery.problem
        return _only_stage(named, self._broker), {
            "message_id": decoding.identity(delivery, self._broker),
            "broker": self._broker,
            "destination": origin,
            "headers": decoding.kept_headers(delivery),
            "body": delivery.body,
            "reason": code,
            "failure": Failure.because(code, why),
        }


def _identified(delivery: Delivery, session: Session) -> list[Delivery]:
    """Return a delivery with the id that its stage would give it, so that a redelivery
    is the same message. A delivery without any id is sent back with a new id, and is
    not returned."""
    delivery = decoding.recognised(delivery)
    if decoding.has_identity(delivery) or delivery.problem:
        return [delivery]
    delivery = decoding.named(delivery)
    try:
        decoding.send_back(delivery, session)
    except (DispatchRejected, DestinationUnavailable):
        # A worker that dies before the acknowledgement leaves two dead letters.
        return [delivery]
    return []


def _only_stage(origin: str, broker: str) -> Stage | None:
    """Return the only stage that consumes the queue `origin`, if one transaction
    contains the stage's work and its mark in the inbox. At RabbitMQ, a topic's
    subscription is such a queue. For a topic, return None: its message may have been
    another subscriber's."""
    found = [
        one
        for one in all_stages()
        if one.broker == broker and origin in (one.destination, one.subscriber)
    ]
    if len(found) != 1 or wire.is_topic(origin) or found[0].transaction != "outbox":
        return None
    return found[0]


def _given_up(stage: Stage, delivery: Delivery, letter: dict[str, Any]) -> bool | None:
    """Bury a message as its stage's dead letter, if the stage has received the message
    but has neither settled nor parked it. The stage will not receive the message again.
    So its inbox row would stay open for ever, and would hold back the next message of
    the key. Returns False if the stage has not received the message.

    If the stage has settled or parked the message, this is a copy: drop it, as the
    stage does. A dead letter of the copy could be discarded, and its sender would get
    `Dead` for a request that the stage has processed or will process.

    If the message's turn has not come, park it instead, as a worker does: if it were
    dead, the messages behind it would overtake its predecessor.

    If a worker is processing a copy of the message, the row is locked. Then return
    None, and do not wait: the worker may settle or park the message, or die. If this
    function marks the row before a worker locks it, the worker drops its copy.
    """
    using = stage.definition.using
    inbox = InboxMessage.objects.db_manager(using)
    order = InboxMessage.order.db_manager(using)
    turn = turn_of(stage, delivery.headers)
    rows = inbox.filter(stage=stage.name, message_id=letter["message_id"])
    with transaction.atomic(using=using):
        try:
            limit_waits(connections[using], PATIENCE)
            row = rows.select_for_update(nowait=True).first()
        except OperationalError as error:
            if not database_health.gave_up_waiting(error):
                raise
            transaction.set_rollback(True, using=using)
            return None
        if row is None:
            return False
        if row.processed_at or row.dead_at or row.due_at:
            dropped = partial(
                signals.announce,
                signals.message_duplicate,
                id=row.message_id,
                destination=stage.destination,
                stage=stage.name,
            )
            transaction.on_commit(dropped, using=using)
            return True
        why = letter["failure"].exception
        if turn is not None and not order.has_come(turn):
            kept, body = letter["headers"], letter["body"]
            inbox.park(row.pk, delay=0, headers=kept, body=body, error=why, turn=turn)
            return True
        inbox.mark_dead(row.pk, why)
        if turn is not None:
            order.aside(row.pk, turn)
        letter = letter | {"destination": stage.destination}
        burial.bury(**letter, using=using, stage=row.stage, attempts=row.attempts)
        order.wake(row.stage, [row.message_id])
    return True


def _sendable(named: str) -> str:
    """Return a message's original destination, or "" if a redelivery must not be sent
    there. The header can name any destination, for example the control queue."""
    try:
        origin = check_destination(named)
    except InvalidMessage:
        return ""
    return "" if wire.is_control(origin) else origin
