"""A broker delays messages in one of two ways. Its scheduler holds the messages, or the
messages wait in a queue without consumers until they expire there."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import pytest

from django_txmsg import jms
from django_txmsg.jms.destination import Destination
from django_txmsg.jms.dialect import RABBITMQ
from django_txmsg.testing import ScriptedBroker
from django_txmsg.wire import MAX_RABBITMQ_DELAY

Scripted = Callable[..., ScriptedBroker]
Connect = Callable[..., jms.Connection]

SHORTLY = jms.Delivery(delay=timedelta(seconds=0.2))
dialects = pytest.mark.parametrize("dialect", ["classic", "artemis", "rabbitmq"])


@dialects
@pytest.mark.parametrize("destination", ["orders.place", "topic:orders.placed"])
def test_a_delayed_message_comes_later(
    scripted: Scripted, connect: Connect, dialect: str, destination: str
) -> None:
    connection = connect(scripted(dialect))
    consumer = connection.create_session().create_consumer(destination)
    producer = connection.create_session().create_producer(destination)
    began = time.monotonic()
    producer.send(jms.Message("later"), delivery=SHORTLY)
    producer.send(jms.Message("now"))

    first, second = consumer.receive(30), consumer.receive(30)

    assert first is not None
    assert second is not None
    assert (first.body, second.body) == ("now", "later")
    assert time.monotonic() - began >= 0.2


@dialects
def test_a_delay_in_a_transaction_is_refused_for_it_could_be_lost(
    scripted: Scripted, connect: Connect, dialect: str
) -> None:
    session = connect(scripted(dialect)).create_session(transacted=True)
    with pytest.raises(jms.UnsupportedOperationError, match="outside the transaction"):
        session.create_producer("x").send(jms.Message("x"), delivery=SHORTLY)


def test_rabbitmq_cannot_delay_what_shall_expire(
    scripted: Scripted, connect: Connect
) -> None:
    broker = scripted("rabbitmq")
    producer = connect(broker).create_session().create_producer("x")
    both = jms.Delivery(delay=timedelta(1), time_to_live=timedelta(2))
    with pytest.raises(jms.UnsupportedOperationError, match="time to live"):
        producer.send(jms.Message("x"), delivery=both)
    assert not broker.received("SEND")


@pytest.mark.parametrize(
    ("milliseconds", "queue"),
    [
        (1, "x.delay-1s"),
        (1_000, "x.delay-1s"),
        (1_001, "x.delay-2s"),
        (2_000, "x.delay-2s"),
        (4_001, "x.delay-8s"),
        (300_000, "x.delay-512s"),
        (MAX_RABBITMQ_DELAY, "x.delay-8388608s"),
    ],
)
def test_long_delay_blocks_only_similar_delays(milliseconds: int, queue: str) -> None:
    """In RabbitMQ, a message expires only when it is the first of its delay queue. So a
    long delay blocks the messages behind it. Each delay queue takes the delays up to a
    limit of 1, 2, 4, 8 … seconds. A message waits in the queue with the lowest limit
    that its delay does not exceed. So a message waits for at most twice its delay or
    one second, whichever is longer."""
    waits, headers = RABBITMQ.delayed(Destination("x"), milliseconds)
    assert str(waits) == queue
    assert int(headers["expiration"]) == milliseconds


def test_a_delay_beyond_what_the_broker_can_is_refused_and_not_shortened() -> None:
    with pytest.raises(jms.UnsupportedOperationError, match="49 days"):
        RABBITMQ.delayed(Destination("x"), MAX_RABBITMQ_DELAY + 1)
