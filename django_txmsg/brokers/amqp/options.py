"""The options of an AMQP URL: `amqp://user:password@host:5672/vhost?heartbeat=10`.

Several hosts are separated by commas. If an option is unknown, the error suggests the
most similar known option.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field, fields, replace
from typing import Any
from urllib.parse import unquote

from ...envelope import broker_url
from ...envelope.broker_url import (
    check_option,
    read_address,
    tls_context,
    without_password,
)
from ...errors import MAX_SECONDS

DEFAULT_PORTS = {"amqp": 5672, "amqps": 5671}
QUEUE_TYPES = ("quorum", "classic")
#: Ranges of options that are not seconds, or have a smaller range.
MOST = {"heartbeat": 65535, "max_in_flight": 2**31, "max_in_flight_bytes": 2**40}


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a session. Each option that is a text, a number or a boolean can
    also be set in the URL's query."""

    user: str = "guest"
    password: str = field(default="guest", repr=False)
    #: Virtual host; also the path of the URL.
    vhost: str = "/"
    #: Seconds between heartbeats in both directions; 0 for none.
    heartbeat: int = 10
    #: Seconds to connect and log in to one host.
    connect_timeout: float = 10.0
    #: Seconds until a send or request without an answer counts as outcome unknown.
    send_timeout: float = 30.0
    #: Seconds to wait for the answer to a close.
    close_timeout: float = 5.0
    #: Most unconfirmed sends before the next ones wait ...
    max_in_flight: int = 1000
    #: ... and their bytes.
    max_in_flight_bytes: int = 16 * 1024 * 1024
    #: Whether missing queues are declared.
    declare: bool = True
    #: The type of a declared queue: `quorum` or `classic`.
    queue_type: str = "quorum"
    #: File of the certificate authority to trust, instead of the system's.
    ca: str | None = None
    #: File of the client's certificate, and of its key when not in the same file.
    cert: str | None = None
    key: str | None = None
    #: Password of the key, if it is encrypted.
    key_password: str | None = field(default=None, repr=False)
    #: Made from the scheme and the three files.
    tls: ssl.SSLContext | None = field(default=None, repr=False)


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
    credentials, at, hosts = parts.netloc.rpartition("@")
    user, colon, password = credentials.partition(":")
    given: dict[str, str] = {}
    if at:
        given["user"] = unquote(user)
    if colon:
        given["password"] = unquote(password)
    if len(parts.path) > 1:
        given["vhost"] = unquote(parts.path[1:])
    options = _read(given | query)
    if parts.scheme == "amqps":
        context = tls_context(
            options.ca, options.cert, options.key, options.key_password
        )
        options = replace(options, tls=context)
    elif options.ca or options.cert:
        raise ValueError("ca and cert need an amqps:// URL.")
    port = DEFAULT_PORTS[parts.scheme]
    return options, [read_address(host, port) for host in hosts.split(",")]


def _read(given: dict[str, str]) -> Options:
    known = {one.name: str(one.type) for one in fields(Options) if one.name != "tls"}
    read: dict[str, Any] = {}
    for name, text in given.items():
        check_option(name, known)
        try:
            read[name] = _value(known[name], text)
        except ValueError as error:
            shown = "" if "password" in name else f"={text!r}"
            raise ValueError(f"Broker option {name}{shown} is wrong: {error}") from None
    options = Options(**read)
    for name, kind in known.items():
        if kind not in ("int", "float"):
            continue
        if not (0 if name == "heartbeat" else 1e-9) <= getattr(options, name):
            raise ValueError(f"Broker option {name} must be more than 0.")
        if getattr(options, name) > MOST.get(name, MAX_SECONDS):
            raise ValueError(f"Broker option {name} is too large.")
    if options.queue_type not in QUEUE_TYPES:
        raise ValueError(
            f"Broker option queue_type={options.queue_type!r} is wrong: "
            f"it is {' or '.join(QUEUE_TYPES)}."
        )
    return options


def _value(kind: str, text: str) -> Any:
    if kind == "bool":
        if text not in ("yes", "no"):
            raise ValueError("it is yes or no.")
        return text == "yes"
    return {"int": int, "float": float}.get(kind, str)(text)
