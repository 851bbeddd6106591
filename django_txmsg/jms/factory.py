"""Reads a URL and connects to the first host that accepts a connection.

Before hop 4.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .connection import Connection
from .consumer import AckMode
from .context import Context
from .errors import ConnectionFailedError
from .options import read_url


class ConnectionFactory:
    """Opens connections to the first host that accepts one."""

    def __init__(self, url: str, **options: Any) -> None:
        """Read the URL; keyword options override those in its query.

        Raises ``ValueError`` for a malformed URL or an unknown option, and ``OSError``
        or ``ssl.SSLError`` if a certificate file cannot be read.
        """
        self.options, self.addresses = read_url(url, options)

    def __repr__(self) -> str:
        """Show the hosts, without credentials."""
        hosts = ",".join(f"{host}:{port}" for host, port in self.addresses)
        return f"<ConnectionFactory {hosts}>"

    def create_connection(
        self, user: str | None = None, password: str | None = None
    ) -> Connection:
        """Connect to the first host that answers.

        Raises ``ConnectionFailedError`` with every host's reason if none does, and
        ``ValueError`` for a user or password with a line break.
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
        """Open a connection with one session, as one object."""
        connection = self.create_connection()
        return Context(connection, transacted=transacted, ack_mode=ack_mode)
