"""The STOMP broker raises errors of the package, whatever error its client raises."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from django_txmsg import wire
from django_txmsg.brokers.base import Outgoing
from django_txmsg.brokers.stomp import StompBroker, StompSession
from django_txmsg.errors import (
    BrokerUnavailable,
    DestinationUnavailable,
    DispatchRejected,
    DispatchUnknown,
)
from django_txmsg.testing import ScriptedBroker
from tests.faults import wait_until

MISSING = "stomp+ssl://127.0.0.1:1?ca=/nowhere/ca.pem"


@pytest.fixture
def session() -> Iterator[StompSession]:
    with ScriptedBroker() as broker:
        session = StompBroker("default", broker.url).open()
        broker.cut()
        wait_until(lambda: session._connection.failed)
        yield session
        session.close()


def test_a_lost_connection_is_a_broker_that_is_unavailable(
    session: StompSession,
) -> None:
    outgoing = Outgoing("orders.place", {}, b"x")

    with pytest.raises(BrokerUnavailable):
        session.send_delayed([outgoing])
    with pytest.raises(BrokerUnavailable):
        session.subscribe("orders.place", prefetch=1)


def test_a_missing_certificate_is_found_by_the_check_and_opens_nothing() -> None:
    broker = StompBroker("default", MISSING)

    assert broker.check()
    with pytest.raises(BrokerUnavailable):
        broker.open()


@pytest.mark.parametrize("isolate", [False, True])
def test_failure_of_rabbitmq_itself_blames_no_message(isolate: bool) -> None:
    """RabbitMQ answers a message with "Processing error" if an earlier message has just
    closed the channel. So no message is rejected because of this error, and the batch
    is sent message by message."""
    batch = [
        Outgoing("orders.place", {wire.MESSAGE_ID: str(uuid.uuid4())}, b"x"),
        Outgoing("orders.place", {wire.MESSAGE_ID: str(uuid.uuid4())}, b"y"),
    ]
    with ScriptedBroker("rabbitmq") as broker:
        session = StompBroker("default", f"{broker.url}?dialect=rabbitmq").open()
        broker.on("SEND", nth=1).reject("Processing error", "Processing error")
        first, *_ = session.send(batch[:1] if isolate else batch, isolate=isolate)
        session.close()
    if isolate:
        assert isinstance(first, DestinationUnavailable)
    else:
        assert isinstance(first, DispatchUnknown)
        assert first.hung_up


def test_refusal_of_a_message_by_rabbitmq_is_still_one() -> None:
    with ScriptedBroker("rabbitmq") as broker:
        session = StompBroker("default", f"{broker.url}?dialect=rabbitmq").open()
        broker.on("SEND", nth=1).reject("Bad header", "priority is no number")
        headers = {wire.MESSAGE_ID: str(uuid.uuid4())}
        (error,) = session.send([Outgoing("orders.place", headers, b"x")], isolate=True)
        session.close()
    assert isinstance(error, DispatchRejected)


@pytest.mark.parametrize("address", ["/queue/a,b", "topic:", "a\x7fb"])
def test_reply_address_that_no_broker_accepts_stops_no_message(address: str) -> None:
    """An operator may redeliver the dead letter of another system's message."""
    headers = {wire.REPLY_TO: address, wire.JMS_REPLY_TO: address}
    batch = [
        Outgoing("orders.place", {wire.MESSAGE_ID: str(uuid.uuid4()), **more}, b"x")
        for more in ({}, headers, headers, {})
    ]
    with ScriptedBroker() as broker:
        session = StompBroker("default", broker.url).open()
        assert session.send(batch) == [None] * 4
        session.close()
        stored = broker.stored("/queue/orders.place")
    assert [one.headers.get(wire.REPLY_TO) for one in stored] == [
        None, address, address, None,
    ]  # fmt: skip
    assert not any(wire.JMS_REPLY_TO in one.headers for one in stored)


@pytest.mark.parametrize(
    ("dialect", "destination", "headers"),
    [
        ("rabbitmq", "orders.paid", {"type": "x" * 300}),
        ("rabbitmq", "orders.paid", {"x" * 300: "x"}),
        ("classic", "orders,paid", {}),
    ],
)
def test_message_that_a_transaction_cannot_send_is_no_outage(
    dialect: Any, destination: str, headers: dict[str, str]
) -> None:
    with ScriptedBroker(dialect) as broker:
        session = StompBroker("default", broker.url).open(transacted=True)
        with pytest.raises(DispatchRejected):
            session.enlist(Outgoing(destination, headers, b"x"))
        session.enlist(Outgoing("orders.paid", {}, b"y"))
        session.commit([])
        session.close()
        assert [one.body for one in broker.stored("/queue/orders.paid")] == [b"y"]


def test_transaction_that_times_out_blames_no_message() -> None:
    """ActiveMQ keeps back the frames of a full queue. When the queue has room again, it
    answers the ABORT."""
    with ScriptedBroker() as broker:
        broker.on("SEND").park()
        broker.on("ABORT", nth=1).drop_receipt()  # the end of the barrier
        stomp = StompBroker("default", f"{broker.url}?send_timeout=0.2")
        session = stomp.open(transacted=True)
        session.enlist(Outgoing("orders.paid", {}, b"x"))
        with pytest.raises(DispatchUnknown):
            session.commit([])
        assert not session._connection.failed
        session.close()


@pytest.mark.parametrize("verb", ["ack", "send_back"])
@pytest.mark.parametrize("refused", [False, True])
def test_lost_acknowledgement_of_a_transacted_session_is_an_outage(
    verb: str, refused: bool
) -> None:
    """The COMMIT that acknowledges a delivery fails. The consumer must not process the
    delivery again in this session: send_back() has stored a copy already."""
    with ScriptedBroker() as broker:
        broker.put("/queue/orders.place", "x")
        session = StompBroker("default", broker.url).open(transacted=True)
        session.subscribe("orders.place", prefetch=1)
        delivery = session.receive(10)
        assert delivery is not None
        if refused:
            broker.on("COMMIT", nth=1).reject("marked rollback only")
        else:
            broker.on("COMMIT", nth=1).cut()
        headers = {wire.MESSAGE_ID: str(uuid.uuid4())}
        calls = {
            "ack": lambda: session.ack([delivery]),
            "send_back": lambda: session.send_back(delivery, headers),
        }
        with pytest.raises(BrokerUnavailable):
            calls[verb]()
        session.close()
        assert len(broker.received("SEND")) == (verb == "send_back")
