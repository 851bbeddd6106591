"""Makes dead letters of the messages in the broker's own dead-letter queues, with the
broker's reason.

Runs in `manage.py consume`, for the queues in TXMSG["DEAD_LETTER_DESTINATIONS"].
"""

from __future__ import annotations

import logging
import threading
import uuid

from django.db import connections, router, transaction

from .. import conf, wire
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
from ..models.fields import Holds, limit_waits
from ..models.inbox_order import PATIENCE
from ..models.turn import Turn
from ..rules import dead_letters
from ..runtime import database_health, liveness
from ..runtime.breaker import Breaker
from ..runtime.connections import recycle
from ..runtime.liveness import Activity
from ..stages import Stage, consumers, find
from . import decoding

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
        self._retry = database_health.Retry(
            self._using, f"{destination}: a message cannot be taken in, and is kept"
        )

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
        while database_health.wait(self._using, self._stopping):
            liveness.turned()
            delivery = session.receive(0.5)
            self._breaker.worked()
            recycle(idle=delivery is None, but=broker.stored_in)
            if delivery is None or self._stopping.is_set():
                continue
            # It gets the id that its stage would give it, so that a redelivery is the
            # same message.
            delivery = decoding.recognised(delivery)
            if decoding.has_identity(delivery) or delivery.problem:
                self._settle(session, delivery)
            else:
                delivery = decoding.named(delivery)
                try:
                    decoding.send_back(delivery, session)
                except (DispatchRejected, DestinationUnavailable):
                    # A worker that dies before the acknowledgement leaves two dead
                    # letters.
                    self._settle(session, delivery)
            self._activity.note()

    def _settle(self, session: Session, delivery: Delivery) -> None:
        if self._buried(delivery):
            session.ack([delivery])

    def _buried(self, delivery: Delivery) -> bool:
        """Bury a delivery. After a failure, try again until that succeeds. Returns
        False if the consumer stops first."""
        while True:
            liveness.turned()
            try:
                self._bury(delivery)
            except Exception as error:
                if not self._retry.after(error, self._stopping):
                    return False
            else:
                self._retry.worked()
                return True

    def _bury(self, delivery: Delivery) -> None:
        broker = get_broker(self._broker)
        reason, named = broker.dead_letter_cause(delivery.headers)
        origin = _sendable(named) or self._destination
        failure = Failure.because("broker", reason or f"found in {self._destination}")
        message_id = decoding.identity(delivery, self._broker)
        stage = _only_stage(origin, self._broker)
        using = self._using if stage is None else stage.definition.using
        with transaction.atomic(using=using), transaction.atomic(using=self._using):
            row = stage and _given_up(stage, message_id, delivery, failure.exception)
            burial.bury(
                using=using if row else self._using,
                message_id=message_id,
                stage=row.stage if row else "",
                broker=self._broker,
                destination=origin,
                headers=decoding.kept_headers(delivery),
                body=delivery.body,
                reason="broker",
                failure=failure,
                attempts=row.attempts if row else 0,
            )
            if row:
                order = InboxMessage.order.db_manager(using)
                order.wake(row.stage, [message_id])


def _only_stage(origin: str, broker: str) -> Stage | None:
    """Return the only stage that consumes the queue `origin`, if one transaction
    contains the stage's work and its mark in the inbox. For a topic, return None: its
    message may have been another subscriber's."""
    names = [] if wire.is_topic(origin) else consumers(origin, broker)
    if len(names) != 1:
        return None
    (stage,) = find(names)
    return stage if stage.transaction == "outbox" else None


def _given_up(
    stage: Stage, message_id: uuid.UUID, delivery: Delivery, error: str
) -> InboxMessage | None:
    """Mark the inbox row of a message as dead, and return the row, if the stage has
    received the message but has neither settled nor parked it. The stage will not
    receive the message again. So the row would stay open for ever, and would hold back
    the next message of the key.

    Return None if there is no such row. Also return None if the message's turn has not
    come: the messages behind it would overtake its predecessor.

    If a worker is processing a copy of the message, the row is locked. Raises
    OperationalError if the worker does not finish soon. If this function marks the row
    before a worker locks it, the worker drops its copy.
    """
    using = stage.definition.using
    inbox = InboxMessage.objects.db_manager(using)
    limit_waits(connections[using], PATIENCE)
    rows = inbox.filter(stage=stage.name, message_id=message_id)
    row = rows.filter(processed_at=None, due_at=None).select_for_update().first()
    if row is None:
        return None
    if row.dead_at is not None:
        # Buried here already, if the acknowledgement was lost.
        letters = DeadLetter.objects.using(using).filter(Holds(dead_letters.OPEN))
        same = letters.filter(message_id=message_id, stage=stage.name, reason="broker")
        return row if same.exists() else None
    before = wire.after(delivery.headers) if stage.ordered else None
    turn = Turn(stage.name, "", stage.ordered == "skip", *(before or ()))
    if not InboxMessage.order.db_manager(using).has_come(turn):
        return None
    return row if inbox.mark_dead(row.pk, error) else None


def _sendable(named: str) -> str:
    """Return a message's original destination, or "" if a redelivery must not be sent
    there. The header can name any destination, for example the control queue."""
    try:
        origin = check_destination(named)
    except InvalidMessage:
        return ""
    return "" if wire.is_control(origin) else origin
