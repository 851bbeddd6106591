"""Bytes to and from the broker: a socket with deadlines, with or without TLS.

It replaces py-amqp's transport, which reads a frame in two calls and writes each
message separately.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time
from collections.abc import Iterator

_BANNER = b"AMQP\x00\x00\x09\x01"
_HEADER = struct.Struct(">BHI")
_AT_ONCE = 256 * 1024
_END = 0xCE

#: Type, channel and payload.
Frame = tuple[int, int, bytes]


class Transport:
    """One connection's socket. The thread that owns the link owns it, too."""

    def __init__(
        self,
        address: tuple[str, int],
        *,
        tls: ssl.SSLContext | None,
        connect_timeout: float,
        send_timeout: float,
    ) -> None:
        self._address, self._tls = address, tls
        self._connect_timeout, self._send_timeout = connect_timeout, send_timeout
        self._received = bytearray()
        #: What `write_soon()` could not write yet.
        self._unsent = b""
        self.sock: socket.socket | None = None
        self.connected = False
        #: When bytes were last written, and when any were last received.
        self.written_at = self.heard_at = time.monotonic()
        self._heard = False

    def connect(self) -> None:
        """Connect to the server and send the protocol header. Raises OSError."""
        made = socket.create_connection(self._address, self._connect_timeout)
        try:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self._tls is not None:
                host = self._address[0]
                made = self._tls.wrap_socket(made, server_hostname=host)
            self.sock, self.connected = made, True
            self.write(_BANNER)
        except BaseException:
            self.close()
            made.close()
            raise

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write all of it. Raises TimeoutError if the server has accepted no byte for
        the send time-out. After an error, perhaps in the middle of a frame, the
        connection cannot be used any more."""
        if self.sock is None:
            raise OSError("the connection is closed")
        self.sock.settimeout(self._send_timeout)
        view = memoryview(self._unsent + data if self._unsent else data)
        try:
            while view:
                view = view[self.sock.send(view) :]
        except BaseException:
            self.connected = False
            raise
        self._unsent = b""
        self.written_at = time.monotonic()

    def write_soon(self, data: bytes) -> None:
        """Write as much as fits without waiting, and the rest with the next write.
        While there is a rest, nothing is added to it: for heartbeats."""
        if self.sock is None:
            raise OSError("the connection is closed")
        self.sock.settimeout(0.0)
        self._unsent = self._unsent or data
        try:
            self._unsent = self._unsent[self.sock.send(self._unsent) :]
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except BaseException:
            self.connected = False
            raise
        self.written_at = time.monotonic()

    def read(self, timeout: float) -> bool:
        """Read what has arrived, waiting at most that many seconds. Returns whether
        anything was read. Raises OSError if the server has hung up."""
        if self.sock is None:
            raise OSError("the connection is closed")
        self.sock.settimeout(max(0.0, timeout))
        try:
            piece = self.sock.recv(_AT_ONCE)
        except (BlockingIOError, TimeoutError, ssl.SSLWantReadError):
            return False
        if not piece:
            self.connected = False
            raise OSError("the broker has ended the connection" + self.doubt())
        self._received += piece
        self.heard_at, self._heard = time.monotonic(), True
        return True

    def doubt(self) -> str:
        """Return what to add to an error: a server that has sent nothing may speak
        another protocol."""
        if self._heard:
            return ""
        return ". Is this its AMQP port (5672, with TLS 5671)?"

    def frames(self) -> Iterator[Frame]:
        """Yield the complete frames that were read. A yielded frame is removed first:
        its handler may raise, or read on."""
        while len(self._received) >= _HEADER.size:
            kind, channel, size = _HEADER.unpack_from(self._received)
            end = _HEADER.size + size
            if len(self._received) <= end:
                return
            payload = bytes(memoryview(self._received)[_HEADER.size : end])
            closed_well = self._received[end] == _END
            del self._received[: end + 1]
            if not closed_well:
                raise OSError("the broker sent something that is not an AMQP frame")
            yield kind, channel, payload

    def close(self) -> None:
        """Close the socket without a closing handshake."""
        self.connected = False
        if self.sock is not None:
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(OSError):
                self.sock.close()
            self.sock = None
