"""An AMQP client can send messages that STOMP cannot carry. RabbitMQ passes them on
unchanged. They become dead letters, and later messages are processed."""

from __future__ import annotations

import uuid
from collections import Counter
from typing import Any

import amqp
import pytest

from django_txmsg import jms
from django_txmsg.envelope.message import Message
from django_txmsg.envelope.redelivery import RedeliveryPolicy
from django_txmsg.jms.frames import FrameParser
from django_txmsg.models import DeadLetter, InboxMessage
from tests.faults import wait_until
from tests.integration.test_intake import redelivered, taking_in
from tests.running import committing, declared, put, running, ship, txmsg
from tests.services import RabbitMQ
from tests.services.stomp_server import LIMITED_USER, PASSWORD, USER

# One database will do: what differs here is the broker.
pytestmark = [committing, pytest.mark.postgresql]

#: Properties and headers of AMQP messages that become broken header blocks.
HOSTILE: list[dict[str, Any]] = [
    {"application_headers": {"key": "abc\0def"}},
    {"application_headers": {"txmsg-id": "\0", "txmsg-key": "\0"}},
    {"application_headers": {"": "no name"}},
    {"content_type": "a\0b", "correlation_id": "c\0\n\nd", "reply_to": "r\0"},
]
#: Those that a stage may take as they are.
HARMLESS: list[dict[str, Any]] = [
    {"application_headers": {"priority": "9" * 5000}},
    {"application_headers": {"subscription": "other", "ack": "x", "receipt": "y"}},
    {"application_headers": {"content-length": "7", "destination": "/queue/else"}},
    {"application_headers": {"a\nb": "c\n\nd", "e:f": "\\x"}},
]


def publish(server: RabbitMQ, queue: str, body: bytes, **properties: Any) -> None:
    """Publish a message to the queue with an AMQP client."""
    with amqp.Connection(f"127.0.0.1:{server.amqp_port}", USER, PASSWORD) as link:
        properties.setdefault("delivery_mode", 2)
        properties.setdefault("content_type", "application/octet-stream")
        link.channel().basic_publish(
            amqp.Message(body, **properties), routing_key=queue
        )


@pytest.mark.parametrize("mode", ["outbox", "broker_only"])
def test_a_header_stomp_cannot_carry_buries_its_message_and_no_other(
    rabbitmq: RabbitMQ, destination: str, mode: str
) -> None:
    with txmsg(BROKERS={"default": {"URL": rabbitmq.url()}}):
        bodies: list[Any] = []
        put(destination, b'"first"')
        for number, properties in enumerate(HOSTILE):
            publish(
                rabbitmq, destination, b"hostile %d \0\n\n\0" % number, **properties
            )
        publish(rabbitmq, destination, b"", application_headers={"key": "a\0b"})
        for properties in HARMLESS:
            publish(rabbitmq, destination, b"harmless", **properties)
        put(destination, b'"last"')

        def handler(message: Any) -> None:
            bodies.append(message.body)

        with declared(handler, destination, transaction=mode) as stage, running(stage):
            wait_until(lambda: len(bodies) == len(HARMLESS) + 2, deadline=60)
            wait_until(lambda: DeadLetter.objects.count() == 5, deadline=60)

    # Each foreign message went through the queue once more, to get an id.
    assert Counter(bodies) == {"first": 1, b"harmless": len(HARMLESS), "last": 1}
    letters = DeadLetter.objects.order_by("pk")
    assert {letter.reason for letter in letters} == {"malformed_headers"}
    assert [bytes(letter.body) for letter in letters] == [
        b"hostile 0 \0\n\n\0", b"hostile 1 \0\n\n\0", b"hostile 2 \0\n\n\0",
        b"hostile 3 \0\n\n\0", b"",
    ]  # fmt: skip
    if mode == "outbox":
        assert InboxMessage.objects.filter(processed_at__isnull=False).count() >= 6
    with jms.ConnectionFactory(rabbitmq.url()).create_connection() as connection:
        consumer = connection.create_session().create_consumer(destination)
        assert consumer.receive(0.5) is None, "nothing is left on the queue"


@pytest.mark.parametrize("place", ["stage", "dead-letter queue"])
def test_body_that_is_cut_reaches_the_handler_only_by_force(
    rabbitmq: RabbitMQ, destination: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FrameParser.__init__, "__defaults__", (100_000,))
    sizes: list[int] = []

    def fails(message: Message) -> None:
        sizes.append(len(message.body))
        raise ValueError("not whole")

    once = RedeliveryPolicy(max_redeliveries=0)
    sent = jms.Message(b"b" * 200_000, {"txmsg-id": str(uuid.uuid4())})
    with jms.ConnectionFactory(rabbitmq.url()).create_connection() as connection:
        connection.create_session().create_producer(destination).send(sent)
    with (
        txmsg(BROKERS={"default": {"URL": rabbitmq.url()}}),
        declared(fails, destination, redelivery=once) as stage,
    ):
        if place == "stage":
            with running(stage):
                wait_until(DeadLetter.objects.exists, deadline=60)
        else:
            with taking_in(rabbitmq.url(), destination):
                pass
        letter = DeadLetter.objects.get()
        assert (letter.reason, len(letter.body)) == ("body_too_long", 1 << 16)
        assert "200000 bytes" in letter.exception

        assert (redelivered(force=False).done, sizes) == (0, [])
        assert redelivered(force=True).done == 1
        ship()
        with running(stage):
            again = DeadLetter.objects.filter(exception__contains="not whole")
            wait_until(again.exists, deadline=60)
        assert again.get().reason == "body_too_long"
        assert sizes == [1 << 16]
        assert redelivered(force=False).done == 0, "its body is still cut"


def test_a_volatile_message_goes_to_a_durable_queue_and_outlives_its_sender(
    rabbitmq: RabbitMQ, destination: str
) -> None:
    volatile = jms.Delivery(jms.DeliveryMode.NON_PERSISTENT)
    factory = jms.ConnectionFactory(rabbitmq.url())
    for queue in (destination, f"{destination}.new"):
        with factory.create_connection() as connection:
            producer = connection.create_session().create_producer(queue)
            if queue == destination:
                producer.send(jms.Message("durable"))
            producer.send(jms.Message("volatile"), delivery=volatile)

    with factory.create_connection() as connection:
        session = connection.create_session()
        old = session.create_consumer(destination)
        new = session.create_consumer(f"{destination}.new")
        arrived = [old.receive(30), old.receive(30), new.receive(30)]
    bodies = [message and message.body for message in arrived]
    assert bodies == ["durable", "volatile", "volatile"]


def test_an_operator_who_closes_connections_refuses_no_message(
    rabbitmq: RabbitMQ, destination: str
) -> None:
    outcomes: list[jms.MessagingError | None] = []
    factory = jms.ConnectionFactory(rabbitmq.url())
    with factory.create_connection() as connection:
        session = connection.create_session()
        for isolate in (False, True):
            sent = [(destination, jms.Message(n)) for n in range(3)]
            assert session.send_batch(sent, isolate=isolate) == [None] * 3
        rabbitmq.close_all_connections()
        while not connection.failed:
            outcomes += session.send_batch([(destination, jms.Message("late"))])

    assert not any(isinstance(one, jms.SendRejectedError) for one in outcomes)


def test_a_forbidden_message_alone_is_still_refused_for_good(
    rabbitmq: RabbitMQ, destination: str
) -> None:
    factory = jms.ConnectionFactory(rabbitmq.url(user=LIMITED_USER, password=PASSWORD))
    for name in (destination, "/exchange/none"):
        with factory.create_connection() as connection:
            producer = connection.create_session().create_producer()
            with pytest.raises((jms.SendRejectedError, jms.InvalidDestinationError)):
                producer.send(jms.Message("x"), destination=name)
