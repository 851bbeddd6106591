"""The STOMP client with real ActiveMQ and RabbitMQ: order, lost connections, receipts
and transactions."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from django_txmsg import jms
from tests.faults import ANSWERS, Proxy, wait_until
from tests.services import ActiveMQ, RabbitMQ
from tests.services.stomp_server import ALLOWED, LIMITED_USER, StompServer

Connect = Callable[..., jms.Connection]


@pytest.fixture(params=["activemq", "rabbitmq"])
def server(request: pytest.FixtureRequest) -> StompServer:
    """Each broker in turn."""
    found: StompServer = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def connect() -> Iterator[Connect]:
    """A function that connects to a URL. The connections are closed after the test."""
    with contextlib.ExitStack() as stack:

        def make(url: str, **options: Any) -> jms.Connection:
            connection = jms.ConnectionFactory(url, **options).create_connection()
            stack.callback(connection.close)
            return connection

        yield make


def take_all(connection: jms.Connection, destination: str) -> list[Any]:
    """Receive and acknowledge all messages. A message that this function sends marks
    the end."""
    session = connection.create_session()
    session.create_producer(destination).send(jms.Message("the end"))
    bodies = []
    with session.create_consumer(destination, prefetch=500) as consumer:
        for message in consumer:
            if message.body == "the end":
                session.acknowledge(message, wait=True)
                return bodies
            bodies.append(message.body)
            session.acknowledge(message)
    raise AssertionError("the consumer ended")


class Told:
    """A completion listener that records bodies and errors in order."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, jms.MessagingError | None]] = []

    def on_completion(self, message: jms.Message) -> None:
        self.told.append((message.body, None))

    def on_exception(self, message: jms.Message, error: jms.MessagingError) -> None:
        self.told.append((message.body, error))


def test_callbacks_and_messages_come_in_the_order_of_the_sends(
    server: StompServer, connect: Connect, destination: str
) -> None:
    connection, told = connect(server.url(), max_in_flight=100), Told()
    session = connection.create_session()
    names = [destination, f"{destination}.other"]
    producer = session.create_producer()

    for n in range(1000):
        if n % 100 == 50:
            producer.send(jms.Message(n), destination=names[n % 2])
        else:
            producer.send_async(jms.Message(n), told, destination=names[n % 2])
    session.close()

    assert told.told == [(n, None) for n in range(1000) if n % 100 != 50]
    assert take_all(connection, names[0]) == list(range(0, 1000, 2))
    assert take_all(connection, names[1]) == list(range(1, 1000, 2))


@pytest.mark.parametrize("count", [1, 3, 500])
def test_a_batch_is_stored_once_and_in_order(
    server: StompServer, connect: Connect, destination: str, count: int
) -> None:
    connection = connect(server.url())
    session = connection.create_session()

    outcomes = session.send_batch([(destination, jms.Message(n)) for n in range(count)])

    assert outcomes == [None] * count
    assert take_all(connection, destination) == list(range(count))


def test_receipted_messages_survive_the_brokers_death(
    server: StompServer, connect: Connect, destination: str
) -> None:
    if isinstance(server, RabbitMQ):
        # It writes a new queue's own entry to disk a moment after its messages.
        early = connect(server.url()).create_session().create_producer(destination)
        early.send(jms.Message("early"))
        server.restart()
        assert take_all(connect(server.url()), destination) == ["early"]
    connection, told = connect(server.url(), send_timeout=10), Told()
    session = connection.create_session()
    batch = [(destination, jms.Message(n)) for n in range(200)]
    assert session.send_batch(batch) == [None] * 200
    producer, sent = session.create_producer(destination), threading.Event()

    def send_until_it_dies() -> None:
        with contextlib.suppress(jms.MessagingError):
            for n in range(200, 100_000):
                producer.send_async(jms.Message(n), told)
                if n == 400:
                    sent.set()

    sender = threading.Thread(target=send_until_it_dies)
    sender.start()
    assert sent.wait(60)
    wait_until(lambda: len(told.told) > 100)
    server.kill()
    sender.join(60)
    producer.close()
    server.start()

    confirmed = [body for body, error in told.told if error is None]
    unknown = [body for body, error in told.told if error is not None]
    assert all(
        isinstance(error, jms.SendOutcomeUnknownError)
        for _, error in told.told
        if error is not None
    )
    received = Counter(take_all(connect(server.url()), destination))
    assert set(range(200)) | set(confirmed) <= received.keys()
    assert received.keys() <= {*range(200), *confirmed, *unknown}
    assert set(received.values()) == {1}
    bodies = [body for body, _ in told.told]
    assert bodies == list(range(200, 200 + len(bodies)))


@pytest.mark.parametrize("batch", [True, False])
def test_lost_answers_make_sends_unknown_and_the_resend_has_the_same_ids(
    server: StompServer, connect: Connect, destination: str, batch: bool
) -> None:
    with Proxy(server.port) as proxy:
        connection = connect(server.url(port=proxy.port), send_timeout=2)
        session = connection.create_session()
        messages = [jms.Message(n) for n in range(50)]
        proxy.lose(ANSWERS)
        if batch:
            lost = session.send_batch([(destination, m) for m in messages])
        else:
            futures = [session.create_producer(destination).submit(m) for m in messages]
            lost = [future.exception(30) for future in futures]  # type: ignore[misc]

    assert all(isinstance(error, jms.SendOutcomeUnknownError) for error in lost)
    second = connect(server.url())
    again = second.create_session().send_batch([(destination, m) for m in messages])
    assert again == [None] * 50
    session = second.create_session()
    consumer = session.create_consumer(destination, prefetch=500)
    ids: Counter[str | None] = Counter()
    while message := consumer.receive(60 if len(ids) < 50 else 0.5):
        ids[message.message_id] += 1
        session.acknowledge(message)
    assert set(ids) == {message.message_id for message in messages}
    assert set(ids.values()) <= {1, 2}


def test_a_connection_that_hangs_is_noticed_by_heartbeats(
    server: StompServer, connect: Connect
) -> None:
    with Proxy(server.port) as proxy:
        connection = connect(server.url(port=proxy.port), heartbeat=1)
        proxy.hang()

        wait_until(lambda: connection.failed)

    assert "no heartbeat" in str(connection.error)


def test_a_transaction_receives_sends_and_acknowledges_as_one(
    server: StompServer, connect: Connect, destination: str
) -> None:
    connection, out = connect(server.url()), f"{destination}.out"
    connection.create_session().create_producer(destination).send(jms.Message("in"))
    session = connection.create_session(transacted=True)
    consumer = session.create_consumer(destination, prefetch=1)
    producer, told = session.create_producer(out), Told()

    first = consumer.receive(30)
    producer.send(jms.Message("rolled back"))
    session.rollback()
    second = consumer.receive(30)
    producer.send(jms.Message("committed"))
    producer.send_async(jms.Message("told"), told)
    session.commit()
    third = consumer.receive(0.5)
    consumer.close()

    assert first is second
    assert second is not None
    assert second.redelivered
    assert third is None
    assert told.told == [("told", None)]
    assert take_all(connection, out) == ["committed", "told"]
    assert take_all(connection, destination) == []


def test_unacknowledged_messages_go_to_the_next_connection(
    server: StompServer, connect: Connect, destination: str
) -> None:
    first = connect(server.url())
    session = first.create_session()
    session.send_batch([(destination, jms.Message(n)) for n in range(10)])
    consumer = session.create_consumer(destination)
    for _ in range(10):
        message = consumer.receive(30)
        assert message is not None
        if message.body % 2:
            session.acknowledge(message)
    first.close()

    second = connect(server.url()).create_session()
    consumer = second.create_consumer(destination)
    again = [consumer.receive(30) for _ in range(5)]

    assert [m.body for m in again if m is not None] == [0, 2, 4, 6, 8]
    assert all(m.redelivered for m in again if m is not None)
    for message in again:
        assert message is not None
        second.acknowledge(message)
    assert consumer.receive(0.3) is None


def test_prefetch_bounds_the_deliveries_not_acknowledged(
    server: StompServer, connect: Connect, destination: str
) -> None:
    connection = connect(server.url())
    session = connection.create_session()
    session.send_batch([(destination, jms.Message(n)) for n in range(50)])

    consumer = session.create_consumer(destination, prefetch=5)
    received = [consumer.receive(30) for _ in range(5)]

    assert consumer.receive(0.5) is None
    for message in received:
        assert message is not None
        session.acknowledge(message)
    assert consumer.receive(30) is not None


def test_durable_subscription_collects_without_a_consumer(
    server: StompServer, connect: Connect, destination: str
) -> None:
    topic = f"topic:{destination}"
    first = connect(server.url(), client_id=destination)
    first.create_session().create_consumer(topic, subscription=destination)
    first.close()

    second = connect(server.url(), client_id=destination)
    session = second.create_session()
    session.create_producer(topic).send(jms.Message("while away"))
    consumer = session.create_consumer(topic, subscription=destination)
    message = consumer.receive(30)
    assert message is not None
    session.acknowledge(message)
    session.unsubscribe(consumer)
    session.create_producer(topic).send(jms.Message("for nobody"))
    consumer = session.create_consumer(topic, subscription=destination)

    assert message.body == "while away"
    assert consumer.receive(0.5) is None
    session.unsubscribe(consumer)


@pytest.mark.parametrize("body", ["tëxt", b"\0\xff\0", {"a": [1, None]}, None])
def test_bodies_and_headers_arrive_as_they_were_sent(
    server: StompServer, connect: Connect, destination: str, body: Any
) -> None:
    headers = {"a:b": "c:d\r\n\\", "ümlaut": "ß"}
    session = connect(server.url()).create_session()

    session.create_producer(destination).send(jms.Message(body, headers))
    message = session.create_consumer(destination).receive(30)

    assert message is not None
    assert message.body == body
    assert headers.items() <= message.headers.items()
    assert message.problem is None
    session.acknowledge(message, wait=True)


def test_everything_works_over_tls(
    server: StompServer, connect: Connect, destination: str
) -> None:
    connection = connect(server.url(tls=True))
    session = connection.create_session()

    batch = [(destination, jms.Message(b"x" * 10_000)) for _ in range(200)]

    assert session.send_batch(batch) == [None] * 200
    assert len(take_all(connection, destination)) == 200


def test_on_activemq_a_forbidden_message_is_rejected_alone(
    activemq: ActiveMQ, connect: Connect, destination: str
) -> None:
    limited = connect(activemq.url(user=LIMITED_USER))
    good = ALLOWED + destination
    batch = [(good, jms.Message(n)) for n in range(20)]
    batch[7] = batch[13] = (destination, jms.Message("forbidden"))

    outcomes = limited.create_session().send_batch(batch)

    assert [n for n, error in enumerate(outcomes) if error] == [7, 13]
    assert all(isinstance(outcomes[n], jms.SendRejectedError) for n in (7, 13))
    # The connection may have ended: ActiveMQ would keep the refused transaction open.
    stored = take_all(connect(activemq.url()), good)
    assert stored == [n for n in range(20) if n not in (7, 13)]


def test_on_activemq_a_forbidden_send_rolls_its_transaction_back(
    activemq: ActiveMQ, connect: Connect, destination: str
) -> None:
    good = ALLOWED + destination

    def producer() -> jms.MessageProducer:
        limited = connect(activemq.url(user=LIMITED_USER))
        return limited.create_session(transacted=True).create_producer()

    for _ in range(10):
        # A refused COMMIT may end the connection.
        refused = producer()
        refused.send(jms.Message("good"), destination=good)
        refused.send(jms.Message("bad"), destination=destination)
        with pytest.raises(jms.TransactionRolledBackError, match="not authorized"):
            refused.session.commit()
    alone = producer()
    alone.send(jms.Message("alone"), destination=good)
    alone.session.commit()

    assert take_all(connect(activemq.url()), good) == ["alone"]


def test_on_rabbitmq_isolation_finds_the_message_that_ends_connections(
    rabbitmq: RabbitMQ, connect: Connect, destination: str
) -> None:
    limited = connect(rabbitmq.url(user=LIMITED_USER))
    good = ALLOWED + destination
    batch = [(good, jms.Message(n)) for n in range(20)]
    batch[7] = (destination, jms.Message("forbidden"))

    first = limited.create_session().send_batch(batch)
    assert limited.failed
    assert not any(isinstance(error, jms.SendRejectedError) for error in first)
    assert any(error for error in first)
    second = connect(rabbitmq.url(user=LIMITED_USER))
    found = second.create_session().send_batch(batch, isolate=True)

    assert found[:7] == [None] * 7
    assert isinstance(found[7], jms.SendRejectedError)
    assert all(isinstance(error, jms.ConnectionLostError) for error in found[8:])


def test_on_rabbitmq_a_refused_send_puts_its_transaction_in_doubt_or_rolls_it_back(
    rabbitmq: RabbitMQ, connect: Connect, destination: str
) -> None:
    connection = connect(rabbitmq.url(user=LIMITED_USER), send_timeout=10)
    session = connection.create_session(transacted=True)
    producer, good = session.create_producer(), ALLOWED + destination

    producer.send(jms.Message("good"), destination=good)
    producer.send(jms.Message("bad"), destination=destination)
    with pytest.raises((jms.TransactionInDoubtError, jms.TransactionRolledBackError)):
        session.commit()

    assert take_all(connect(rabbitmq.url()), good) == []


def test_a_consumer_that_leaves_in_mid_stream_breaks_no_connection(
    server: StompServer,
    connect: Connect,
    destination: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A consumer acknowledges a message and closes its connection, while the broker is
    sending further messages. The broker reports no error."""
    batch = [(destination, jms.Message(str(n))) for n in range(200)]
    with connect(server.url()).create_session() as session:
        assert session.send_batch(batch) == [None] * 200
    for _ in range(10):
        connection = connect(server.url())
        session = connection.create_session()
        consumer = session.create_consumer(destination, prefetch=10)
        message = consumer.receive(30)
        assert message is not None
        session.acknowledge(message)
        connection.close()
    assert not [one for one in caplog.messages if "ERROR" in one]
