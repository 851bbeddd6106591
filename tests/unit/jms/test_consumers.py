"""A consumer receives and acknowledges messages one by one, buffers only a few
messages, and survives malformed ones."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from django_txmsg import jms
from django_txmsg.testing import ScriptedBroker
from tests.faults import wait_until

Connect = Callable[..., jms.Connection]
Scripted = Callable[..., ScriptedBroker]


def test_a_delivery_has_its_raw_headers_body_and_ack_id(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    broker.put("/queue/in", b"\0raw\xff", {"txmsg-id": "7", "a:b": "c\nd"})

    message = session.create_consumer("in").receive(10)

    assert message is not None
    assert message.raw_body == message.body == b"\0raw\xff"
    assert message.raw_headers["a:b"] == "c\nd"
    assert message.message_id == "7"
    assert message.ack_id == message.raw_headers["ack"]
    assert (message.redelivered, message.problem) == (False, None)
    assert str(message.destination) == "in"


def test_a_message_without_our_id_has_the_brokers(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    broker.put("/queue/in", b"x", {"priority": "high"})

    message = session.create_consumer("in").receive(10)

    assert message is not None
    assert message.message_id == message.raw_headers["message-id"]
    assert message.priority == 4


def test_each_message_is_acknowledged_by_itself(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    for n in range(3):
        broker.put("/queue/in", str(n))
    consumer = session.create_consumer("in")
    first, second, third = (consumer.receive(10) for _ in range(3))
    assert first is not None
    assert third is not None

    session.acknowledge(third)
    session.acknowledge(first, wait=True)
    session.connection.close()

    acked = [frame["id"] for frame in broker.received("ACK")]
    assert acked == [third.ack_id, first.ack_id]
    assert [m.body for m in broker.stored("/queue/in")] == [b"1"]
    assert second is not None


def test_acknowledgements_are_written_together(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    for n in range(200):
        broker.put("/queue/in", str(n))
    consumer = session.create_consumer("in", prefetch=200)

    for _ in range(200):
        message = consumer.receive(10)
        assert message is not None
        session.acknowledge(message)
    session.connection.ping()

    assert len(broker.received("ACK")) == 200
    assert all(frame.receipt is None for frame in broker.received("ACK"))
    assert broker.stored("/queue/in") == []


def test_acknowledging_twice_or_elsewhere_is_an_illegal_state(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    broker.put("/queue/in", "x")
    consumer = session.create_consumer("in")
    message = consumer.receive(10)
    assert message is not None

    with pytest.raises(jms.IllegalStateError, match="where it was received"):
        session.connection.create_session().acknowledge(message)
    session.acknowledge(message)
    with pytest.raises(jms.IllegalStateError, match="already"):
        session.acknowledge(message)
    with pytest.raises(jms.IllegalStateError):
        session.acknowledge(jms.Message("never received"))


@pytest.mark.parametrize(
    ("profile", "header", "value"),
    [
        ("classic", "activemq.prefetchSize", "3"),
        ("rabbitmq", "prefetch-count", "3"),
        ("artemis", "consumer-window-size", "30720"),
    ],
)
def test_prefetch_bounds_what_is_buffered(
    scripted: Scripted, connect: Connect, profile: str, header: str, value: str
) -> None:
    broker = scripted(profile)
    queue = "in" if profile == "artemis" else "/queue/in"
    body = b"x" * (9_000 if profile == "artemis" else 10)
    for _ in range(20):
        broker.put(queue, body, {"destination-type": "ANYCAST"})
    session = connect(broker).create_session()

    consumer = session.create_consumer("in", prefetch=3)
    wait_until(lambda: consumer.buffered >= 3)
    session.connection.ping()

    assert broker.received("SUBSCRIBE")[0][header] == value
    assert consumer.buffered in (3, 4)  # a window of bytes ends after a message
    received = [consumer.receive(10) for _ in range(3)]
    for message in received:
        assert message is not None
        session.acknowledge(message)
    assert consumer.receive(10) is not None


def test_prefetch_of_nothing_is_refused(session: jms.Session) -> None:
    with pytest.raises(ValueError, match="prefetch"):
        session.create_consumer("in", prefetch=0)


def test_auto_acknowledges_as_receive_returns(
    broker: ScriptedBroker, connect: Connect
) -> None:
    broker.put("/queue/in", "x")
    session = connect(broker).create_session(ack_mode=jms.AckMode.AUTO)

    message = session.create_consumer("in").receive(10)

    assert message is not None
    assert broker.wait_for("ACK")[0]["id"] == message.ack_id


def test_receive_gives_nothing_when_nothing_came_in_time_or_when_closed(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    consumer = session.create_consumer("in")

    assert consumer.receive(0.05) is None
    assert consumer.receive_nowait() is None
    closer = threading.Timer(0.2, consumer.close)
    closer.start()
    assert consumer.receive() is None
    closer.join(30)
    assert consumer.receive() is None


def test_iterating_ends_when_the_consumer_is_closed(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    for n in range(3):
        broker.put("/queue/in", str(n))
    bodies = []

    with session.create_consumer("in") as consumer:
        for message in consumer:
            bodies.append(message.raw_body)
            session.acknowledge(message)
            if len(bodies) == 3:
                consumer.close()

    assert bodies == [b"0", b"1", b"2"]


def test_a_stopped_connection_hands_out_nothing_until_it_is_started(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    broker.put("/queue/in", "x")
    consumer = session.create_consumer("in")
    session.connection.stop()

    assert consumer.receive(0.1) is None
    starter = threading.Timer(0.1, session.connection.start)
    starter.start()

    assert consumer.receive(10) is not None
    starter.join(30)


def test_a_lost_connection_wakes_receive_and_hands_out_nothing_buffered(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    consumer = session.create_consumer("in")
    cutter = threading.Timer(0.2, broker.cut)
    cutter.start()

    with pytest.raises(jms.ConnectionLostError):
        consumer.receive(30)
    cutter.join(30)
    with pytest.raises(jms.ConnectionLostError):
        consumer.receive(0)
    consumer.close()


def test_unacknowledged_messages_arrive_on_the_next_connection(
    broker: ScriptedBroker, connect: Connect
) -> None:
    broker.put("/queue/in", "x")
    first = connect(broker)
    assert first.create_session().create_consumer("in").receive(10) is not None

    first.close()
    again = connect(broker).create_session().create_consumer("in").receive(10)

    assert again is not None
    assert again.redelivered


def test_recover_hands_out_again_what_was_not_acknowledged(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    for n in range(3):
        broker.put("/queue/in", str(n))
    consumer = session.create_consumer("in")
    first, second, third = (consumer.receive(10) for _ in range(3))
    assert second is not None
    session.acknowledge(second)

    session.recover()

    assert [consumer.receive(10), consumer.receive(10)] == [first, third]
    assert third is not None
    assert third.redelivered


@pytest.mark.parametrize(
    ("line", "problem"),
    [(b"bad:\\q", "escape"), (b"bad:\xff", "UTF-8"), (b"no colon", "colon")],
)
def test_a_malformed_delivery_is_handed_out_with_its_problem_and_can_be_settled(
    broker: ScriptedBroker, session: jms.Session, line: bytes, problem: str
) -> None:
    consumer = session.create_consumer("in")
    subscription = broker.received("SUBSCRIBE")[0]["id"].encode()

    broker.write(
        b"MESSAGE\nack:77\nmessage-id:m\nsubscription:" + subscription
        + b"\ncontent-type:application/json\n" + line + b"\n\n{not json\x00"
    )  # fmt: skip
    message = consumer.receive(10)

    assert message is not None
    assert problem in str(message.problem)
    assert message.raw_body == b"{not json"
    with pytest.raises(jms.MessageFormatError, match="no application/json"):
        _ = message.body
    assert message.ack_id == "77"
    broker.put("/queue/in", "after")
    after = consumer.receive(10)
    assert after is not None
    assert after.raw_body == b"after"


def test_a_delivery_without_an_ack_header_cannot_be_acknowledged(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    consumer = session.create_consumer("in")
    subscription = broker.received("SUBSCRIBE")[0]["id"].encode()
    broker.write(b"MESSAGE\nsubscription:" + subscription + b"\n\nx\x00")

    message = consumer.receive(10)

    assert message is not None
    with pytest.raises(jms.MessageFormatError, match="ack"):
        session.acknowledge(message)


def test_delivery_without_a_consumer_is_ignored(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    broker.write(b"MESSAGE\nsubscription:unknown\nack:1\n\nx\x00")

    session.connection.ping()


def test_a_refused_subscription_raises_in_the_caller(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    broker.on("SUBSCRIBE").reject("not authorised to read")

    with pytest.raises(jms.RequestRejectedError, match="not authorised to read"):
        session.create_consumer("in")


def test_a_subscription_without_an_answer_times_out(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    broker.on("SUBSCRIBE").drop_receipt()

    with pytest.raises(jms.RequestTimeoutError, match="subscription to in"):
        session.create_consumer("in", timeout=0.2)


@pytest.mark.parametrize("profile", ["classic", "rabbitmq", "artemis"])
def test_durable_subscription_collects_without_a_consumer(
    scripted: Scripted, connect: Connect, profile: str
) -> None:
    broker = scripted(profile)
    first = connect(broker, client_id="shop")
    first.create_session().create_consumer("topic:news", subscription="mine")
    first.close()

    second = connect(broker, client_id="shop")
    session = second.create_session()
    session.create_producer("topic:news").send(jms.Message("while away"))
    consumer = session.create_consumer("topic:news", subscription="mine")
    message = consumer.receive(10)
    assert message is not None
    session.acknowledge(message)

    assert message.body == "while away"
    session.unsubscribe(consumer)


def test_two_subscribers_of_a_topic_both_get_the_message(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    consumers = [session.create_consumer("topic:news") for _ in range(2)]

    session.create_producer("topic:news").send(jms.Message("x"))

    assert all(consumer.receive(10) is not None for consumer in consumers)


def test_a_durable_subscription_needs_a_topic_and_where_so_a_client_id(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    with pytest.raises(jms.UnsupportedOperationError, match="topic"):
        session.create_consumer("in", subscription="mine")
    with pytest.raises(jms.IllegalStateError, match="client_id"):
        session.create_consumer("topic:news", subscription="mine")


def test_closing_a_consumer_gives_its_messages_back(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    broker.put("/queue/in", "x")
    consumer = session.create_consumer("in")
    message = consumer.receive(10)
    assert message is not None

    consumer.close()
    consumer.close()

    with pytest.raises(jms.IllegalStateError, match="closed"):
        session.acknowledge(message)
    assert session.create_consumer("in").receive(10) is not None
