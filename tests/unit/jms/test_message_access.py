"""Headers that the client sets are readable after completion, but not while the message
is in flight."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from django_txmsg import jms
from django_txmsg.testing import ScriptedBroker

from .conftest import DESTINATION, Listener

READS: list[Callable[[jms.Message], Any]] = [
    lambda m: m.body,
    lambda m: m.headers,
    lambda m: m.message_id,
    lambda m: m.destination,
    lambda m: m.timestamp,
    lambda m: m.delivery_mode,
    lambda m: m.priority,
    lambda m: m.expiration,
    lambda m: setattr(m, "body", "changed"),
]


@pytest.mark.parametrize("read", READS)
def test_a_message_in_flight_is_not_accessible_and_is_again_in_the_callback(
    broker: ScriptedBroker, producer: jms.MessageProducer, read: Callable[..., Any]
) -> None:
    broker.on("SEND").hold_receipt()
    seen: list[jms.Message] = []
    message = jms.Message({"n": 1})

    producer.send_async(message, (lambda m: (read(m), seen.append(m)), print))
    broker.wait_for_held(1)
    with pytest.raises(jms.MessageNotAccessibleError, match="in flight"):
        read(message)
    broker.release()
    producer.close()

    assert seen == [message]
    assert seen[0] is message


def test_what_the_client_sets_is_readable_in_on_completion(
    broker: ScriptedBroker, producer: jms.MessageProducer
) -> None:
    seen: list[tuple[Any, ...]] = []

    producer.send_async(
        jms.Message("x"),
        (
            lambda m: seen.append(
                (m.message_id, m.destination, m.timestamp, m.delivery_mode, m.priority)
            ),
            print,
        ),
    )
    producer.close()

    ((message_id, destination, timestamp, mode, priority),) = seen
    assert message_id == broker.received("SEND")[0]["txmsg-id"]
    assert str(destination) == DESTINATION
    assert timestamp.tzinfo is not None
    assert (mode, priority) == (jms.DeliveryMode.PERSISTENT, 4)


def test_sending_a_message_in_flight_again_raises_in_the_caller(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    broker.on("SEND").hold_receipt()
    producer, listener = session.create_producer(DESTINATION), Listener()
    message = jms.Message("x")
    producer.send_async(message, listener)

    for send in (
        lambda: producer.send_async(message, listener),
        lambda: producer.send(message),
        lambda: producer.submit(message),
    ):
        with pytest.raises(jms.MessageNotAccessibleError):
            send()

    broker.wait_for_held(1)
    broker.release()
    producer.close()
    assert listener.bodies == ["x"]
    assert len(broker.received("SEND")) == 1


def test_the_payload_is_what_it_was_at_the_send(
    broker: ScriptedBroker, connect: Callable[..., jms.Connection]
) -> None:
    producer = connect(broker).create_session().create_producer(DESTINATION)
    body, headers = {"items": [1]}, {"h": "v"}
    message = jms.Message(body, headers)
    kept = message.headers
    broker.on("SEND").hold_receipt()

    producer.send_async(message, Listener())
    body["items"].append(2)
    kept["h"] = "changed"

    (frame,) = broker.wait_for("SEND")
    assert frame.text == '{"items":[1]}'
    assert frame["h"] == "v"


def test_the_received_message_is_accessible_while_the_sent_one_is_in_flight(
    broker: ScriptedBroker, session: jms.Session
) -> None:
    broker.on("SEND").hold_receipt()
    message = jms.Message("x")
    session.create_producer(DESTINATION).send_async(message, Listener())

    received = session.create_consumer(DESTINATION).receive(10)

    assert received is not None
    assert received.body == "x"
    with pytest.raises(jms.MessageNotAccessibleError):
        _ = message.body


def test_repr_and_logging_of_a_message_in_flight_do_not_raise(
    broker: ScriptedBroker,
    producer: jms.MessageProducer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    broker.on("SEND").hold_receipt()
    message = jms.Message("x")
    producer.send_async(message, Listener())

    logging.getLogger("test").warning("sending %s and %r", message, message)

    assert repr(message) == "<Message in flight>"
    assert "in flight" in caplog.text


def test_the_id_stays_the_same_over_every_resend_of_a_message(
    broker: ScriptedBroker, producer: jms.MessageProducer
) -> None:
    message = jms.Message("x")

    producer.send(message)
    producer.send(message)
    producer.send(jms.Message("y", {"txmsg-id": "mine"}))

    first, second, third = (f["txmsg-id"] for f in broker.received("SEND"))
    assert first == second == message.message_id
    assert third == "mine"
