"""The options of a connection, from a URL or keywords.

A URL looks like ``stomp://user:password@host:61613?vhost=/&heartbeat=10``, or begins
with ``stomp+ssl://``. Several hosts are separated by commas. If an option is unknown,
the error suggests the most similar known option.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any
from urllib.parse import unquote

from ..envelope import broker_url
from ..envelope.broker_url import (
    check_option,
    read_address,
    tls_context,
    without_password,
)
from . import frames
from .dialect import BY_NAME
from .errors import IllegalStateError

_IN_ATOMIC = (
    "An asynchronous send inside transaction.atomic() reaches the broker even if the "
    "transaction is rolled back. Use django_txmsg.send_message(), which stores the "
    "message in the outbox with the transaction."
)
_ON_LOOP = (
    "An asynchronous send on a running event loop blocks the loop while the window is "
    "full. Send from a thread: await asyncio.to_thread(producer.submit, message)."
)

DEFAULT_PORTS = {"stomp": 61613, "stomp+ssl": 61614}


class Policy(str, Enum):
    """What to do with an asynchronous send inside ``transaction.atomic()`` or on an
    event loop."""

    ALLOW = "allow"
    WARN = "warn"
    FORBID = "forbid"


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a connection. Each option can also be set in the URL's query."""

    user: str | None = None
    password: str | None = field(default=None, repr=False)
    #: Virtual host; by default ``/``, which is RabbitMQ's default.
    vhost: str | None = None
    #: ``activemq``, ``artemis`` or ``rabbitmq``; by default from the CONNECTED frame.
    dialect: str | None = None
    #: Patterns of existing RabbitMQ queues that must not be declared, such as quorum
    #: queues of AMQP clients: ``orders.*,billing``.
    existing: str = ""
    #: The name that durable subscriptions belong to on ActiveMQ and Artemis.
    client_id: str | None = None
    #: Seconds between heartbeats in both directions; 0 for none.
    heartbeat: float = 10.0
    #: Seconds to connect and log in to one host.
    connect_timeout: float = 10.0
    #: Seconds until a send or request without an answer counts as outcome unknown.
    send_timeout: float = 30.0
    #: Seconds to wait for DISCONNECT's receipt; a close that waits longer warns.
    close_timeout: float = 5.0
    #: Most sends of one session without an outcome before the next one blocks ...
    max_in_flight: int = 256
    #: ... and their bytes.
    max_in_flight_bytes: int = 16 * 1024 * 1024
    #: Most bytes of waiting frames that are written at once.
    coalesce_bytes: int = 64 * 1024
    #: A connection is given up when this many frames in a row had no answer in time and
    #: the broker has answered nothing for ``send_timeout``; 0: never.
    give_up_after_timeouts: int = 3
    #: Threads that run completion listeners; each session uses one at a time at most.
    callback_threads: int = 32
    #: What happens to a send with a listener inside ``transaction.atomic()`` / on an
    #: event loop.
    in_atomic: Policy = Policy.WARN
    on_event_loop: Policy = Policy.ALLOW
    #: File of the certificate authority to trust, instead of the system's.
    ca: str | None = None
    #: File of the client's certificate, and of its key when not in the same file.
    cert: str | None = None
    key: str | None = None
    #: Password of the key, if it is encrypted.
    key_password: str | None = field(default=None, repr=False)
    #: Created from the scheme and the three files; or pass your own.
    tls: ssl.SSLContext | None = field(default=None, repr=False, compare=False)

    def check_asynchronous(self) -> None:
        """Apply the policies to a send that has a listener or a future.

        Inside ``transaction.atomic()``, use the outbox instead, because a rollback
        cannot take back a message that a broker has stored. On an event loop, a send
        blocks the loop while the window is full.

        Raises ``IllegalStateError`` if a policy forbids the send.
        """
        if self.in_atomic is not Policy.ALLOW and _inside_atomic_block():
            _apply(self.in_atomic, _IN_ATOMIC)
        if self.on_event_loop is not Policy.ALLOW and _on_running_loop():
            _apply(self.on_event_loop, _ON_LOOP)

    def connect_headers(self, host: str) -> dict[str, str]:
        """Return the headers of the CONNECT frame for this host."""
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


def read_url(url: str, given: dict[str, Any]) -> tuple[Options, list[tuple[str, int]]]:
    """Return the options and addresses of a URL. The options in ``given`` override the
    options in the URL's query.

    Raises ``ValueError`` for a malformed URL or an unknown option, and ``OSError`` or
    ``ssl.SSLError`` if a certificate file cannot be read.
    """
    shown = without_password(url)
    parts, query = broker_url.read_url(url)
    if parts.scheme not in DEFAULT_PORTS:
        raise ValueError(
            f"{shown} is not a broker URL: it starts with "
            f"{' or '.join(f'{scheme}://' for scheme in DEFAULT_PORTS)}."
        )
    credentials, _, hosts = parts.netloc.rpartition("@")
    if parts.path not in ("", "/") or parts.fragment:
        raise ValueError(f"{shown}: a virtual host goes into the query, ?vhost=NAME.")
    user, colon, password = credentials.partition(":")
    read: dict[str, Any] = {"user": unquote(user) if credentials else None}
    read["password"] = unquote(password) if colon else None
    options = _read_options({**read, **query, **given})
    if parts.scheme == "stomp+ssl" and options.tls is None:
        options = replace(
            options,
            tls=tls_context(
                options.ca, options.cert, options.key, options.key_password
            ),
        )
    elif parts.scheme == "stomp" and (options.ca or options.cert):
        raise ValueError("ca and cert need a stomp+ssl:// URL.")
    default_port = DEFAULT_PORTS[parts.scheme]
    return options, [read_address(host, default_port) for host in hosts.split(",")]


def _read_options(given: dict[str, Any]) -> Options:
    known: dict[str, Callable[[Any], Any]] = {
        f.name: _reader(str(f.type)) for f in fields(Options)
    }
    read: dict[str, Any] = {}
    for name, value in given.items():
        check_option(name, known)
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
                 "max_in_flight_bytes", "coalesce_bytes",
                 "callback_threads"):  # fmt: skip
        if not getattr(options, name) > 0:
            raise ValueError(f"Broker option {name} must be more than 0.")
    if options.heartbeat < 0:
        raise ValueError("Broker option heartbeat must not be negative.")
    frames.encode_connect(options.connect_headers("host"))  # raises, if it cannot be
    return options


def _reader(annotation: str) -> Callable[[Any], Any]:
    readers: dict[str, Callable[[Any], Any]] = {
        "float": float,
        "int": int,
        "Policy": Policy,
    }
    return readers.get(annotation, lambda value: value)


def _apply(policy: Policy, text: str) -> None:
    if policy is Policy.FORBID:
        raise IllegalStateError(text)
    warnings.warn(text, RuntimeWarning, stacklevel=4)


def _inside_atomic_block() -> bool:
    """Return whether a Django database connection of this thread is inside
    ``atomic()``. Django is used only if the process has already imported it."""
    database = sys.modules.get("django.db")
    if database is None:
        return False
    opened = database.connections.all(initialized_only=True)
    return any(connection.in_atomic_block for connection in opened)


def _on_running_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
