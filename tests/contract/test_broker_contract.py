"""The promises that relay and consumer rely on: the public suite for each of our
brokers, and further tests for some of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from django.db import connection

from django_txmsg import wire
from django_txmsg.brokers import make_broker
from django_txmsg.brokers.base import Broker, Outgoing
from django_txmsg.errors import (
    BrokerError,
    BrokerUnavailable,
    DestinationUnavailable,
    DispatchHeld,
    DispatchUnknown,
)
from django_txmsg.models import QueueMessage, QueueSubscription
from django_txmsg.testing.broker_suite import BrokerSuite, bodies, take
from django_txmsg.testing.broker_suite.talk import numbered
from tests.faults import ManageProcess, wait_until
from tests.services import BROKERS, ActiveMQ
from tests.services.stomp_server import LIMITED_USER

from .conftest import ELSEWHERE, Party

Manage = Callable[..., ManageProcess]


@pytest.mark.django_db(transaction=True)
class TestTheEmbeddedBroker(BrokerSuite):
    url = "database://default?lease=2&poll=0.02"
    held_for = 6.0

    @pytest.fixture(autouse=True)
    def _processes(self, manage: Manage) -> None:
        self.manage = manage

    def broker(self) -> Broker:
        return make_broker("tested", self.url)

    @contextmanager
    def held_elsewhere(self, destination: str) -> Iterator[None]:
        """Start another process that receives messages and does not acknowledge them.
        The process uses the same database as the tests."""
        code = f"from tests.contract.holder import hold; hold({self.url!r}, "
        consumer = self.manage("shell", "-c", f"{code}{destination!r})")
        consumer.wait_for_line("holds 2")
        yield
        consumer.kill()


class OnServer(BrokerSuite):
    """The suite for a broker that runs as a server."""

    held_for = 5.0

    @pytest.fixture(autouse=True)
    def _server(self, request: pytest.FixtureRequest, server: str) -> None:
        self.server = request.getfixturevalue(server)

    def broker(self) -> Broker:
        return make_broker("tested", self.server.url())


@pytest.mark.parametrize("server", BROKERS)
class TestServers(OnServer):
    def refused(self, destination: str) -> Outgoing | None:
        """Return a message that RabbitMQ refuses, because its header CC must be a
        list."""
        if isinstance(self.server, ActiveMQ):
            return None
        return Outgoing(destination, {"CC": "no list"}, b"refused")

    def turned_away(self, destination: str) -> AbstractContextManager[object] | None:
        """Use a queue that is full and rejects messages. (For ActiveMQ,
        `test_refusals.py` does this with another server.)"""
        if isinstance(self.server, ActiveMQ):
            return None
        return self._full(destination)

    @contextmanager
    def _full(self, destination: str) -> Iterator[None]:
        name = f"full-{destination}"
        self.server.control(
            "set_policy", name, f"^{destination}$",
            '{"max-length": 1, "overflow": "reject-publish"}', "--apply-to", "queues",
        )  # fmt: skip

        def is_full() -> bool:
            with self.broker().open() as session:
                (outcome,) = session.send(
                    [Outgoing(destination, {}, b"")], isolate=True
                )
            return outcome is not None

        wait_until(is_full)
        yield
        self.server.control("clear_policy", name)
        wait_until(lambda: not is_full())
        self.rest(destination)


if ELSEWHERE:

    class TestElsewhere(BrokerSuite):
        def broker(self) -> Broker:
            return make_broker("tested", ELSEWHERE)


def ship(broker: Broker, batch: list[Outgoing]) -> dict[bytes, BrokerError | None]:
    """Send the messages. Then, like the relay, resend those that have no outcome."""
    outcomes: dict[bytes, BrokerError | None] = {}
    isolate = False
    for _ in range(2 * len(batch)):
        left = [one for one in batch if one.body not in outcomes]
        if not left:
            return outcomes
        with broker.open() as session:
            answers = session.send(left, isolate=isolate)
        for one, answer in zip(left, answers, strict=True):
            hung_up_on = isolate and getattr(answer, "written", False)
            known = answer is None or isinstance(answer, DestinationUnavailable)
            if known or hung_up_on:
                outcomes[one.body] = answer
        isolate = any(isinstance(answer, DispatchUnknown) for answer in answers)
    raise AssertionError(f"no end to it: {outcomes}")


@pytest.mark.parametrize("count", [3, 50])
def test_a_message_the_broker_refuses_holds_up_no_other(
    served: Party, allowed: str, count: int
) -> None:
    batch = numbered(allowed, count)
    batch[count // 2] = Outgoing("forbidden", {}, b"bad")

    outcomes = ship(served.broker(user=LIMITED_USER), batch)

    bad = outcomes.pop(b"bad")
    assert isinstance(bad, BrokerError)
    assert set(outcomes.values()) == {None}
    good = [one.body for one in batch if one.body != b"bad"]
    # Resent after a hang-up: at least once, never less.
    assert sorted(set(served.rest(allowed))) == sorted(good)


@pytest.mark.parametrize("count", [3, 50])
def test_followers_of_a_refused_message_are_held_back(
    activemq: ActiveMQ, destination: str, count: int
) -> None:
    allowed = f"allowed.{destination}"
    key = {wire.KEY: "k"}
    batch = [Outgoing("forbidden", key, b"first"), Outgoing(allowed, key, b"second")]
    batch += [Outgoing(allowed, {}, b"other") for _ in range(count - 2)]
    broker = make_broker("default", activemq.url(user=LIMITED_USER))

    with broker.open() as session:
        first, second, *others = session.send(batch)

    assert isinstance(first, DestinationUnavailable)
    assert isinstance(second, DispatchHeld)
    assert set(others) == {None}


@pytest.mark.django_db(transaction=True)
def test_the_embedded_broker_extends_its_lease_while_a_handler_takes_its_time(
    destination: str,
) -> None:
    broker = make_broker("tested", "database://default?lease=0.5&poll=0.02")
    with broker.open() as slow, broker.open() as other:
        slow.send(numbered(destination, 1))
        slow.subscribe(destination, prefetch=1)
        [delivery] = take(slow, 1)
        other.subscribe(destination, prefetch=1)
        assert other.receive(2.0) is None
        # By the one thread that renews all leases in this database.
        names = [one.name for one in threading.enumerate()]
        assert names.count("txmsg-leases-default") == 1
        assert "txmsg-leases" not in names
        slow.ack([delivery])
        assert other.receive(0) is None


@pytest.mark.postgresql
@pytest.mark.django_db(transaction=True)
def test_a_lost_database_connection_is_an_unavailable_broker_and_comes_back(
    destination: str,
) -> None:
    broker = make_broker("tested", "database://")
    with broker.open() as session:
        assert session.send(numbered(destination, 1)) == [None]
        connection.connection.close()  # as a server that goes away does
        with pytest.raises(BrokerUnavailable):
            session.send(numbered(destination, 1))
        session.ping()
    with broker.open() as session:
        session.subscribe(destination, prefetch=5)
        assert bodies(take(session, 1)) == [b"0"]
        assert session.receive(0.1) is None


@pytest.mark.django_db(transaction=True)
def test_unnamed_subscription_ends_with_its_session(
    destination: str,
) -> None:
    broker = make_broker("default", "database://")
    topic = f"topic:{destination}"
    with broker.open() as session:
        session.subscribe(topic, prefetch=1)
        with broker.open() as sender:
            sender.send([Outgoing(topic, {}, b"for nobody any more")])

    assert not QueueSubscription.objects.filter(topic=topic).exists()
    assert not QueueMessage.objects.filter(queue__startswith=topic).exists()
