"""The broker for URLs with `amqp://` and `amqps://`: hops 4 to 6 on RabbitMQ over AMQP
0-9-1.

The library py-amqp does the handshake and encodes AMQP's methods. This folder
implements publishing, deliveries and confirms. So a single write or read can contain
many messages, which py-amqp does not do.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...envelope.broker_url import hurry
from ...errors import BrokerUnavailable
from .. import deaths
from ..base import Broker, faults
from .link import Link, read_url
from .session import AmqpSession


class AmqpBroker(Broker):
    """RabbitMQ over AMQP 0-9-1. Each session has its own connection."""

    kind = "rabbitmq"

    def __init__(self, alias: str, url: str) -> None:
        super().__init__(alias, url)
        self.tls_scheme = "amqps" if url.startswith("amqp:") else ""

    def open(
        self, *, transacted: bool = False, subscriber: str | None = None
    ) -> AmqpSession:
        # A subscriber is a queue: the connection needs no name for it.
        try:
            options, addresses = read_url(self._url)
        except (OSError, ValueError) as error:
            raise BrokerUnavailable(str(error)) from error
        reasons, cause = [], None
        for host, port in addresses:
            try:
                return AmqpSession(Link((host, port), options))
            except BrokerUnavailable as error:
                reasons.append(f"{host}:{port}: {str(error).rstrip('.')}.")
                cause = error.__cause__
        text = f"No broker took the connection. {' '.join(reasons)}"
        raise BrokerUnavailable(text) from cause

    def hurried(self, timeout: float) -> AmqpBroker:
        return AmqpBroker(self.alias, hurry(self._url, timeout))

    def shares_topics(self) -> bool:
        return True

    def unsubscribe(self, topic: str, subscriber: str) -> None:
        session = self.open()
        with session:
            session.delete_subscription(subscriber)

    def dead_letter_cause(self, headers: Mapping[str, str]) -> tuple[str, str]:
        return deaths.cause(headers)

    def check(self) -> list[str]:
        return faults(lambda: read_url(self._url))
