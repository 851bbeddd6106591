"""The permissions in the how-to are enough for a service, and no more than needed."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

import pytest

from django_txmsg.brokers import make_broker
from django_txmsg.brokers.base import Broker, Outgoing
from django_txmsg.errors import BrokerUnavailable, DestinationUnavailable
from tests import services
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "how-to" / "secure-the-broker.md").read_text()
COMMANDS = [
    shlex.split(line)[2:]
    for line in PAGE.splitlines()
    if line.startswith("$ rabbitmqctl")
]
SOON = 30.0


@pytest.fixture(scope="module")
def permitted(rabbitmq: services.RabbitMQ) -> services.RabbitMQ:
    """The RabbitMQ server on which the page's commands have been run."""
    for command in COMMANDS:
        # As an argument: 4.3 cannot read it from a pipe.
        password = ["secret"] if command[0] == "add_user" else []
        rabbitmq.control(*command, *password)
    return rabbitmq


@pytest.fixture(scope="module", params=["stomp", "amqp"])
def shop(request: pytest.FixtureRequest, permitted: services.RabbitMQ) -> Broker:
    """The broker, with the permissions of the service `shop`."""
    who = {"user": "shop", "password": "secret"}
    url = permitted.url(**who, dialect="rabbitmq")
    if request.param == "amqp":
        # Taking what STOMP has made is what the page says of existing queues.
        url = services.ByAmqp(permitted).url(**who, queue_type="classic")
    return make_broker("tested", url)


def send(broker: Broker, destination: str) -> Any:
    """Send one message, and return its error, if any."""
    with broker.open() as session:
        return session.send([Outgoing(destination, {}, b"1")])[0]


def receives(broker: Broker, destination: str, subscriber: str | None = None) -> bool:
    """Return whether a message was received. Raises an error if the user may not
    read."""
    with broker.open(subscriber=subscriber) as session:
        session.subscribe(destination, prefetch=1, subscriber=subscriber)
        if subscriber:
            assert send(broker, destination) is None
        delivery = session.receive(SOON)
        if delivery is not None:
            session.ack([delivery])
        return delivery is not None


def test_the_page_has_both_commands() -> None:
    assert [command[0] for command in COMMANDS] == ["add_user", "set_permissions"]


@pytest.mark.parametrize("queue", ["shop.ship", "shop.txmsg.control"])
def test_user_may_use_the_services_own_queues(shop: Broker, queue: str) -> None:
    assert send(shop, queue) is None
    assert receives(shop, queue)


def test_user_may_use_topics(shop: Broker) -> None:
    assert receives(shop, "topic:orders.placed", subscriber="shop.on-order")


def test_user_may_send_to_permitted_queues(shop: Broker) -> None:
    assert send(shop, "payments.charge") is None


@pytest.mark.parametrize(
    "act",
    [
        lambda shop: receives(shop, "payments.charge"),
        lambda shop: receives(shop, "billing.txmsg.control"),
        lambda shop: receives(shop, "topic:orders.placed", "billing.on-order"),
    ],
    ids=["another queue", "another control queue", "another subscription"],
)
def test_user_may_read_no_other_queue(
    shop: Broker, act: Callable[[Broker], Any]
) -> None:
    with pytest.raises(BrokerUnavailable, match="refused"):
        act(shop)


@pytest.mark.parametrize("queue", ["bank.transfer", "billing.txmsg.control"])
def test_user_may_send_to_no_other_queue(shop: Broker, queue: str) -> None:
    assert isinstance(send(shop, queue), DestinationUnavailable)
