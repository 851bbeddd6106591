"""The brokers under contract: each is asked the same questions by the same tests."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from urllib.parse import urlencode

import pytest

from django_txmsg.brokers import make_broker
from django_txmsg.brokers.base import Broker, Delivery, Outgoing, Session
from tests.services.stomp_server import ALLOWED, StompServer

#: More than any broker here needs to answer, on a machine that is busy.
SOON = 30.0


#: A broker that somebody else has started: its own versions, in its own container.
ELSEWHERE = os.environ.get("TXMSG_TEST_STOMP_URL", "")


class Elsewhere:
    """The server behind that URL; nobody here stops or configures it."""

    def url(self, **options: str | int) -> str:
        """Return its URL with more options."""
        return f"{ELSEWHERE}?{urlencode(options)}" if options else ELSEWHERE


@dataclass
class Party:
    """One broker under contract, and what a test may ask about it."""

    name: str
    server: StompServer | Elsewhere | None
    stack: ExitStack

    def broker(self, **options: str | int) -> Broker:
        """Return the broker; options are those of its server's `url()`."""
        if self.server is None:
            return make_broker("tested", "database://default?lease=2&poll=0.02")
        return make_broker("tested", self.server.url(**options))

    def open(
        self, *, transacted: bool = False, subscriber: str | None = None
    ) -> Session:
        """Return a session that ends with the test, unless it is closed before."""
        session = self.broker().open(transacted=transacted, subscriber=subscriber)
        return self.stack.enter_context(session)

    def consumer(
        self,
        destination: str,
        *,
        prefetch: int = 10,
        transacted: bool = False,
        subscriber: str | None = None,
    ) -> Session:
        """Return a session subscribed to the destination."""
        session = self.open(transacted=transacted, subscriber=subscriber)
        session.subscribe(destination, prefetch=prefetch, subscriber=subscriber)
        return session

    def send(self, *messages: Outgoing) -> None:
        """Send with a session of its own, and insist on every receipt."""
        with self.broker().open() as session:
            assert session.send(messages) == [None] * len(messages)

    def rest(self, destination: str) -> list[bytes]:
        """Take and acknowledge all that waits; a last message of ours shows the end."""
        end = b"the last of them"
        self.send(Outgoing(destination, {}, end))
        found: list[bytes] = []
        with self.broker().open() as session:
            session.subscribe(destination, prefetch=100)
            in_hand: list[Delivery] = []
            while end not in found:
                in_hand += take(session, 1)
                found.append(in_hand[-1].body)
                if len(in_hand) == 50 or found[-1] == end:
                    session.ack(in_hand)
                    in_hand = []
        return found[:-1]


def take(session: Session, count: int) -> list[Delivery]:
    """Receive so many, or fail."""
    found = []
    for _ in range(count):
        delivery = session.receive(SOON)
        assert delivery is not None, f"only {len(found)} of {count} came"
        found.append(delivery)
    return found


def bodies(deliveries: Sequence[Delivery]) -> list[bytes]:
    """What is in them."""
    return [delivery.body for delivery in deliveries]


@pytest.fixture(
    params=[
        pytest.param("database", marks=pytest.mark.django_db(transaction=True)),
        "activemq",
        "rabbitmq",
        *(["elsewhere"] if ELSEWHERE else []),
    ]
)
def party(request: pytest.FixtureRequest) -> Iterator[Party]:
    """Each of the brokers in turn."""
    name = request.param
    if name == "elsewhere":
        server = Elsewhere()
    else:
        server = None if name == "database" else request.getfixturevalue(name)
    with ExitStack() as stack:
        yield Party(name, server, stack)


@pytest.fixture(params=["activemq", "rabbitmq"])
def served(request: pytest.FixtureRequest) -> Iterator[Party]:
    """Each of the brokers that live in a server of their own."""
    with ExitStack() as stack:
        yield Party(request.param, request.getfixturevalue(request.param), stack)


@pytest.fixture
def allowed(destination: str) -> str:
    """A destination that the limited user may use as well."""
    return f"{ALLOWED}{destination}"
