"""A TCP proxy that simulates network faults: it cuts, hangs, delays and loses data.

The proxy runs between a client and a real server, so both see the fault on a real
socket. `REQUESTS` is the direction from the client to the server, `ANSWERS` the
opposite direction.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from types import TracebackType

from .services import free_port

REQUESTS = "requests"
ANSWERS = "answers"
BOTH = (REQUESTS, ANSWERS)


#: Seconds after which a thread that moves bytes looks whether its link was cut.
BEAT = 0.1


class _Link:
    """One client's connection, and the proxy's connection to the server."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.cut = False
        self.reset = False
        self.open_ways = 2
        #: The way that the last piece went.
        self.last = ANSWERS

    def close(self) -> None:
        """Close both ends, with a reset as after a crash, or in the normal way."""
        for end in (self.client, self.server):
            if self.reset:
                end.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )
            end.close()

    def receive(self, source: socket.socket) -> bytes:
        """Return the next bytes from `source`, or b"" if the stream has ended or the
        link is cut."""
        while not self.cut:
            with contextlib.suppress(TimeoutError):
                return source.recv(65536)
        return b""

    def send(self, sink: socket.socket, piece: bytes) -> None:
        """Send the whole piece, unless the link is cut first."""
        while piece and not self.cut:
            with contextlib.suppress(TimeoutError):
                piece = piece[sink.send(piece) :]


class Proxy:
    """Listens on `port` of `host` and forwards to `target_port` of loopback."""

    def __init__(
        self, target_port: int, *, host: str = "127.0.0.1", buffer: int = 0
    ) -> None:
        """`buffer` is the number of bytes that the proxy receives ahead. With 0, the
        operating system decides."""
        self.host = host
        self._buffer = buffer
        self.port = free_port()
        self.target_port = target_port
        #: How many connections were accepted so far.
        self.accepted = 0
        #: How many bytes were forwarded, per way.
        self.forwarded = dict.fromkeys(BOTH, 0)
        #: How often a client asked after an answer: the round trips.
        self.round_trips = 0
        self._hung: set[str] = set()
        self._lost: set[str] = set()
        self._budget: dict[str, int] = {}
        #: The round trip at which all is cut, and on which way.
        self._cut_at: tuple[int, str] | None = None
        self._delay = 0.0
        self._links: set[_Link] = set()
        self._changed = threading.Condition()
        self._listener: socket.socket | None = None

    def __enter__(self) -> Proxy:
        self.accept()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.refuse()
        self.cut()

    @property
    def connections(self) -> int:
        """The number of connections that are open now."""
        with self._changed:
            return len(self._links)

    def accept(self) -> None:
        """Listen again on the same port."""
        if self._listener is not None:
            return
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        self._listener = socket.create_server((self.host, self.port), family=family)
        if self._buffer:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._buffer)
        threading.Thread(target=self._serve, args=[self._listener], daemon=True).start()

    def refuse(self) -> None:
        """Refuse new connections, like a stopped server. Open connections stay."""
        if self._listener is None:
            return
        listener, self._listener = self._listener, None
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
        listener.close()

    def cut(self, *, reset: bool = True) -> None:
        """Break every open connection. New connections are accepted."""
        with self._changed:
            cut = self._mark_cut(reset=reset)
            self._changed.wait_for(lambda: not cut & self._links, timeout=10)

    def cut_after(self, count: int, way: str = REQUESTS) -> None:
        """Cut all connections once, after `count` more bytes in this direction."""
        with self._changed:
            self._budget[way] = count

    def cut_at(self, trip: int, way: str) -> None:
        """Cut all connections once, during a later round trip. `trip` is the number of
        that round trip, counted from now: 1 is the next one. `way` is REQUESTS to cut
        before the server gets the request, or ANSWERS to cut before the client gets the
        answer."""
        with self._changed:
            self._cut_at = self.round_trips + trip, way

    def hang(self, *ways: str) -> None:
        """Stop forwarding data in these directions, like a dead router that reports no
        error."""
        with self._changed:
            self._hung.update(ways or BOTH)

    def lose(self, *ways: str) -> None:
        """Drop all data in these directions, for example the receipts of stored
        messages."""
        with self._changed:
            self._lost.update(ways or BOTH)

    def delay(self, seconds: float) -> None:
        """Delay all data by `seconds`, in both directions."""
        with self._changed:
            self._delay = seconds

    def resume(self) -> None:
        """Forward the data that was kept back, and end every other fault."""
        with self._changed:
            self._hung.clear()
            self._lost.clear()
            self._budget.clear()
            self._delay = 0.0
            self._changed.notify_all()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.target_port), 10)
            except OSError:
                client.close()
                continue
            client.settimeout(BEAT)
            server.settimeout(BEAT)
            link = _Link(client, server)
            with self._changed:
                self.accepted += 1
                self._links.add(link)
            for way, source, sink in (
                (REQUESTS, client, server),
                (ANSWERS, server, client),
            ):
                threading.Thread(
                    target=self._pump, args=[link, way, source, sink], daemon=True
                ).start()

    def _pump(
        self, link: _Link, way: str, source: socket.socket, sink: socket.socket
    ) -> None:
        with contextlib.suppress(OSError):
            while piece := link.receive(source):
                with self._changed:
                    asked = way == REQUESTS and link.last == ANSWERS
                    self.round_trips += asked
                    link.last = way
                    if self._cut_at == (self.round_trips, way):
                        self._cut_at = None
                        self._mark_cut(reset=False)
                link.send(sink, self._through(link, way, piece))
                with self._changed:
                    if self._budget.get(way) == 0:
                        del self._budget[way]
                        self._mark_cut(reset=False)
            if not link.cut:
                sink.shutdown(socket.SHUT_WR)
        with self._changed:
            link.open_ways -= 1
            if link.open_ways == 0:
                link.close()
                self._links.discard(link)
                self._changed.notify_all()

    def _mark_cut(self, *, reset: bool) -> set[_Link]:
        """Mark every link as cut, and return the links. The thread that forwards the
        bytes of a link then closes the link."""
        links = set(self._links)
        for link in links:
            link.cut, link.reset = True, reset
        self._changed.notify_all()
        return links

    def _through(self, link: _Link, way: str, piece: bytes) -> bytes:
        """Apply the faults to a piece of data, and return the bytes that are
        forwarded."""
        with self._changed:
            self._changed.wait_for(lambda: link.cut or way not in self._hung)
            if self._delay:
                self._changed.wait_for(lambda: link.cut, timeout=self._delay)
            if link.cut or way in self._lost:
                return b""
            if way in self._budget:
                piece = piece[: self._budget[way]]
                self._budget[way] -= len(piece)
            self.forwarded[way] += len(piece)
        return piece
