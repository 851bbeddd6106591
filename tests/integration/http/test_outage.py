"""Requests while the broker refuses connections, is cut off, or does not answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.core.management import call_command
from django.test import Client, override_settings

from django_txmsg.errors import BrokerUnavailable
from django_txmsg.http_outbox import control_connection
from django_txmsg.models import OutboxMessage
from tests.app.models import Order
from tests.faults import ANSWERS, Proxy, wait_until
from tests.running import drained
from tests.services import ActiveMQ

from .conftest import MIDDLEWARE

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def proxy(activemq: ActiveMQ) -> Iterator[Proxy]:
    with Proxy(activemq.port) as between:
        yield between


@pytest.fixture
def serve(
    activemq: ActiveMQ, proxy: Proxy, destination: str
) -> Iterator[Callable[..., override_settings]]:
    """Return a function that creates settings. The settings' broker is behind a proxy,
    so that a test can cut the connections."""

    def settings(**http: Any) -> override_settings:
        return override_settings(
            ROOT_URLCONF="tests.integration.http.urls",
            MIDDLEWARE=MIDDLEWARE,
            TXMSG={
                "SERVICE": destination,
                "BROKERS": {"default": {"URL": activemq.url(port=proxy.port)}},
                "DISPATCH_ON_COMMIT": "off",
                # Each request tells the broker itself.
                "HTTP": {"CONTROL_GROUP": 0, **http},
            },
        )

    yield settings
    control_connection.close_channels()


def place(number: str) -> int:
    client = Client(raise_request_exception=False)
    return client.post(f"/order?number={number}").status_code


def control_messages(destination: str) -> int:
    """Receive the control messages from the broker, and return their number."""
    return len(drained(f"{destination}.txmsg.control"))


def test_an_outage_fails_no_request(serve, proxy, heard, caplog, destination) -> None:
    with serve():
        assert place("before") == 201
        proxy.refuse()
        proxy.cut()
        for number in range(20):
            assert place(str(number)) == 201
        assert Order.objects.count() == 21
        outcomes = [one["outcome"] for one in heard["sent"]]
        assert outcomes == ["sent"] + ["failed"] * 20
        assert all(
            isinstance(one["error"], BrokerUnavailable) for one in heard["sent"][1:]
        )
        warnings = [one for one in caplog.records if one.levelname == "WARNING"]
        assert len([one for one in warnings if "breaker" in one.name]) == 1
        # Most did not even try: an outage costs a request next to nothing.
        assert sorted(one["duration"] for one in heard["sent"])[10] < 0.05

        proxy.accept()
        call_command("relay", once=True)
        assert not OutboxMessage.objects.filter(dispatched_at=None).exists()
        wait_until(lambda: _sent(place, heard))


def test_with_fail_an_outage_fails_requests_that_send(serve, proxy, heard) -> None:
    with serve(ON_CONTROL_FAILURE="fail"):
        proxy.refuse()
        assert place("1") == 500
        assert Client().get("/read").status_code == 200
        assert not Order.objects.exists()
        assert not OutboxMessage.objects.exists()
        assert [one["outcome"] for one in heard["ended"]] == ["failed", "committed"]
        proxy.accept()
        wait_until(lambda: place("2") == 201)
        assert Order.objects.get().number == "2"


def test_a_broker_without_receipts_is_waited_for_once(serve, proxy, heard) -> None:
    with serve(CONTROL_TIMEOUT=2.0):
        assert place("1") == 201
        proxy.hang(ANSWERS)
        began = time.monotonic()
        assert place("2") == 201
        took = time.monotonic() - began
        assert place("3") == 201

        assert [one["outcome"] for one in heard["sent"]] == ["sent", "failed", "failed"]
        assert took >= 2.0
        assert heard["sent"][2]["duration"] < 2.0
        assert Order.objects.count() == 3
        proxy.resume()
        wait_until(lambda: _sent(place, heard))


def test_a_connection_that_broke_meanwhile_is_replaced(
    serve, proxy, heard, destination
) -> None:
    with serve():
        for number in range(4):
            assert place(str(number)) == 201
            proxy.cut()
        assert [one["outcome"] for one in heard["sent"]] == ["sent"] * 4
        assert proxy.accepted == 4
        assert control_messages(destination) == 4


def test_requests_share_a_connection(serve, proxy, heard) -> None:
    with serve():
        for number in range(10):
            assert place(str(number)) == 201
    assert proxy.accepted == 1


def test_the_relay_alone_gets_everything_out(serve, destination) -> None:
    with serve():
        for number in range(10):
            assert place(str(number)) == 201
        assert OutboxMessage.objects.filter(dispatched_at=None).count() == 20
        call_command("relay", once=True)
        assert not OutboxMessage.objects.filter(dispatched_at=None).exists()
        assert control_messages(destination) == 10


def _sent(place: Callable[[str], int], heard: dict[str, list[dict[str, Any]]]) -> bool:
    assert place(f"again-{len(heard['sent'])}") == 201
    return heard["sent"][-1]["outcome"] == "sent"
