"""Several threads consume a topic, on brokers that permit this and on one that does
not."""

from __future__ import annotations

import threading

import pytest
from django.db import connections

from django_txmsg import stages
from django_txmsg.brokers import get_broker
from django_txmsg.consuming.consumer import Consumer
from django_txmsg.models import InboxMessage
from tests import services
from tests.faults import wait_until
from tests.running import declared, running, send, txmsg

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(240)]


def processed(stage: stages.Stage) -> int:
    rows = InboxMessage.objects.filter(stage=stage.name, processed_at__isnull=False)
    return rows.count()


def subscribed(stage: stages.Stage) -> None:
    """Create the durable subscription of the stage, as an earlier consumer would."""
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
                lambda: all(thread._subscription.session for thread in threads),
                deadline=60,
                message="each thread has its own subscription",
            )

    assert InboxMessage.objects.filter(deliveries__gt=1).count() == 0


def test_activemq_gives_a_topic_to_one_connection(
    activemq: services.ActiveMQ, destination: str, caplog: pytest.LogCaptureFixture
) -> None:
    """ActiveMQ would refuse further connections for the topic, and the package would
    treat the whole broker as unusable. So the consumer starts only one thread."""
    topic = f"topic:{destination}"
    broker = {"default": {"URL": activemq.url()}}
    with txmsg(BROKERS=broker), declared(lambda m: None, topic, concurrency=3) as stage:
        subscribed(stage)
        for number in range(20):
            send(topic, {"number": number})
        consumer = Consumer([stage], concurrency=4)
        assert len(consumer.threads) == 1

        def run() -> None:
            try:
                consumer.run()
            finally:
                connections.close_all()

        ends = threading.Thread(target=run)
        ends.start()
        try:
            wait_until(lambda: processed(stage) == 20)
        finally:
            consumer.stop()
            ends.join(30)

    assert InboxMessage.objects.filter(deliveries__gt=1).count() == 0
    assert "one thread, not 4" in caplog.text
    assert not [one for one in caplog.records if "cannot be used" in one.getMessage()]


@pytest.mark.parametrize(
    ("url", "to", "threads"),
    [
        ("stomp://localhost", "topic:news", 1),
        ("stomp://localhost?dialect=artemis", "topic:news", 1),
        ("stomp://localhost?dialect=rabbitmq", "topic:news", 3),
        ("stomp://localhost", "news", 3),
        ("database://", "topic:news", 3),
    ],
)
def test_topic_runs_as_many_threads_as_the_broker_allows(
    url: str, to: str, threads: int
) -> None:
    with (
        txmsg(BROKERS={"default": {"URL": url}}),
        declared(lambda m: None, to, concurrency=3) as stage,
    ):
        assert len(Consumer([stage]).threads) == threads
        assert len(Consumer([stage], concurrency=2).threads) == min(threads, 2)
