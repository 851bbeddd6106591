"""Refusals of a broker: because of the message, or because of its destination."""

from __future__ import annotations

import pytest

from django_txmsg.brokers import refusals
from django_txmsg.errors import DestinationUnavailable


@pytest.mark.parametrize("where", ["vhost '/'", "cluster"])
def test_a_limit_of_queues_is_no_fault_of_the_message(where: str) -> None:
    """An operator can raise both limits of RabbitMQ."""
    text = f"cannot declare queue 'x': queue limit in {where} (10) is reached"

    assert isinstance(refusals.by_amqp(406, text), DestinationUnavailable)
    assert isinstance(refusals.by_stomp(text, text), DestinationUnavailable)
