"""Redelivery and rejection where the broker matters: ActiveMQ's own hands in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import transaction

from django_txmsg.brokers import get_broker
from django_txmsg.message import Message
from django_txmsg.models import Attempt, DeadLetter, InboxMessage, OutboxMessage
from django_txmsg.outbox import send_messages
from django_txmsg.redelivery import RedeliveryPolicy
from tests import services
from tests.app.models import Effect
from tests.faults import Proxy, wait_until
from tests.running import IMPATIENT, committing, declared, running, send, ship, txmsg

pytestmark = committing

MODES = ["outbox", "best_effort_1pc"]


@pytest.fixture(autouse=True)
def broker(activemq: services.ActiveMQ) -> Iterator[services.ActiveMQ]:
    """Make ActiveMQ the default broker."""
    with txmsg(BROKERS={"default": {"URL": activemq.url()}}):
        yield activemq


def empty(destination: str) -> bool:
    with get_broker("default").open() as session:
        session.subscribe(destination, prefetch=1)
        return session.receive(0.5) is None


@pytest.mark.parametrize("transaction_mode", MODES)
@pytest.mark.parametrize("mode", ["non_blocking", "blocking", "broker"])
def test_exactly_so_many_attempts(
    transaction_mode: Any, mode: Any, destination: str
) -> None:
    attempts: list[int] = []

    def handler(message: Message) -> None:
        attempts.append(message.delivery_attempt)
        raise ValueError

    policy = RedeliveryPolicy(max_redeliveries=2, initial_delay=0.05, mode=mode)
    with declared(
        handler, destination, transaction=transaction_mode, redelivery=policy
    ) as stage:
        send(destination, {"a": "ü:\n"}, headers={"odd": "a:b\nc\\d ü"})
        with running(stage):
            wait_until(DeadLetter.objects.exists, deadline=60)
        assert empty(destination)
    assert attempts == [1, 2, 3]
    letter = DeadLetter.objects.get()
    assert letter.headers["odd"] == "a:b\nc\\d ü"
    assert letter.attempts == Attempt.objects.count() == 3


@pytest.mark.parametrize("transaction_mode", MODES)
def test_a_cut_connection_during_a_handler(
    transaction_mode: Any, destination: str, activemq: services.ActiveMQ
) -> None:
    """The stage connects again; under outbox there is one effect whatever happens."""
    with Proxy(activemq.port) as proxy:
        url = activemq.url(port=proxy.port)
        cuts: list[int] = []

        def handler(message: Message) -> None:
            Effect.objects.create(name="done", message_id=str(message.id))
            if not cuts:
                cuts.append(1)
                proxy.cut(reset=True)

        def came_again() -> bool:
            row = InboxMessage.objects.filter(stage=destination).first()
            # The outbox stage has recorded the first delivery too.
            again = 2 if transaction_mode == "outbox" else 1
            return (
                row is not None and row.deliveries == again and bool(row.processed_at)
            )

        with declared(handler, destination, transaction=transaction_mode) as stage:
            sent = send(destination)
            with txmsg(BROKERS={"default": {"URL": url}}), running(stage):
                wait_until(came_again, deadline=60)
            assert empty(destination)
    count = Effect.objects.filter(message_id=str(sent.id)).count()
    assert count == 1
    assert not DeadLetter.objects.exists()


def test_a_rejected_message_and_its_companions(
    destination: str, activemq: services.ActiveMQ
) -> None:
    """This user may only send to names that begin with `allowed.`"""
    good, bad = f"allowed.{destination}", destination
    limited = {"default": {"URL": activemq.url(user="limited")}}
    relay = {**IMPATIENT["RELAY"], "MAX_ATTEMPTS": 2}
    with txmsg(BROKERS=limited, RELAY=relay):
        with transaction.atomic():
            send_messages(
                {"destination": good if n % 5 else bad, "body": n} for n in range(20)
            )

        def settled() -> bool:
            ship()
            return not OutboxMessage.objects.filter(
                dispatched_at=None, dead_at=None
            ).exists()

        wait_until(settled, deadline=60)
    assert OutboxMessage.objects.filter(dispatched_at__isnull=False).count() == 16
    assert DeadLetter.objects.filter(reason="rejected", attempts=2).count() == 4
    bodies = []
    with get_broker("default").open() as session:
        session.subscribe(good, prefetch=100)
        while (delivery := session.receive(0.5)) is not None:
            bodies.append(int(delivery.body))
            session.ack([delivery])
    assert sorted(set(bodies)) == [n for n in range(20) if n % 5]
