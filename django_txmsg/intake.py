"""Takes in what the broker itself gave up on: its dead-letter queues and expiries.

Runs in `manage.py consume` for TXMSG["DEAD_LETTER_DESTINATIONS"]. The message becomes a
dead letter of ours, with the reason that the broker gives.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from django.db import DatabaseError, InterfaceError, connections, router, transaction

from . import arrival as arrivals
from . import conf, dead_letters
from .activity import Activity
from .breaker import Breaker
from .brokers import get_broker
from .brokers.base import Delivery, Session
from .errors import BrokerUnavailable
from .failure import Failure
from .models import DeadLetter

log = logging.getLogger("django_txmsg.intake")

#: Headers in which brokers say why, and where the message was.
_REASONS = ("dlqDeliveryFailureCause", "x-first-death-reason", "_AMQ_ORIG_ADDRESS")
_ORIGINS = ("originalDestination", "original-destination", "x-first-death-queue")


class IntakeThread(threading.Thread):
    """Empties one of the broker's dead-letter queues into ours."""

    def __init__(
        self, broker: str, destination: str, stop: threading.Event, activity: Activity
    ) -> None:
        super().__init__(name=f"txmsg-intake-{destination}", daemon=True)
        self._broker, self._destination = broker, destination
        self._stopping, self._activity = stop, activity
        self._breaker = Breaker(broker, conf.get().RELAY.BREAKER_MAX_PAUSE)
        self._using = router.db_for_write(DeadLetter)

    def run(self) -> None:
        """Take in until told to stop."""
        while not self._stopping.is_set():
            try:
                with get_broker(self._broker).open() as session:
                    session.subscribe(self._destination, prefetch=10)
                    self._take_in(session)
            except (BrokerUnavailable, DatabaseError, InterfaceError) as error:
                self._breaker.failed(error)
                connections[self._using].close()
                self._stopping.wait(self._breaker.remaining)
        connections.close_all()

    def _take_in(self, session: Session) -> None:
        while not self._stopping.is_set():
            delivery = session.receive(0.5)
            self._breaker.worked()
            if delivery is None or self._stopping.is_set():
                continue
            self._bury(delivery)
            session.ack([delivery])
            self._activity.note()

    def _bury(self, delivery: Delivery) -> None:
        reason = _first(delivery.headers, _REASONS)
        origin = _first(delivery.headers, _ORIGINS).removeprefix("queue://")
        origin = origin.removeprefix("/queue/") or self._destination
        with transaction.atomic(using=self._using):
            dead_letters.bury(
                using=self._using,
                message_id=arrivals.identity(delivery, self._broker),
                stage="",
                broker=self._broker,
                destination=origin,
                headers=arrivals.kept_headers(delivery),
                body=delivery.body,
                reason="broker",
                failure=Failure.because(
                    "broker", reason or f"found in {self._destination}"
                ),
                attempts=0,
            )


def _first(headers: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((headers[name] for name in names if name in headers), "")
