"""A socket server with one fault, for tests of the client's transport.

The tests need a server that closes the connection, stops reading or never answers.
Unlike the scripted broker, it need not implement STOMP.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

TLS = Path(__file__).parent / "tls"
CONNECTED = b"CONNECTED\nversion:1.2\nserver:plain/1\nheart-beat:0,0\n\n\x00"


class Client:
    """One accepted connection of a client. `over` is set at the end of the test."""

    def __init__(self, sock: socket.socket, over: threading.Event) -> None:
        self.sock = sock
        self.over = over

    def connected(self) -> None:
        self.read_frame()
        self.sock.sendall(CONNECTED)

    def receipt_everything(self) -> None:
        """Send a RECEIPT for each frame that requests one, until the client
        disconnects."""
        rest = b""
        while piece := self.sock.recv(65_536):
            *frames, rest = (rest + piece).split(b"\x00")
            asked = [f.partition(b"receipt:")[2].partition(b"\n")[0] for f in frames]
            answers = [b"RECEIPT\nreceipt-id:%s\n\n\x00" % r for r in asked if r]
            self.sock.sendall(b"".join(answers))

    def read_frame(self) -> bytes:
        data = b""
        while not data.endswith(b"\x00"):
            piece = self.sock.recv(65_536)
            if not piece:
                return data
            data += piece
        return data


@contextlib.contextmanager
def plain_server(
    serve: Callable[[Client], object], *, tls: bool = False
) -> Iterator[tuple[str, int]]:
    """Call `serve` for each connection in its own thread, until the block ends."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "server.pem")
    over = threading.Event()
    open_sockets: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                raw, _ = listener.accept()
                open_sockets.append(raw)
                thread = threading.Thread(target=run, args=(raw,), daemon=True)
                threads.append(thread)
                thread.start()

    def run(raw: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            sock = context.wrap_socket(raw, server_side=True) if tls else raw
            open_sockets.append(sock)
            try:
                serve(Client(sock, over))
            finally:
                if over.is_set():  # the encryption was ready too late to be closed
                    sock.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        acceptor = threading.Thread(target=accept, daemon=True)
        acceptor.start()
        try:
            yield "localhost" if tls else "127.0.0.1", listener.getsockname()[1]
        finally:
            over.set()
            listener.shutdown(socket.SHUT_RDWR)
            acceptor.join(10)
            for sock in open_sockets:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                sock.close()
            for thread in threads:
                thread.join(10)
