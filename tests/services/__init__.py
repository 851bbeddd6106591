"""Real servers for the tests and the benchmarks, on free ports of this machine.

Each server lives in a temporary directory of its own, is ended by its own process id,
and can be killed and restarted with its data and its port. No installed service is
touched. `tests/conftest.py` makes fixtures of them.
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

_shared: dict[type[Server], Server] = {}

__all__ = [
    "S3",
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
    """Return this process's one server of a kind, running."""
    server = _shared.get(kind)
    if server is None:
        server = _shared[kind] = _begin(kind)
    assert isinstance(server, kind)
    server.start()
    return server


def _begin(kind: type[S]) -> S:
    """Start a server for the first time: nobody knows its ports yet, so that another
    on other ports does as well where a busy machine made this one fail."""
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
