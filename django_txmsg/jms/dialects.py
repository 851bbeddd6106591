"""The dialects of the STOMP brokers, and how a server is recognized.

ActiveMQ Classic 5.17 and RabbitMQ 3.10 were run; Artemis is written from its sources
and documentation and was not run.
"""

from __future__ import annotations

from dataclasses import dataclass

from .destination import Destination
from .dialect import Dialect
from .rabbitmq_dialect import RabbitMQDialect


@dataclass(frozen=True, slots=True)
class ArtemisDialect(Dialect):
    """Artemis: prefetch in bytes, and a queue must be requested by name."""

    name: str = "artemis"
    prefetch_header: str = "consumer-window-size"
    prefetch_unit: int = 10_240
    acks_join_transaction: bool = False
    serves_jms: bool = False

    def send_headers(self, destination: Destination) -> dict[str, str]:
        """Request the routing: the default drops messages without a subscriber."""
        kind = "MULTICAST" if destination.is_topic else "ANYCAST"
        return {"destination": self.address(destination), "destination-type": kind}

    def address(self, destination: Destination) -> str:
        """Artemis addresses are plain names."""
        return Dialect.address(self, destination).split("/", 2)[2]

    def subscribe_headers(
        self, destination: Destination, prefetch: int, subscription: str | None
    ) -> dict[str, str]:
        """Set the routing on SUBSCRIBE too."""
        headers = Dialect.subscribe_headers(self, destination, prefetch, subscription)
        kind = "MULTICAST" if destination.is_topic else "ANYCAST"
        return {**headers, "subscription-type": kind}

    def durable_headers(self, subscription: str) -> dict[str, str]:
        """Artemis has its own header for a durable subscription's name."""
        return {"durable-subscription-name": subscription}


ACTIVEMQ = Dialect()
ARTEMIS = ArtemisDialect()
RABBITMQ = RabbitMQDialect()
BY_NAME = {dialect.name: dialect for dialect in (ACTIVEMQ, ARTEMIS, RABBITMQ)}


def recognize(server: str) -> Dialect:
    """Return the dialect for the ``server`` header of the CONNECTED frame.

    An unknown server is treated as ActiveMQ Classic: its destination names are the most
    common, and a receipt proves every send on any broker.
    """
    lowered = server.lower()
    if "artemis" in lowered:
        return ARTEMIS
    if "rabbitmq" in lowered:
        return RABBITMQ
    return ACTIVEMQ
