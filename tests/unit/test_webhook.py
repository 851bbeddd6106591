"""How a connection to a webhook ends at its time-out."""

from __future__ import annotations

import socket
import ssl

from django_txmsg import webhook

from .jms.plain_server import TLS, Client, plain_server


def test_cutting_a_connection_does_not_end_its_encryption_first() -> None:
    """Another thread may be writing: without TLS it would write plain text."""
    trust = ssl.create_default_context(cafile=str(TLS / "ca.pem"))
    with (
        plain_server(Client.read_frame, tls=True) as address,
        socket.create_connection(address) as raw,
        trust.wrap_socket(raw, server_hostname="localhost") as connection,
    ):
        webhook._cut(connection)
        assert connection.cipher() is not None
