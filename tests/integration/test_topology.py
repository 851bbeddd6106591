"""Who is there: services, topics, stages and databases, in every shape a system has.

Services are told apart by TXMSG["SERVICE"] alone, as processes of their own are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from django_txmsg.envelope.message import Message
from django_txmsg.models import InboxMessage, OutboxMessage
from django_txmsg.sending.outbox import send_message
from tests.app.models import Effect
from tests.running import committing, declared, send, ship, step, txmsg

pytestmark = committing

TOPIC, MAIL = "topic:orders.placed", "mail.send"


@contextmanager
def service(name: str) -> Iterator[None]:
    """Be another service for the duration of the block."""
    with txmsg(SERVICE=name):
        yield


def mail(message: Message) -> None:
    send_message(MAIL, message.body)


def note(message: Message) -> None:
    Effect.objects.create(name=str(message.service), message_id=str(message.id))


@pytest.mark.parametrize(
    "options",
    [{}, {"batch": 5}, {"transaction": "best_effort_1pc"}],
    ids=["alone", "batch", "best_effort_1pc"],
)
def test_two_services_on_one_topic_send_two_messages_to_a_third(
    options: dict[str, Any],
) -> None:
    """Both call their stage by the destination, as by default, and both send to one
    target: it has two messages, and neither is taken for a copy of the other."""
    consumers = {"billing": "default", "shipping": "other"}
    for name, using in consumers.items():
        with service(name), declared(mail, TOPIC, using=using, **options) as stage:
            step(stage)  # subscribes, and finds nothing
    with service("shop"):
        send(TOPIC, 1)
        send(TOPIC, 2)
    for name, using in consumers.items():
        with service(name), declared(mail, TOPIC, using=using, **options) as stage:
            step(stage, times=2)
            ship(using)
    with service("mail"), declared(note, MAIL) as stage:
        step(stage, times=4)
    got = sorted(Effect.objects.values_list("name", flat=True))
    assert got == ["billing", "billing", "shipping", "shipping"]
    assert InboxMessage.objects.filter(stage=MAIL).count() == 4
    for using in consumers.values():
        assert not OutboxMessage.objects.using(using).filter(dead_at__isnull=False)
