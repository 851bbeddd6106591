"""From a URL to a connection: addresses, credentials, TLS, limits.

Before hop 4. ``stomp://user:password@host:61613?vhost=/&heartbeat=10`` or
``stomp+ssl://...``; several hosts, separated by commas, are tried in their order.
An option nobody knows is an error that names the nearest one.
"""

from __future__ import annotations

import difflib
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any
from urllib.parse import parse_qsl, unquote

from ..envelope.broker_url import split_url, without_password
from .connection import Connection
from .consumer import AckMode
from .context import Context
from .dialects import BY_NAME
from .errors import ConnectionFailedError
from .restrictions import Policy

DEFAULT_PORTS = {"stomp": 61613, "stomp+ssl": 61614}


@dataclass(frozen=True, slots=True)
class Options:
    """What a connection may be told; each is also an option of the URL's query."""

    user: str | None = None
    password: str | None = field(default=None, repr=False)
    #: Virtual host; ``/`` unless given, which is RabbitMQ's default.
    vhost: str | None = None
    #: ``activemq``, ``artemis`` or ``rabbitmq``; found from CONNECTED when not given.
    dialect: str | None = None
    #: Name that durable subscriptions belong to on ActiveMQ and Artemis.
    client_id: str | None = None
    #: Seconds between heart-beats in both directions; 0 for none.
    heartbeat: float = 10.0
    #: Seconds to connect and log in to one host.
    connect_timeout: float = 10.0
    #: Seconds until a send or request without an answer is of unknown outcome.
    send_timeout: float = 30.0
    #: Seconds to wait for the goodbye's receipt; a close that waits longer warns.
    close_timeout: float = 5.0
    #: Sends of one session without an outcome before the next one blocks ...
    max_in_flight: int = 256
    #: ... and their bytes.
    max_in_flight_bytes: int = 16 * 1024 * 1024
    #: Bytes of waiting frames that are written at once.
    coalesce_bytes: int = 64 * 1024
    #: A connection on which so many sends in a row time out is given up; 0: never.
    give_up_after_timeouts: int = 3
    #: A completion listener inside ``transaction.atomic()`` / on an event loop.
    in_atomic: Policy = Policy.WARN
    on_event_loop: Policy = Policy.ALLOW
    #: File of the certificate authority to trust, instead of the system's.
    ca: str | None = None
    #: File of the client's certificate, and of its key when not in the same file.
    cert: str | None = None
    key: str | None = None
    #: Made from the scheme and the three files; give one of your own instead.
    tls: ssl.SSLContext | None = field(default=None, repr=False, compare=False)

    def connect_headers(self, host: str) -> dict[str, str]:
        """Headers of the CONNECT frame to a host."""
        beat = int(self.heartbeat * 1000)
        headers = {
            "accept-version": "1.2",
            "heart-beat": f"{beat},{beat}",
            "host": self.vhost or (host if self.dialect == "artemis" else "/"),
            "login": self.user,
            "passcode": self.password,
            "client-id": self.client_id,
        }
        return {name: value for name, value in headers.items() if value is not None}


class ConnectionFactory:
    """Makes connections to the first host that takes one."""

    def __init__(self, url: str, **options: Any) -> None:
        """Read the URL; keyword options win over those in its query.

        Raises ``ValueError`` for a malformed URL or an unknown option, and ``OSError``
        or ``ssl.SSLError`` when a certificate file cannot be read.
        """
        shown = without_password(url)
        try:
            parts = split_url(url)
        except ValueError as error:
            raise ValueError(f"{shown} is no broker URL: {error}") from None
        if parts.scheme not in DEFAULT_PORTS:
            raise ValueError(
                f"{shown} is no broker URL: it starts with "
                f"{' or '.join(f'{scheme}://' for scheme in DEFAULT_PORTS)}."
            )
        credentials, _, hosts = parts.netloc.rpartition("@")
        if parts.path not in ("", "/") or parts.fragment:
            raise ValueError(
                f"{shown}: a virtual host goes into the query, ?vhost=NAME."
            )
        user, colon, password = credentials.partition(":")
        given: dict[str, Any] = {"user": unquote(user) if credentials else None}
        given["password"] = unquote(password) if colon else None
        given |= dict(
            parse_qsl(
                parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)
            )
        )
        self.options = _read_options({**given, **options})
        if parts.scheme == "stomp+ssl" and self.options.tls is None:
            self.options = replace(self.options, tls=_tls_context(self.options))
        elif parts.scheme == "stomp" and (self.options.ca or self.options.cert):
            raise ValueError("ca and cert need a stomp+ssl:// URL.")
        default_port = DEFAULT_PORTS[parts.scheme]
        self.addresses = [_address(host, default_port) for host in hosts.split(",")]

    def __repr__(self) -> str:
        """Name the hosts; no credentials."""
        hosts = ",".join(f"{host}:{port}" for host, port in self.addresses)
        return f"<ConnectionFactory {hosts}>"

    def create_connection(
        self, user: str | None = None, password: str | None = None
    ) -> Connection:
        """Connect to the first host that answers.

        Raises ``ConnectionFailedError`` with every host's reason when none does.
        """
        options = self.options
        if user is not None:
            options = replace(options, user=user, password=password)
        reasons = []
        for address in self.addresses:
            try:
                return Connection(address, options)
            except ConnectionFailedError as error:
                reasons.append(str(error))
            except OSError as error:
                reasons.append(f"{address[0]}:{address[1]}: {error}.")
        raise ConnectionFailedError(
            "No broker took the connection. " + " ".join(reasons)
        )

    def create_context(
        self, *, transacted: bool = False, ack_mode: AckMode = AckMode.INDIVIDUAL
    ) -> Context:
        """Make a connection and a session of it, as one object."""
        connection = self.create_connection()
        return Context(connection, transacted=transacted, ack_mode=ack_mode)


def _address(text: str, default_port: int) -> tuple[str, int]:
    host, bracket, port = text.rpartition("]")
    if bracket:
        host, port = host.removeprefix("["), port.removeprefix(":")
    elif text.count(":") > 1:
        raise ValueError(f"Write an IPv6 address in brackets: [{text}].")
    else:
        host, _, port = text.partition(":")
    if not host or (
        port and not (port.isascii() and port.isdigit() and int(port) < 65536)
    ):
        raise ValueError(f"{text!r} is no host and port.")
    return unquote(host), int(port) if port else default_port


def _read_options(given: dict[str, Any]) -> Options:
    known: dict[str, Callable[[Any], Any]] = {
        f.name: _reader(str(f.type)) for f in fields(Options)
    }
    read: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"Unknown broker option {name!r}.{hint}")
        try:
            read[name] = known[name](value)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"Broker option {name}={value!r} is wrong: {error}"
            ) from None
    options = Options(**read)
    if options.dialect is not None and options.dialect not in BY_NAME:
        raise ValueError(
            f"Unknown dialect {options.dialect!r}; known are {', '.join(BY_NAME)}."
        )
    for name in ("connect_timeout", "send_timeout", "close_timeout", "max_in_flight",
                 "max_in_flight_bytes", "coalesce_bytes"):  # fmt: skip
        if not getattr(options, name) > 0:
            raise ValueError(f"Broker option {name} must be more than 0.")
    if options.heartbeat < 0:
        raise ValueError("Broker option heartbeat must not be negative.")
    return options


def _reader(annotation: str) -> Callable[[Any], Any]:
    readers: dict[str, Callable[[Any], Any]] = {
        "float": float,
        "int": int,
        "Policy": Policy,
    }
    return readers.get(annotation, lambda value: value)


def _tls_context(options: Options) -> ssl.SSLContext:
    """Verify the broker's certificate and name, always."""
    context = ssl.create_default_context(cafile=options.ca)
    if options.cert is not None:
        context.load_cert_chain(options.cert, options.key)
    return context
