"""The options of a connection, from a URL or keywords.

A URL looks like ``stomp://user:password@host:61613?vhost=/&heartbeat=10``, or begins
with ``stomp+ssl://``. Several hosts are separated by commas. If an option is unknown,
the error suggests the most similar known option.
"""

from __future__ import annotations

import asyncio
import sys
import warnings
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ..envelope import broker_url
from ..envelope.broker_url import ConnectionOptions, without_password
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
class Options(ConnectionOptions):
    """The options of a connection. Each option can also be set in the URL's query,
    except `tls`, for which you can pass a context of your own."""

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
    #: Most sends of one session without an outcome before the next one blocks.
    max_in_flight: int = 256
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
    options, addresses = broker_url.read_connection(url, Options, DEFAULT_PORTS, given)
    parts = broker_url.split_url(url)
    if parts.path not in ("", "/") or parts.fragment:
        shown = without_password(url)
        raise ValueError(f"{shown}: a virtual host goes into the query, ?vhost=NAME.")
    if options.dialect is not None and options.dialect not in BY_NAME:
        raise ValueError(
            f"Unknown dialect {options.dialect!r}; known are {', '.join(BY_NAME)}."
        )
    frames.encode_connect(options.connect_headers("host"))  # raises, if it cannot be
    return options, addresses


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
