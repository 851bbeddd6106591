"""Every broker carries large bodies. Header blocks that are too large are refused."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from django_txmsg import Refuse
from django_txmsg.brokers import get_broker
from django_txmsg.consuming.decoding import MAX_HEADER_BLOCK
from django_txmsg.envelope.message import Message
from django_txmsg.envelope.redelivery import RedeliveryPolicy
from django_txmsg.models import DeadLetter, InboxMessage
from tests.faults import wait_until
from tests.running import committing, declared, put, running, send, txmsg
from tests.services.stomp_server import StompServer

# One database will do: what differs here is the broker.
pytestmark = [committing, pytest.mark.postgresql]

MEGABYTES = 5


@pytest.fixture(autouse=True, params=["activemq", "rabbitmq"])
def broker(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make each broker the default in turn."""
    server: StompServer = request.getfixturevalue(request.param)
    with txmsg(BROKERS={"default": {"URL": server.url()}}):
        yield


def empty(destination: str) -> bool:
    with get_broker("default").open() as session:
        session.subscribe(destination, prefetch=1)
        return session.receive(0.5) is None


@pytest.mark.parametrize("mode", ["non_blocking", "broker"])
def test_a_big_body_is_processed_redelivered_and_buried_whole(
    mode: str, destination: str
) -> None:
    body = os.urandom(MEGABYTES * 1024 * 1024)
    right: list[bool] = []

    def handler(message: Message) -> None:
        right.append(message.body == body)
        raise ValueError if message.delivery_attempt == 1 else Refuse("big")

    policy = RedeliveryPolicy(initial_delay=0.0, mode=mode)
    with declared(handler, destination, redelivery=policy) as stage:
        send(destination, body)
        with running(stage):
            wait_until(DeadLetter.objects.exists, deadline=60)
        assert empty(destination)
    assert right == [True, True]
    assert bytes(DeadLetter.objects.get().body) == body


@pytest.mark.parametrize("transaction", ["outbox", "best_effort_1pc"])
def test_a_header_block_over_the_limit_is_buried_at_once(
    transaction: str, destination: str
) -> None:
    big = {f"h{n}": str(n % 10) * 8000 for n in range(MAX_HEADER_BLOCK // 8000 + 1)}
    got: list[Message] = []
    with declared(got.append, destination, transaction=transaction) as stage:
        put(destination, b"\0its body", {"content-type": "text/plain", **big})
        good = put(destination)
        with running(stage):
            wait_until(DeadLetter.objects.exists, deadline=60)
            wait_until(lambda: bool(got), deadline=60)
        assert empty(destination)
    assert [one.id for one in got] == [good]
    letter = DeadLetter.objects.get()
    assert (letter.reason, letter.attempts) == ("headers_too_large", 0)
    assert bytes(letter.body) == b"\0its body"
    assert letter.headers.items() >= big.items()
    assert not InboxMessage.objects.filter(message_id=letter.message_id).exists()
