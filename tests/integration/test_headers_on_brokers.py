"""Every header that a caller may set arrives unchanged on every broker.

The names of the tested headers are unusual, or have a meaning in a broker's manual.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from django_txmsg.brokers import get_broker
from django_txmsg.brokers.base import Outgoing
from django_txmsg.envelope.message import check_headers, check_key
from django_txmsg.errors import InvalidMessage
from tests.running import committing, txmsg
from tests.services.stomp_server import StompServer

# One database will do: what differs here is the broker.
pytestmark = [committing, pytest.mark.sqlite]

#: Names with a meaning to ActiveMQ, RabbitMQ or their STOMP plugins.
KNOWN = [
    "ack",
    "activemq.dispatchAsync",
    "activemq.exclusive",
    "activemq.noLocal",
    "activemq.prefetchSize",
    "activemq.priority",
    "activemq.retroactive",
    "activemq.subscriptionName",
    "amq-msg-type",
    "AMQ_SCHEDULED_CRON",
    "AMQ_SCHEDULED_DELAY",
    "AMQ_SCHEDULED_PERIOD",
    "AMQ_SCHEDULED_REPEAT",
    "amqp-message-id",
    "app-id",
    "auto-delete",
    "browser",
    "browser-end",
    "cluster-id",
    "content-encoding",
    "correlation-id",
    "delivery-mode",
    "destination-type",
    "durable",
    "exclusive",
    "expiration",
    "expires",
    "heart-beat",
    "host",
    "id",
    "include-seq",
    "JMSCorrelationID",
    "JMSDeliveryMode",
    "JMSDestination",
    "JMSExpiration",
    "JMSMessageID",
    "JMSPriority",
    "JMSRedelivered",
    "JMSReplyTo",
    "JMSTimestamp",
    "JMSType",
    "JMSXGroupFirstForConsumer",
    "JMSXGroupID",
    "JMSXGroupSeq",
    "JMSXUserID",
    "login",
    "message-id",
    "no-local",
    "original-destination",
    "originalExpiration",
    "passcode",
    "persistent",
    "prefetch-count",
    "priority",
    "receipt",
    "redelivered",
    "reply-to",
    "requeue",
    "selector",
    "server",
    "session",
    "subscription",
    "timestamp",
    "transaction",
    "transformation",
    "transformation-error",
    "type",
    "user-id",
    "version",
    "x-acquired-count",
    "x-cancel-on-ha-failover",
    "x-death",
    "x-dead-letter-exchange",
    "x-dead-letter-routing-key",
    "x-delivery-count",
    "x-delivery-limit",
    "x-expires",
    "x-max-age",
    "x-max-length",
    "x-max-length-bytes",
    "x-max-priority",
    "x-message-ttl",
    "x-overflow",
    "x-priority",
    "x-queue-master-locator",
    "x-queue-name",
    "x-queue-type",
    "x-queue-version",
    "x-single-active-consumer",
    "x-stream-filter",
    "x-stream-max-segment-size-bytes",
    "x-stream-offset",
]
#: Each must arrive with every value; the second would be a number to who reads one.
VALUES = ["a: value\\with\nall of it ä ᚠ \uffee", "300", " ", ""]


def carried(name: str, value: str) -> bool:
    """Return whether a caller may set this header."""
    try:
        check_headers({name: value})
    except InvalidMessage:
        return False
    return True


@pytest.fixture(params=["activemq", "rabbitmq", "rabbitmq_amqp"])
def server(request: pytest.FixtureRequest) -> Iterator[StompServer]:
    """Make each broker the default in turn."""
    found: StompServer = request.getfixturevalue(request.param)
    with txmsg(BROKERS={"default": {"URL": found.url()}}):
        yield found


def test_allowed_headers_arrive_unchanged(
    server: StompServer, destination: str
) -> None:
    wanted = [
        {name: value} for name in KNOWN for value in VALUES if carried(name, value)
    ]
    wrong: list[object] = []
    for headers in wanted:
        with get_broker().open() as session:
            (outcome,) = session.send(
                [Outgoing(destination, headers, b"x")], isolate=True
            )
            if outcome is not None:
                wrong.append((headers, outcome))
                continue
            session.subscribe(destination, prefetch=1)
            delivery = session.receive(10)
            if delivery is None:
                wrong.append((headers, "did not arrive"))
                continue
            session.ack([delivery])
            arrived = {name: delivery.headers.get(name) for name in headers}
            if arrived != headers or delivery.body != b"x":
                wrong.append((headers, arrived, delivery.body))
    assert not wrong
    assert wanted


@pytest.mark.parametrize("text", ["a😀b", "\U00010000", "\U0010ffff"])
def test_headers_that_activemq_loses_on_restart_are_refused(text: str) -> None:
    """Headers with these characters are refused. ActiveMQ stores headers in a form of
    UTF-8 that cannot express the characters."""
    for headers in ({"name": text}, {text: "value"}):
        with pytest.raises(InvalidMessage, match="U\\+FFFF"):
            check_headers(headers)
    with pytest.raises(InvalidMessage, match="U\\+FFFF"):
        check_key(text)
    assert check_key("\uffee") == "\uffee"
