"""Rows of every table, for tests of code that reads them.

The rows look like those that the package writes. Tests of storing, relaying and
processing use the package itself.
"""

from __future__ import annotations

import datetime as dt
import uuid

import factory
from django.utils import timezone
from factory.django import DjangoModelFactory

from django_txmsg import models


def ago(**duration: float) -> dt.datetime:
    """Return the instant `duration` before now."""
    return timezone.now() - dt.timedelta(**duration)


class OutboxMessageFactory(DjangoModelFactory):
    """A pending message, due now."""

    class Meta:
        model = models.OutboxMessage

    class Params:
        dispatched = factory.Trait(
            dispatched_at=factory.LazyAttribute(
                lambda row: row.created_at + dt.timedelta(milliseconds=40)
            )
        )
        dead = factory.Trait(
            dead_at=factory.LazyAttribute(
                lambda row: row.created_at + dt.timedelta(seconds=1)
            ),
            last_error="rejected: no such destination",
        )

    message_id = factory.LazyFunction(uuid.uuid4)
    destination = "orders.place"
    correlation_id = ""
    headers = factory.LazyFunction(dict)
    content_type = "application/json"
    body = b'{"order": 1}'
    created_at = factory.LazyFunction(timezone.now)
    due_at = factory.SelfAttribute("created_at")


class InboxMessageFactory(DjangoModelFactory):
    """A message that a stage has processed."""

    class Meta:
        model = models.InboxMessage

    class Params:
        parked = factory.Trait(
            processed_at=None,
            due_at=factory.LazyFunction(lambda: ago(seconds=-30)),
            headers=factory.LazyFunction(dict),
            body=b"{}",
            last_error="ValueError: no stock",
        )
        dead = factory.Trait(
            processed_at=None,
            dead_at=factory.LazyFunction(timezone.now),
            last_error="ValueError: no stock",
        )

    stage = "orders.place"
    message_id = factory.LazyFunction(uuid.uuid4)
    destination = factory.SelfAttribute("stage")
    created_at = factory.LazyFunction(lambda: ago(seconds=1))
    first_received_at = factory.LazyFunction(timezone.now)
    last_received_at = factory.SelfAttribute("first_received_at")
    started_at = factory.SelfAttribute("first_received_at")
    processed_at = factory.LazyAttribute(
        lambda row: row.started_at + dt.timedelta(milliseconds=12)
    )
    attempts = 1


class AttemptFactory(DjangoModelFactory):
    """One failed attempt."""

    class Meta:
        model = models.Attempt

    message_id = factory.LazyFunction(uuid.uuid4)
    stage = "orders.place"
    number = 1
    worker = "consume@web-1:4711"
    failed_at = factory.LazyFunction(timezone.now)
    duration = 0.02
    exception = "ValueError: no stock"
    traceback = 'Traceback (most recent call last):\n  File "stages.py", line 7\n'
    fingerprint = "feedfacefeedface"


class DeadLetterFactory(DjangoModelFactory):
    """An open dead letter of a stage."""

    class Meta:
        model = models.DeadLetter

    class Params:
        discarded = factory.Trait(
            resolution="discarded",
            resolved_at=factory.LazyFunction(timezone.now),
            resolved_by="somebody",
        )
        redelivered = factory.Trait(
            resolution="redelivered",
            resolved_at=factory.LazyFunction(timezone.now),
            resolved_by="somebody",
        )

    message_id = factory.LazyFunction(uuid.uuid4)
    stage = "orders.place"
    destination = "orders.place"
    headers = factory.LazyAttribute(
        lambda letter: {
            "txmsg-id": str(letter.message_id),
            "txmsg-service": "shop",
            "content-type": "application/json",
        }
    )
    content_type = "application/json"
    body = b'{"order": 1}'
    reason = "attempts_exhausted"
    exception = "ValueError: no stock"
    traceback = 'Traceback (most recent call last):\n  File "stages.py", line 7\n'
    fingerprint = "feedfacefeedface"
    attempts = 7
    created_at = factory.LazyFunction(timezone.now)
    message_created_at = factory.LazyAttribute(
        lambda letter: letter.created_at - dt.timedelta(minutes=1)
    )


class WorkerFactory(DjangoModelFactory):
    """A consumer that has just sent a heartbeat."""

    class Meta:
        model = models.Worker

    name = factory.Sequence(lambda n: f"consume@web-1:{4711 + n}")
    kind = "consumer"
    host = "web-1"
    pid = factory.Sequence(lambda n: 4711 + n)
    stages = factory.LazyFunction(lambda: ["orders.place"])
    started_at = factory.LazyFunction(lambda: ago(hours=3))
    heartbeat_at = factory.LazyFunction(timezone.now)


class StageStateFactory(DjangoModelFactory):
    """A paused stage."""

    class Meta:
        model = models.StageState

    stage = "orders.place"
    paused_at = factory.LazyFunction(timezone.now)
    paused_by = "somebody"


class FailureNoteFactory(DjangoModelFactory):
    """An operator's note."""

    class Meta:
        model = models.FailureNote

    fingerprint = "feedfacefeedface"
    note = "The warehouse was closed."
    noted_by = "somebody"


class QueueMessageFactory(DjangoModelFactory):
    """A message in a queue of the embedded broker."""

    class Meta:
        model = models.QueueMessage

    queue = "orders.place"
    body = b"{}"


class BulkOperationFactory(DjangoModelFactory):
    """A bulk operation that has not started yet."""

    class Meta:
        model = models.BulkOperation

    kind = "redeliver"
    total = 120
    by = "grace"
    created_at = factory.LazyFunction(lambda: ago(minutes=5))
