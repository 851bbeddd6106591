"""Fills every table with the rows of a day in a shop, so that each page has something
to show."""

from __future__ import annotations

import datetime as dt
import json
import random
import uuid

from django.utils import timezone

from django_txmsg import conf, wire
from django_txmsg.models import (
    AuditEntry,
    DeadLetter,
    InboxMessage,
    OutboxMessage,
)
from django_txmsg.models.monitoring import Deed
from django_txmsg.stages import Stage
from tests import factories

#: The stages, which the shop declares while it is open.
STAGES = [
    Stage(name, name, handler=lambda message: None)
    for name in (
        "orders.place",
        "payments.charge",
        "shipping.send",
        "mail.confirmation",
    )
]

#: The flow of an order: each stage sends the next message.
FLOW = tuple(stage.name for stage in STAGES)

NO_STOCK = (
    "shop.errors.OutOfStock: no stock of article 4711 in warehouse Hamburg",
    "stages.py:reserve_stock",
    "c0ffee11c0ffee11",
)
TIMEOUT = (
    "requests.exceptions.ReadTimeout: payment gateway did not answer within 10 s",
    "stages.py:charge_card",
    "badcafe2badcafe2",
)


def open_shop(orders: int = 240) -> None:
    """Store the messages of a day's orders. Some are unfinished, and some are dead."""
    chance = random.Random(orders)
    now = timezone.now()
    stored: list[OutboxMessage] = []
    received: list[InboxMessage] = []
    for number in range(orders):
        # More in the evening than at night.
        hours = min(23.5, abs(chance.gauss(0, 9)))
        start = now - dt.timedelta(hours=hours, seconds=chance.random() * 60 + 5)
        _order(number, start, stored, received, chance)
    OutboxMessage.objects.bulk_create(stored)
    InboxMessage.objects.bulk_create(received)
    factories.WorkerFactory(kind="relay", stages=[], host="worker-1", in_flight=0)
    running = [
        {
            "thread": f"txmsg-{stage}-0",
            "stage": stage,
            "message": str(stored[number].message_id),
            "attempt": number,
            "seconds": seconds,
        }
        for number, (stage, seconds) in enumerate(
            [("payments.charge", 412.5), ("shipping.send", 0.4)], start=1
        )
    ]
    factories.WorkerFactory(
        stages=list(FLOW), host="worker-1", in_flight=2, running=running
    )
    factories.WorkerFactory(stages=list(FLOW), host="worker-2", in_flight=1)


def _order(
    number: int,
    at: dt.datetime,
    stored: list[OutboxMessage],
    received: list[InboxMessage],
    chance: random.Random,
) -> None:
    cause: uuid.UUID | None = None
    first: uuid.UUID | None = None
    for ordinal, destination in enumerate(FLOW):
        if cause is None:
            message_id, session = (
                uuid.UUID(int=chance.getrandbits(128), version=4),
                None,
            )
            first = message_id
        else:
            message_id = wire.derived_id(
                conf.get().SERVICE, cause, FLOW[ordinal - 1], 0
            )
            session = wire.session_id(conf.get().SERVICE, cause, FLOW[ordinal - 1])
        sent = at + dt.timedelta(milliseconds=chance.randint(8, 90))
        stored.append(
            OutboxMessage(
                message_id=message_id,
                destination=destination,
                key=f"customer-{number % 40}",
                correlation_id=str(first) if cause else "",
                session_id=session,
                headers={"tenant": "north"},
                content_type="application/json",
                body=order_body(number),
                created_at=at,
                due_at=at,
                dispatched_at=sent,
            )
        )
        began = sent + dt.timedelta(milliseconds=chance.randint(2, 60))
        ended = began + dt.timedelta(milliseconds=chance.randint(3, 180))
        received.append(
            InboxMessage(
                stage=destination,
                message_id=message_id,
                destination=destination,
                correlation_id=str(first) if cause else "",
                service="shop",
                created_at=at,
                first_received_at=began,
                last_received_at=began,
                started_at=began,
                processed_at=ended,
                attempts=1,
                deliveries=2 if chance.random() < 0.03 else 1,
            )
        )
        cause, at = message_id, ended


def order_body(number: int) -> bytes:
    """Return the body of an order."""
    order = {
        "order": f"2026-{number:05}",
        "customer": {"number": number % 40, "name": "Ada Lovelace"},
        "lines": [
            {"article": 4711, "quantity": 2, "price": "19.90"},
            {"article": 815, "quantity": 1, "price": "4.50"},
        ],
        "gift": False,
    }
    return json.dumps(order).encode()


def trouble(failed_orders: int = 23) -> DeadLetter:
    """Store dead letters with two different errors. Return a dead letter that has a
    value in every field."""
    for number in range(failed_orders):
        _die("shipping.send", NO_STOCK, number, minutes=5 + number * 3)
    for number in range(7):
        _die("payments.charge", TIMEOUT, 100 + number, minutes=90 + number)
    letter = _die("payments.charge", TIMEOUT, 99, minutes=3, deaths=2)
    for number in range(4):
        factories.InboxMessageFactory(
            parked=True,
            stage="payments.charge",
            attempts=2 + number,
            last_error=TIMEOUT[0],
        )
    for _ in range(3):
        factories.OutboxMessageFactory(destination="mail.newsletter")
    factories.FailureNoteFactory(
        fingerprint=NO_STOCK[2],
        note="Hamburg counts its stock until noon. Redeliver after 12:00, ticket 1302.",
        noted_by="grace",
    )
    return letter


def audited() -> None:
    """Record some operators' actions in the audit."""
    operation = factories.BulkOperationFactory(total=23, done=9)
    AuditEntry.objects.record(
        "grace",
        "Redeliver 23 dead letters, one first; filter: stage shipping.send; "
        "why: Hamburg has counted.",
        deed=Deed.REDELIVER,
        count=23,
        operation=operation,
    )
    AuditEntry.objects.record(
        "command: ada",
        "Paused stage mail.confirmation: the provider moves its servers.",
        deed=Deed.PAUSE,
    )
    AuditEntry.objects.record(
        "service: shop", "Version 4f2a began on web-1.", deed=Deed.DEPLOY, count=None
    )
    # The 23 dead letters of one error began 71 minutes ago.
    for deed, minutes in ((Deed.DEPLOY, 72), (Deed.PAUSE, 60), (Deed.REDELIVER, 8)):
        AuditEntry.objects.filter(deed=deed).update(at=factories.ago(minutes=minutes))


def _die(
    stage: str,
    error: tuple[str, str, str],
    number: int,
    *,
    minutes: float,
    deaths: int = 1,
) -> DeadLetter:
    exception, where, fingerprint = error
    file, _, function = where.partition(":")
    trace = (
        "Traceback (most recent call last):\n"
        f'  File "/srv/shop/{file}", line 84, in {function}\n'
        "    raise error\n"
        f"{exception}\n"
    )
    died = factories.ago(minutes=minutes)
    letter: DeadLetter = factories.DeadLetterFactory(
        stage=stage,
        destination=stage,
        exception=exception,
        traceback=trace,
        fingerprint=fingerprint,
        deaths=deaths,
        body=order_body(number),
        created_at=died,
        message_created_at=died - dt.timedelta(seconds=75),
    )
    letter.headers |= {"tenant": "north", wire.KEY: f"customer-{number % 15}"}
    letter.save(update_fields=["headers"])
    began = died - dt.timedelta(seconds=70)
    factories.InboxMessageFactory(
        message_id=letter.message_id,
        stage=stage,
        service="shop",
        created_at=began,
        first_received_at=began,
        started_at=died - dt.timedelta(seconds=10),
        processed_at=None,
        dead_at=died,
        attempts=7,
        last_error=exception,
    )
    for attempt in range(1, 8):
        factories.AttemptFactory(
            message_id=letter.message_id,
            stage=stage,
            number=attempt,
            exception=exception,
            traceback=trace,
            fingerprint=fingerprint,
            failed_at=began + dt.timedelta(seconds=2**attempt / 2 + 1),
            duration=10.01,
            worker="worker-1:4711",
        )
    return letter
