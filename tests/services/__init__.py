"""Real servers for the tests and the benchmarks, on free ports of this machine.

Each server has its own temporary directory, and is stopped by its process id. It can be
killed and restarted with the same data and port. Installed services are not touched.
`tests/conftest.py` makes fixtures of these servers.
"""

from __future__ import annotations

import sys
from typing import TypeVar

from .activemq import ActiveMQ, SilentActiveMQ, SmallActiveMQ
from .by_amqp import ByAmqp
from .pgbouncer import PgBouncer
from .postgresql import PostgreSQL
from .rabbitmq import RabbitMQ
from .redis import Redis
from .s3 import S3
from .server import Server, ServerFailedError, free_port
from .small_disk import SmallDisk

S = TypeVar("S", bound=Server)

#: The servers by the names of their fixtures.
SERVERS: dict[str, type[Server]] = {
    "activemq": ActiveMQ,
    "postgres": PostgreSQL,
    "rabbitmq": RabbitMQ,
    "redis": Redis,
    "s3": S3,
    # Soon full: one reports it, one does not answer.
    "small_activemq": SmallActiveMQ,
    "silent_activemq": SilentActiveMQ,
}
#: The fixtures whose servers the suite for brokers is run against.
BROKERS = ("activemq", "rabbitmq", "rabbitmq_amqp")

_shared: dict[type[Server], Server] = {}

__all__ = [
    "BROKERS",
    "S3",
    "SERVERS",
    "ActiveMQ",
    "ByAmqp",
    "PgBouncer",
    "PostgreSQL",
    "RabbitMQ",
    "Redis",
    "Server",
    "ServerFailedError",
    "SilentActiveMQ",
    "SmallActiveMQ",
    "SmallDisk",
    "free_port",
    "running_servers",
    "shared",
]


def shared(kind: type[S]) -> S:
    """Return this process's shared server of the class `kind`. Start it if it is not
    running."""
    server = _shared.get(kind)
    if server is None:
        server = _shared[kind] = _begin(kind)
    assert isinstance(server, kind)
    server.start()
    return server


def _begin(kind: type[S]) -> S:
    """Start a new server. A start can fail because the machine is busy, so try once
    more, on other ports."""
    server = _new(kind)
    try:
        server.start()
    except ServerFailedError as error:
        sys.stderr.write(f"{error}\nAnother {kind.name} is started.\n")
        server.remove()
        server = _new(kind)
        server.start()
    return server


def _new(kind: type[S]) -> S:
    if issubclass(kind, PgBouncer):
        return kind(shared(PostgreSQL))
    return kind()


def running_servers() -> list[Server]:
    """Return the servers that `shared` has started so far."""
    return list(_shared.values())
