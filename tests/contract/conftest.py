"""Brokers that run as a server, and helpers for tests of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from django_txmsg.brokers import make_broker
from django_txmsg.brokers.base import Broker
from django_txmsg.testing.broker_suite.talk import Talk
from tests.services import BROKERS, ByAmqp
from tests.services.stomp_server import ALLOWED, StompServer

#: The URL of a broker that was started outside the tests, for example in a container.
ELSEWHERE = os.environ.get("TXMSG_TEST_STOMP_URL", "")


class Party(Talk):
    """One broker under test, and its server."""

    def __init__(
        self, name: str, server: StompServer | ByAmqp, stack: ExitStack
    ) -> None:
        self.name, self.server, self.stack = name, server, stack

    def broker(self, **options: str | int) -> Broker:
        """Return the broker. The options are passed to its server's `url()`."""
        return make_broker("tested", self.server.url(**options))


@pytest.fixture(params=BROKERS)
def served(request: pytest.FixtureRequest) -> Iterator[Party]:
    """Each broker that runs as a server."""
    with ExitStack() as stack:
        yield Party(request.param, request.getfixturevalue(request.param), stack)


@pytest.fixture
def allowed(destination: str) -> str:
    """A destination that the user with limited permissions may use."""
    return f"{ALLOWED}{destination}"
