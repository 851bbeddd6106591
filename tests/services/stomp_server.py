"""The base class of the STOMP brokers, with users, TLS and a check for readiness."""

from __future__ import annotations

import re
import socket
from functools import cached_property
from pathlib import Path
from urllib.parse import urlencode

from .certificates import Certificates
from .server import Server, free_port

USER = "txmsg"
PASSWORD = "txmsg-secret"
#: This user may only use destinations whose name begins with `ALLOWED`: the broker
#: refuses every other message of a batch, and takes the rest.
LIMITED_USER = "limited"
ALLOWED = "allowed."
#: This one may read anything on RabbitMQ, and write nothing.
READER = "reader"


class StompServer(Server):
    """A broker with one port for STOMP and another for STOMP over TLS."""

    def __init__(self) -> None:
        super().__init__()
        self.port = free_port()
        self.tls_port = free_port()

    @cached_property
    def certificates(self) -> Certificates:
        """Return the certificate authority that clients trust, and the server's
        certificate."""
        return Certificates(self.directory / "tls")

    @property
    def ca(self) -> Path:
        """Return the file of the certificate authority, for `?ca=` in a URL."""
        return self.certificates.authority

    def url(
        self,
        *,
        tls: bool = False,
        port: int | None = None,
        user: str = USER,
        password: str = PASSWORD,
        **options: str,
    ) -> str:
        """Return the broker's URL or, with `port`, the URL of a proxy in front of the
        broker."""
        scheme, own = ("stomp+ssl", self.tls_port) if tls else ("stomp", self.port)
        if tls:
            options.setdefault("ca", str(self.ca))
        query = f"?{urlencode(options)}" if options else ""
        where = f"127.0.0.1:{port or own}"
        return f"{scheme}://{user}:{password}@{where}{query}"

    def ready(self) -> bool:
        """Return whether the broker accepts a login, and listens for TLS. The TLS port
        opens last."""
        frame = (
            "CONNECT\naccept-version:1.2\nhost:/\n"
            f"login:{USER}\npasscode:{PASSWORD}\n\n\0"
        )
        try:
            with socket.create_connection(("127.0.0.1", self.port), 2) as connection:
                connection.settimeout(5)
                connection.sendall(frame.encode())
                answer = connection.recv(4096).decode(errors="replace")
                if not answer.startswith("CONNECTED"):
                    return False
                told = re.search(r"^server:\w+/([\w.]+)", answer, re.MULTILINE)
                self.version = told[1] if told else ""
        except OSError:
            return False
        return accepts(self.tls_port)


def accepts(port: int) -> bool:
    """Return whether a server listens on the port of loopback."""
    try:
        socket.create_connection(("127.0.0.1", port), 2).close()
    except OSError:
        return False
    return True
