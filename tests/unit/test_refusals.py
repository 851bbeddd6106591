"""Refusals of a broker: because of the message, or because of its destination."""

from __future__ import annotations

import pytest

from django_txmsg.brokers import refusals
from django_txmsg.errors import DestinationUnavailable, DispatchRejected


@pytest.mark.parametrize("where", ["vhost '/'", "cluster"])
def test_a_limit_of_queues_is_no_fault_of_the_message(where: str) -> None:
    """An operator can raise both limits of RabbitMQ."""
    text = f"cannot declare queue 'x': queue limit in {where} (10) is reached"

    assert isinstance(refusals.by_amqp(406, text), DestinationUnavailable)
    assert isinstance(refusals.by_stomp(text, text), DestinationUnavailable)


def artemis(text: str) -> str:
    """Return Artemis's header `message` and the body of its ERROR."""
    return f"AMQ339011: Error sending message CoreMessage[messageID=0]: {text}"


@pytest.mark.parametrize(
    "text",
    [
        artemis("AMQ229032: User: u does not have permission='SEND' on address q"),
        artemis('AMQ229102: Address "q" is full.'),
        "AMQ229213: User: u does not have permission='CREATE_DURABLE_QUEUE' for queue"
        " q on address q",
        "AMQ229119: Free storage space is at 1MB of 9MB total. Usage rate is 91% which"
        " is beyond the configured <max-disk-usage>.",
        "AMQ339001: Destination does not exist: q",
        "AMQ339041: Not allowed to specify ANYCAST semantics on [MULTICAST] address.",
    ],
)
def test_a_destination_that_artemis_closes_is_no_fault_of_the_message(
    text: str,
) -> None:
    """The texts come from Artemis's source code."""
    assert isinstance(refusals.by_stomp(text, text), DestinationUnavailable)


def test_a_message_that_artemis_cannot_read_is_rejected() -> None:
    text = artemis("AMQ339028: Message header too big, increase minLargeMessageSize.")
    assert isinstance(refusals.by_stomp(text, text), DispatchRejected)
