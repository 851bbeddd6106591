"""Both styles of the API accept a completion listener. In addition, a send can return a
future."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from django_txmsg import jms
from django_txmsg.testing import ScriptedBroker

from .conftest import ADDRESS, DESTINATION, Listener

Connect = Callable[..., jms.Connection]
Scripted = Callable[..., ScriptedBroker]


@pytest.mark.parametrize("destination", ["orders.place", "topic:orders.placed"])
@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize("delivery", [None, jms.Delivery(priority=7)])
def test_a_producer_sends_asynchronously_in_all_four_shapes(
    broker: ScriptedBroker,
    session: jms.Session,
    destination: str,
    bound: bool,
    delivery: jms.Delivery | None,
) -> None:
    listener = Listener()
    producer = session.create_producer(destination if bound else None)
    where: dict[str, Any] = {} if bound else {"destination": destination}

    producer.send_async(jms.Message("x"), listener, delivery=delivery, **where)

    assert listener.wait_for(1) == ["x"]
    (sent,) = broker.received("SEND")
    kind, _, name = destination.rpartition(":")
    assert sent.destination == f"/{kind or 'queue'}/{name}"
    assert sent.headers.get("priority") == ("7" if delivery else None)
    assert sent["persistent"] == "true"


@pytest.mark.parametrize("listener", [None, object(), (print,), (1, 2)])
def test_a_missing_listener_is_an_argument_error_before_any_other_check(
    broker: ScriptedBroker, session: jms.Session, listener: Any
) -> None:
    producer = session.create_producer()
    producer.close()

    with pytest.raises(ValueError, match="on_completion"):
        producer.send_async(None, listener, destination=None)  # type: ignore[arg-type]

    session.connection.ping()
    assert broker.received("SEND") == []


def test_a_bound_producer_given_a_destination_is_unsupported(
    producer: jms.MessageProducer,
) -> None:
    listener = Listener()

    with pytest.raises(jms.UnsupportedOperationError, match=r"orders\.place"):
        producer.send_async(jms.Message("x"), listener, destination="other")

    producer.close()
    assert listener.told == []


def test_an_unbound_producer_given_no_destination_is_unsupported(
    session: jms.Session,
) -> None:
    producer, listener = session.create_producer(), Listener()

    with pytest.raises(jms.UnsupportedOperationError, match="name one"):
        producer.send_async(jms.Message("x"), listener)

    producer.close()
    assert listener.told == []


@pytest.mark.parametrize("destination", ["", "a\nb", "a,b", 7])
def test_a_malformed_destination_is_an_invalid_destination(
    session: jms.Session, destination: Any
) -> None:
    producer = session.create_producer()

    with pytest.raises(jms.InvalidDestinationError):
        producer.send_async(jms.Message("x"), Listener(), destination=destination)


def test_a_slash_in_a_name_is_malformed_on_rabbitmq(
    scripted: Scripted, connect: Connect
) -> None:
    producer = connect(scripted("rabbitmq")).create_session().create_producer("a/b")

    with pytest.raises(jms.InvalidDestinationError):
        producer.send(jms.Message("x"))


@pytest.mark.parametrize(
    "message",
    [
        None,
        "text",
        jms.Message(object()),
        jms.Message("x", {"a\0": "b"}),
        jms.Message("x", {"receipt": "mine"}),
        jms.Message("x", {"expires": "soon"}),
    ],
)
def test_a_message_that_cannot_be_encoded_is_a_format_error_and_takes_no_slot(
    broker: ScriptedBroker, connect: Connect, message: Any
) -> None:
    session = connect(broker, max_in_flight=1).create_session()
    producer, listener = session.create_producer(DESTINATION), Listener()

    with pytest.raises(jms.MessageFormatError):
        producer.send_async(message, listener)
    producer.send_async(jms.Message("good"), listener, timeout=5)

    assert listener.wait_for(1) == ["good"]
    assert session.sends.in_flight == 0


def test_setting_no_listener_makes_sends_synchronous_again(
    broker: ScriptedBroker, connect: Connect
) -> None:
    context = jms.Context(
        connect(broker), transacted=False, ack_mode=jms.AckMode.INDIVIDUAL
    )
    listener = Listener()
    broker.on("SEND", nth=1).hold_receipt()
    producer = context.create_producer().set_async(listener)

    producer.send(DESTINATION, "first")
    assert producer.get_async() is listener
    producer.set_async(None).send(DESTINATION, "second")

    assert producer.get_async() is None
    assert [frame.text for frame in broker.received("SEND")] == ["first", "second"]
    assert listener.told == []
    broker.release()
    assert listener.wait_for(1) == ["first"]


def test_each_send_keeps_the_listener_in_force_at_its_call(
    broker: ScriptedBroker, connect: Connect
) -> None:
    context = jms.Context(
        connect(broker), transacted=False, ack_mode=jms.AckMode.INDIVIDUAL
    )
    first, second = Listener(), Listener()
    broker.on("SEND").hold_receipt()
    producer = context.create_producer()

    producer.set_async(first).send(DESTINATION, "1")
    producer.set_async(second).send(DESTINATION, "2")
    broker.wait_for_held(2)
    broker.release()

    assert (first.wait_for(1), second.wait_for(1)) == (["1"], ["2"])


def test_the_fluent_producer_sets_delivery_options(
    broker: ScriptedBroker, connect: Connect
) -> None:
    connection = connect(broker)
    context = jms.Context(connection, transacted=False, ack_mode=jms.AckMode.INDIVIDUAL)
    listener = Listener()

    (
        context.create_producer()
        .set_async(listener)
        .set_priority(4)
        .set_priority(9)
        .set_delivery_mode(jms.DeliveryMode.NON_PERSISTENT)
        .set_time_to_live(timedelta(minutes=1))
        .set_delivery_delay(timedelta(milliseconds=1))
        .send(DESTINATION, "text")
    )
    future = context.create_producer().submit(DESTINATION, jms.Message("m"))

    assert listener.wait_for(1) == ["text"]
    assert future.result(10).body == "m"
    sent, plain = broker.received("SEND")
    assert sent["priority"] == "9"
    assert sent["persistent"] == "false"
    assert sent["AMQ_SCHEDULED_DELAY"] == "1"
    assert int(sent["expires"]) > 0
    assert plain.headers.keys().isdisjoint({"priority", "expires"})


@pytest.mark.parametrize("profile", ["classic", "artemis", "rabbitmq"])
def test_a_volatile_message_is_marked_as_each_broker_requires(
    scripted: Callable[..., ScriptedBroker], connect: Connect, profile: str
) -> None:
    broker = scripted(profile)
    producer = connect(broker).create_session().create_producer(DESTINATION)
    volatile = jms.Delivery(jms.DeliveryMode.NON_PERSISTENT)

    producer.send(jms.Message("x"), delivery=volatile)

    # RabbitMQ would declare a queue of this connection's own.
    expected = None if profile == "rabbitmq" else "false"
    assert broker.received("SEND")[0].headers.get("persistent") == expected


@pytest.mark.parametrize(
    "options",
    [
        {"priority": 4.5},
        {"priority": True},
        {"priority": 10},
        {"mode": -1},
        {"mode": "true"},
        {"delay": 5},
        {"time_to_live": 1.5},
        {"delay": timedelta(seconds=-1)},
    ],
)
def test_impossible_delivery_options_are_refused_when_created(
    options: dict[str, Any],
) -> None:
    with pytest.raises(ValueError, match=r"priority|mode|duration|negative"):
        jms.Delivery(**options)


@pytest.mark.parametrize(
    "body", ["tëxt", "", b"\0bytes\0", b"", {"a": [1, None, "é"]}, 0, None]
)
def test_every_kind_of_body_and_header_survives_an_asynchronous_send(
    broker: ScriptedBroker, session: jms.Session, body: Any
) -> None:
    headers = {"a:b": "c:d", "line": "one\r\ntwo", "back\\slash": "\\n", "empty": ""}
    producer, listener = session.create_producer(DESTINATION), Listener()

    producer.send_async(jms.Message(body, headers), listener)
    listener.wait_for(1)
    received = session.create_consumer(DESTINATION).receive(10)

    assert received is not None
    assert received.body == (body if body not in ("", b"") else received.body)
    assert received.raw_body == broker.received("SEND")[0].body
    assert headers.items() <= received.headers.items()
    assert received.problem is None


def test_delivery_options_affect_their_call_alone_and_show_on_the_message(
    broker: ScriptedBroker, producer: jms.MessageProducer
) -> None:
    special, plain, listener = jms.Message("a"), jms.Message("b"), Listener()
    delivery = jms.Delivery(
        jms.DeliveryMode.NON_PERSISTENT, 8, time_to_live=timedelta(hours=1)
    )

    producer.send_async(special, listener, delivery=delivery)
    producer.send_async(plain, listener)
    listener.wait_for(2)

    assert special.priority == 8
    assert special.delivery_mode is jms.DeliveryMode.NON_PERSISTENT
    assert special.expiration is not None
    assert special.timestamp is not None
    assert special.expiration - special.timestamp == timedelta(hours=1)
    assert (plain.priority, plain.expiration) == (4, None)
    assert plain.delivery_mode is jms.DeliveryMode.PERSISTENT
    sent = broker.received("SEND")
    assert [frame.headers.get("expires") is None for frame in sent] == [False, True]


@pytest.mark.parametrize(
    "wrong", [{"priority": 10}, {"priority": -1}, {"delay": timedelta(-1)}]
)
def test_impossible_delivery_options_are_argument_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"priority|negative"):
        jms.Delivery(**wrong)


# -- the future ----------------------------------------------------------------------


def test_a_future_resolves_when_the_callback_would_have_run(
    broker: ScriptedBroker, producer: jms.MessageProducer
) -> None:
    broker.on("SEND", times=1).hold_receipt()
    message, listener = jms.Message("1"), Listener()

    producer.send_async(message, listener)
    future = producer.submit(jms.Message("2"))
    broker.wait_for("SEND", 2)

    with pytest.raises(concurrent.futures.TimeoutError):
        future.result(0.1)  # its own receipt is there, that of the one before is not
    broker.release()
    assert future.result(10).body == "2"
    assert listener.bodies == ["1"]


def test_a_future_carries_the_error_a_listener_would_have_got(
    broker: ScriptedBroker, producer: jms.MessageProducer
) -> None:
    broker.on("SEND").reject("quota exceeded")

    error = producer.submit(jms.Message("x")).exception(10)

    assert isinstance(error, jms.SendRejectedError)
    assert "quota exceeded" in error.broker_message


def test_a_future_cannot_be_cancelled_once_its_frame_is_on_the_wire(
    broker: ScriptedBroker, producer: jms.MessageProducer
) -> None:
    broker.on("SEND").hold_receipt()
    future = producer.submit(jms.Message("x"))
    broker.wait_for_held(1)

    assert future.cancel() is False
    broker.release()
    assert future.result(10).body == "x"


def test_a_future_cancelled_before_its_frame_was_written_is_never_sent(
    scripted: Scripted, connect: Connect
) -> None:
    broker = scripted(receive_buffer=65_536)
    producer = connect(broker).create_session().create_producer(DESTINATION)
    broker.stall()
    big = producer.submit(jms.Message(b"x" * 10_000_000))
    message = jms.Message("withdrawn")
    future = producer.submit(message)

    assert future.cancel() is True
    broker.resume()

    big.result(30)
    assert future.cancelled()
    producer.send(jms.Message("last"))
    assert [len(frame.body) for frame in broker.received("SEND")] == [10_000_000, 4]
    assert message.body == "withdrawn"


def test_a_future_can_be_awaited(
    broker: ScriptedBroker, producer: jms.MessageProducer
) -> None:
    async def send_some() -> list[Any]:
        futures = [producer.submit(jms.Message(n)) for n in range(50)]
        return [(await future).body for future in futures]

    assert asyncio.run(send_some()) == list(range(50))


def test_awaiting_a_future_raises_its_error(
    broker: ScriptedBroker, producer: jms.MessageProducer
) -> None:
    broker.on("SEND").reject("no")

    async def send_one() -> None:
        await producer.submit(jms.Message("x"))

    with pytest.raises(jms.SendRejectedError):
        asyncio.run(send_one())


def test_waiting_in_a_callback_for_a_future_of_its_own_session_raises_at_once(
    broker: ScriptedBroker, producer: jms.MessageProducer
) -> None:
    errors: list[Exception] = []

    def wait_for_another(message: jms.Message) -> None:
        for waiting in ("result", "exception", "__await__"):
            future = producer.submit(jms.Message("inner"))
            with pytest.raises(jms.IllegalStateError) as caught:
                getattr(future, waiting)()
            errors.append(caught.value)

    producer.send_async(jms.Message("outer"), (wait_for_another, print))
    producer.session.drain(30)

    assert len(errors) == 3
    assert broker.received("SEND")[0].destination == ADDRESS
