"""The options of an AMQP URL: `amqp://user:password@host:5672/vhost?heartbeat=10`.

Several hosts are separated by commas. If an option is unknown, the error suggests the
most similar known option.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import unquote

from ...envelope import broker_url
from ...envelope.broker_url import ConnectionOptions, without_password

DEFAULT_PORTS = {"amqp": 5672, "amqps": 5671}


@dataclass(frozen=True, slots=True)
class Options(ConnectionOptions):
    """The options of a session."""

    user: str = "guest"
    password: str = field(default="guest", repr=False)
    #: Virtual host; also the path of the URL.
    vhost: str = "/"
    #: Seconds between heartbeats in both directions; 0 for none.
    heartbeat: int = 10
    #: Most unconfirmed sends before the next ones wait.
    max_in_flight: int = 1000
    #: Whether missing queues are declared.
    declare: bool = True
    #: The type of a declared queue.
    queue_type: Literal["quorum", "classic"] = "quorum"


def read_url(url: str) -> tuple[Options, list[tuple[str, int]]]:
    """Return the options and addresses of a URL.

    Raises ValueError for a malformed URL or an unknown option, and OSError or
    ssl.SSLError if a certificate file cannot be read.
    """
    parts, query = broker_url.read_url(url)
    if parts.fragment:
        raise ValueError(
            f'{without_password(url)} is not a broker URL: percent-encode a "#"'
        )
    given = {}
    if len(parts.path) > 1 and "vhost" not in query:
        given["vhost"] = unquote(parts.path[1:])
    return broker_url.read_connection(url, Options, DEFAULT_PORTS, given)
