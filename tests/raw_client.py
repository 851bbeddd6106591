"""A STOMP client that checks nothing: it writes any frame, and reads any answer.

Tests use it to see how a broker behaves, without the package's own client. It can send
what no correct client would send.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections import deque
from types import TracebackType

from django_txmsg.testing.frames import Decoder, Frame, encode


class RawClient:
    """One connection; every wait has a deadline."""

    def __init__(
        self,
        address: tuple[str, int],
        *,
        connect: bool = True,
        timeout: float = 30.0,
        tls: ssl.SSLContext | None = None,
        **headers: str,
    ) -> None:
        """Open a connection. Unless `connect` is false, log in with a CONNECT frame.
        `headers` are added to this frame. In their names, "_" stands for "-"."""
        self.timeout = timeout
        self.sock = socket.create_connection(address, timeout)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            self.sock = tls.wrap_socket(self.sock, server_hostname="localhost")
        self.decoder = Decoder()
        self.arrived: deque[Frame] = deque()
        self.closed_by_peer = False
        self.connected = Frame("")
        if connect:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            self.send("CONNECT", {"accept-version": "1.2", "host": "/", **named})
            self.connected = self.expect("CONNECTED")

    def __enter__(self) -> RawClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.sock.close()

    def send(
        self,
        command: str,
        headers: dict[str, str] | None = None,
        body: bytes = b"",
        **more: str,
    ) -> None:
        """Write a frame. Keyword arguments are headers, in whose names "_" stands for
        "-"."""
        named = {name.replace("_", "-"): value for name, value in more.items()}
        frame = Frame(command, {**(headers or {}), **named}, body)
        self.write(encode(frame))

    def write(self, data: bytes) -> None:
        """Write raw bytes."""
        self.sock.sendall(data)

    def next(self, timeout: float | None = None) -> Frame | None:
        """Return the next frame. Return None if no frame arrives in time, or if the
        connection has ended."""
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        while not self.arrived:
            left = deadline - time.monotonic()
            if left <= 0 or self.closed_by_peer:
                return None
            self.sock.settimeout(left)
            try:
                data = self.sock.recv(65_536)
            except TimeoutError:
                return None
            except ConnectionResetError:
                data = b""
            if not data:
                self.closed_by_peer = True
            self.arrived.extend(self.decoder.feed(data))
        return self.arrived.popleft()

    def expect(self, command: str, timeout: float | None = None) -> Frame:
        """Return the next frame, and check that it has this command."""
        frame = self.next(timeout)
        assert frame is not None, f"no {command} came"
        assert frame.command == command, f"expected {command}, got {frame}"
        return frame

    def expect_receipt(self, receipt: str, timeout: float | None = None) -> None:
        """Read the next frame, and check that it is the RECEIPT with this id."""
        assert self.expect("RECEIPT", timeout)["receipt-id"] == receipt

    def expect_end(self, timeout: float | None = None) -> None:
        """Check that the broker closes the connection without another frame."""
        frame = self.next(timeout)
        assert frame is None, f"expected the end, got {frame}"
        assert self.closed_by_peer, "the connection is still open"

    def drain(self, quiet: float = 0.5) -> list[Frame]:
        """Return all frames that arrive, until none has arrived for `quiet` seconds."""
        found = []
        while (frame := self.next(quiet)) is not None:
            found.append(frame)
        return found
