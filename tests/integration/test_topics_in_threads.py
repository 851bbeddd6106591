"""A topic consumed by several threads: what check W001 warns of, and where not."""

from __future__ import annotations

import pytest

from django_txmsg import stages
from django_txmsg.brokers import get_broker
from django_txmsg.models import InboxMessage
from tests import services
from tests.faults import wait_until
from tests.running import declared, running, send, txmsg

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(240)]


def processed(stage: stages.Stage) -> int:
    rows = InboxMessage.objects.filter(stage=stage.name, processed_at__isnull=False)
    return rows.count()


def subscribed(stage: stages.Stage) -> None:
    """Make the durable subscription, as a consumer that ran before would have."""
    name = f"tests.{stage.name}"
    with get_broker().open(subscriber=name) as session:
        session.subscribe(stage.destination, prefetch=1, subscriber=name)


def test_rabbitmq_shares_a_topic_among_threads(
    rabbitmq: services.RabbitMQ, destination: str
) -> None:
    topic = f"topic:{destination}"
    broker = {"default": {"URL": rabbitmq.url()}}
    with txmsg(BROKERS=broker), declared(lambda m: None, topic, concurrency=3) as stage:
        subscribed(stage)
        for number in range(60):
            send(topic, {"number": number})
        with running(stage, concurrency=3) as threads:
            wait_until(lambda: processed(stage) == 60, deadline=60)
            wait_until(
                lambda: all(thread._session is not None for thread in threads),
                deadline=60,
                message="each thread has its own subscription",
            )

    assert InboxMessage.objects.filter(deliveries__gt=1).count() == 0


def test_activemq_gives_a_topic_to_one_connection(
    activemq: services.ActiveMQ, destination: str
) -> None:
    topic = f"topic:{destination}"
    broker = {"default": {"URL": activemq.url()}}
    with txmsg(BROKERS=broker), declared(lambda m: None, topic, concurrency=3) as stage:
        subscribed(stage)
        for number in range(20):
            send(topic, {"number": number})
        with running(stage, concurrency=3) as threads:
            wait_until(lambda: processed(stage) == 20, deadline=120)
            opened = [thread for thread in threads if thread._session is not None]

    assert len(opened) == 1
