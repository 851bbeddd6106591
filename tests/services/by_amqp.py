"""A RabbitMQ node for AMQP clients. STOMP clients can use the same node; the ports and
the URLs for AMQP are different."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from .rabbitmq import RabbitMQ
from .stomp_server import PASSWORD, USER


class ByAmqp:
    """A RabbitMQ node with the ports and URLs for AMQP. All other attributes are those
    of the node."""

    name = "rabbitmq_amqp"

    def __init__(self, node: RabbitMQ) -> None:
        self.node = node
        self.port, self.tls_port = node.amqp_port, node.amqps_port

    def __getattr__(self, name: str) -> Any:
        return getattr(self.node, name)

    def url(
        self,
        *,
        tls: bool = False,
        port: int | None = None,
        user: str = USER,
        password: str = PASSWORD,
        **options: str,
    ) -> str:
        """Return the broker's URL or, with `port`, the URL of a proxy in front of the
        broker."""
        scheme, own = ("amqps", self.tls_port) if tls else ("amqp", self.port)
        if tls:
            options.setdefault("ca", str(self.node.ca))
        query = f"?{urlencode(options)}" if options else ""
        return f"{scheme}://{user}:{password}@127.0.0.1:{port or own}{query}"
