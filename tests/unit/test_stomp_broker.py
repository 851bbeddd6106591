"""The STOMP broker raises our errors, whatever the client below it raises."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from django_txmsg.brokers.base import Outgoing
from django_txmsg.brokers.stomp import StompBroker, StompSession
from django_txmsg.errors import BrokerUnavailable
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
