"""On the real brokers, control messages are removed when they are no longer needed."""

from __future__ import annotations

import dataclasses
import threading
import uuid

import pytest
from django.test import override_settings

from django_txmsg import wire
from django_txmsg.brokers import get_broker
from django_txmsg.http_outbox.control_message import ControlMessage
from tests.services.stomp_server import StompServer


@pytest.fixture(params=["activemq", "rabbitmq", "rabbitmq_amqp"])
def server(request: pytest.FixtureRequest) -> StompServer:
    """Each broker in turn, and RabbitMQ with both protocols."""
    found: StompServer = request.getfixturevalue(request.param)
    return found


def test_unreceived_control_message_expires(server, destination) -> None:
    """No consumer receives a service's control messages. The broker removes each
    message at the end of its time to live."""
    brokers = {"default": {"URL": server.url()}}
    with override_settings(TXMSG={"SERVICE": destination, "BROKERS": brokers}):
        sent = [
            ControlMessage(str(uuid.uuid4()), uuid.uuid4(), "default", "delay")
            for _ in range(2)
        ]
        mortal, lasting = (one.outgoing() for one in sent)
        assert mortal.time_to_live == pytest.approx(86_415, abs=60)
        mortal = dataclasses.replace(mortal, time_to_live=0.5)
        with get_broker().open() as session:
            assert session.send([mortal, lasting]) == [None, None]
        threading.Event().wait(1.0)
        with get_broker().open() as session:
            session.subscribe(wire.control_destination(destination), prefetch=10)
            first = session.receive(20)
            assert first is not None
            assert ControlMessage.read(first).signed
            assert ControlMessage.read(first).session_id == sent[1].session_id
            session.ack([first])
            assert session.receive(0.5) is None
