"""The options of an AMQP URL: `amqp://user:password@host:5672/vhost?heartbeat=10`.

Several hosts are separated by commas. If an option is unknown, the error suggests the
most similar known option.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar
from urllib.parse import unquote

from ...envelope import broker_url
from ...envelope.broker_url import ConnectionOptions, without_password

DEFAULT_PORTS = {"amqp": 5672, "amqps": 5671}
QUEUE_TYPES = ("quorum", "classic")


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
    #: The type of a declared queue: `quorum` or `classic`.
    queue_type: str = "quorum"

    most: ClassVar[Mapping[str, float]] = {
        **ConnectionOptions.most,
        "heartbeat": 65535,
        "max_in_flight": 2**31,
    }


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
    options, addresses = broker_url.read_connection(url, Options, DEFAULT_PORTS, given)
    if options.queue_type not in QUEUE_TYPES:
        raise ValueError(
            f"Broker option queue_type={options.queue_type!r} is wrong: "
            f"it is {' or '.join(QUEUE_TYPES)}."
        )
    return options, addresses
