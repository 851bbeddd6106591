"""The scripted broker's listening socket: accepts, and hands the sockets on."""

from __future__ import annotations

import socket
from collections.abc import Callable

from .loop import READ, Loop


class Listener:
    """A listening socket in the broker's loop."""

    def __init__(
        self,
        accepted: Callable[[socket.socket], None],
        host: str,
        port: int,
        receive_buffer: int | None,
    ) -> None:
        """Listen at once; port 0 takes a free one, to be found in ``port``."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.sock = socket.socket(family, socket.SOCK_STREAM)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if receive_buffer is not None:  # what is accepted inherits it
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.bind((host, port))
        self.sock.listen(128)
        self.sock.setblocking(False)
        self.port: int = self.sock.getsockname()[1]
        self._accepted = accepted

    def wanted(self) -> int:
        """Wait for clients."""
        return READ

    def ready(self, events: int) -> None:
        """Accept one client; the loop comes back for the next."""
        try:
            client, _ = self.sock.accept()
        except OSError:
            return  # it has gone again
        self._accepted(client)

    def close(self, loop: Loop) -> None:
        """Refuse clients from now on; with the broker's lock held."""
        if self.sock.fileno() >= 0:
            loop.remove(self)
            self.sock.close()
