"""Headers of other versions, brokers and senders. The tests check which of them a
handler sees, and which ones are copied to messages that the handler or the package
sends."""

from __future__ import annotations

import pytest

from django_txmsg import wire
from django_txmsg.envelope.message import Message
from django_txmsg.envelope.redelivery import RedeliveryPolicy
from django_txmsg.models import DeadLetter, InboxMessage, OutboxMessage
from django_txmsg.models.queue import QueueMessage
from django_txmsg.sending.outbox import send_message
from tests.running import committing, declared, put, step

pytestmark = [committing, pytest.mark.usefixtures("impatient")]

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
WRITTEN = {"tenant": "north", "x-request": "7", "priority-class": "gold"}
#: A later version's, the protocol's, and what brokers add.
ADDED = {
    "txmsg-of-a-later-version": "1",
    "TXMSG-Shouted": "1",
    "content-length": "1",
    "expires": "17",
    "timestamp": "1700000000000",
    "priority": "4",
    "user-id": "guest",
    "JMSXGroupID": "g",
    "AMQ_SCHEDULED_DELAY": "600000",
    "amqp-message-id": "a",
    "x-first-death-queue": "q",
    "x-delivery-count": "3",
    "breadcrumbId": "b",
}
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("name", sorted(ADDED))
def test_handler_gets_only_the_senders_headers(name: str) -> None:
    assert not wire.senders({name: "x"})
    assert wire.travels(name) == name.lower().startswith(wire.PREFIX)


def test_a_handler_forwards_the_headers_that_it_got() -> None:
    """A handler sends a message with the headers of its own message. Headers that a
    broker or a later version of this package has added are not among them."""

    def handler(message: Message) -> None:
        assert message.headers == {**WRITTEN, "traceparent": TRACE}
        send_message("tests.next", message.body, headers=message.headers)

    with declared(handler) as stage:
        put(
            stage.destination,
            b"1",
            {**JSON, **WRITTEN, **ADDED, "traceparent": TRACE, "correlation-id": "c"},
        )
        step(stage)
    row = OutboxMessage.objects.get(destination="tests.next")
    assert row.headers == {**WRITTEN, "traceparent": TRACE}
    assert row.correlation_id == "c"


def test_a_returned_copy_drops_the_brokers_headers() -> None:
    def handler(message: Message) -> None:
        raise ValueError

    policy = RedeliveryPolicy(mode="broker", initial_delay=0.0, max_redeliveries=1)
    with declared(handler, redelivery=policy) as stage:
        sent = put(stage.destination, b"1", {**JSON, **WRITTEN, **ADDED})
        step(stage)
        copy = QueueMessage.objects.get(queue=stage.destination).headers
        step(stage)
    ours = {name for name in copy if name.lower().startswith(wire.PREFIX)}
    assert copy.keys() - ours == {*WRITTEN, *JSON}
    assert "txmsg-of-a-later-version" in ours
    letter = DeadLetter.objects.get()
    assert letter.message_id != sent
    assert wire.FAILED_ATTEMPT not in letter.headers
    assert letter.headers.items() >= WRITTEN.items()


@pytest.mark.parametrize(
    "trace", ["", "x" * 70_000, "00-zz-b7-01", f"{TRACE}\n", TRACE.upper()]
)
def test_inherited_foreign_headers_fit_their_columns(trace: str) -> None:
    """A correlation id that is too long is truncated, and an invalid trace context is
    not inherited."""
    long = "ü" * 3000

    def handler(message: Message) -> None:
        send_message("tests.next", message.correlation_id)

    with declared(handler) as stage:
        put(
            stage.destination,
            b"1",
            {**JSON, "correlation-id": long, "traceparent": trace},
        )
        step(stage)
    assert InboxMessage.objects.get().state == "processed"
    row = OutboxMessage.objects.get(destination="tests.next")
    assert row.correlation_id == long[:255]
    assert wire.TRACEPARENT not in row.headers
