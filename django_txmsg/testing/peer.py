"""The scripted broker's socket to one client.

The broker's loop calls this module, which reads and writes over TCP or TLS without
blocking. The script decides how writes are split, and whether heartbeats are sent.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from .broker_state import BrokerState
from .frames import Decoder, Frame, FrameError, encode
from .loop import READ, WRITE

logger = logging.getLogger("django_txmsg.testing.peer")


class FrameHandler(Protocol):
    """Answers the client's frames."""

    def arrive(self, frame: Frame) -> None:
        """Handle the next frame."""

    def protest(self, what: str) -> None:
        """Report a violation of the protocol, and close the connection."""

    def ended(self) -> None:
        """Clean up after the end of the connection."""


class Peer:
    """The broker's end of one connection."""

    def __init__(
        self,
        broker: BrokerState,
        sock: socket.socket,
        number: int,
        handler: Callable[[Peer], FrameHandler],
        on_end: Callable[[Peer], None],
    ) -> None:
        """Use an accepted socket. ``number`` is the number of the connection, from 1.

        ``handler`` creates the object that answers the client's frames. ``on_end`` is
        called at the end of the connection.
        """
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.broker = broker
        self.number = number
        self.sock = sock
        self.stalled = False
        self.frozen = False
        self.closed = False
        self.bytes_received = 0
        self.last_read = time.monotonic()
        self.decoder = Decoder()
        self.conversation = handler(self)
        self._on_end = on_end
        self._beat_every = self._beats_due = 0.0
        self._backlog: deque[Frame] = deque()
        self._out: deque[bytes] = deque()
        self._leaving = False
        self._draining = False
        self._pausing = False
        self._handshaking = broker.tls is not None
        self._tls_wants = READ
        if broker.tls is not None:
            self.sock = broker.tls.wrap_socket(
                sock, server_side=True, do_handshake_on_connect=False
            )

    @property
    def heartbeats(self) -> int:
        """The number of heartbeats that the client has sent."""
        return self.decoder.heartbeats

    @property
    def ending(self) -> bool:
        """Whether the connection has ended, or will end as soon as the queued bytes are
        written. The client's frames are then ignored."""
        return self.closed or self._leaving

    # -- calls of the loop, with the lock held -------------------------------------

    def wanted(self) -> int:
        """Return what the loop must wait for: READ, WRITE, both or 0."""
        if self._handshaking:
            return self._tls_wants
        reads = READ if not (self.stalled or self.frozen) or self._draining else 0
        writes = WRITE if self._out and not (self._pausing or self.frozen) else 0
        return reads | writes

    def ready(self, events: int) -> None:
        """Read or write as many bytes as possible without blocking."""
        try:
            if self._handshaking:
                self._shake_hands()
                return
            if events & WRITE:
                self._write_some()
            if events & READ and not self.closed:
                self._read_some()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
            return
        except OSError as error:
            self.end(f"the client's socket failed: {error}")

    def _shake_hands(self) -> None:
        assert isinstance(self.sock, ssl.SSLSocket)
        try:
            self.sock.do_handshake()
        except ssl.SSLWantReadError:
            self._tls_wants = READ
        except ssl.SSLWantWriteError:
            self._tls_wants = WRITE
        else:
            self._handshaking = False

    def _read_some(self) -> None:
        pending = True
        while pending and not self.closed:
            data = self.sock.recv(65_536)
            if not data:
                self.end("the client closed the connection")
                return
            if self._leaving:
                return
            self.bytes_received += len(data)
            self.last_read = time.monotonic()
            try:
                self._backlog.extend(self.decoder.feed(data))
            except FrameError as error:
                self.conversation.protest(str(error))
                return
            self.work()
            # No selector reports bytes that TLS has already decrypted.
            pending = isinstance(self.sock, ssl.SSLSocket) and self.sock.pending() > 0
        self.broker.changed.notify_all()

    def work(self) -> None:
        """Handle the frames that have arrived. Stop if a frame stalls or ends the
        connection."""
        while self._backlog and not (self.stalled or self.ending):
            self.conversation.arrive(self._backlog.popleft())

    def put_back(self, frame: Frame) -> None:
        """Put this frame back, so that it is handled again before all other frames."""
        self._backlog.appendleft(frame)

    def _write_some(self) -> None:
        while self._out and not self._pausing:
            piece = self._out.popleft()
            try:
                sent = self.sock.send(piece)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
                self._out.appendleft(piece)
                return
            if sent < len(piece):
                self._out.appendleft(piece[sent:])
            elif self.broker.split.pause and self._out:
                self._pausing = True
                self.broker.loop.call_later(self.broker.split.pause, self._go_on)
        if self._leaving:
            self._say_goodbye()

    def _go_on(self) -> None:
        self._pausing = False

    # -- calls of the conversation and the script, with the lock held --------------

    def send(self, frame: Frame) -> None:
        """Queue a frame. The script decides how its bytes are split."""
        self.write(encode(frame))

    def write(self, data: bytes) -> None:
        """Queue raw bytes, which need not be a frame."""
        if not self.closed:
            self._out.extend(self.broker.split.pieces(data))
            self.broker.loop.wake()

    def agree_heartbeats(self, wish: str) -> tuple[int, int]:
        """Agree with the client on the heartbeat intervals, and start the timers.
        Return the broker's two intervals in milliseconds."""
        client_sends, client_wants = (int(part) for part in wish.split(","))
        sends, wants = self.broker.heart_beat or (client_wants, client_sends)
        if sends and client_wants:
            self._beat_every = max(sends, client_wants) / 1000
            self.broker.loop.call_later(self._beat_every, self._beat)
        if wants and client_sends:
            self._beats_due = max(wants, client_sends) / 1000
            self.broker.loop.call_later(self._beats_due, self._check_beats)
        return sends, wants

    def _beat(self) -> None:
        if self.ending:
            return
        if not (self.broker.silent or self._out):
            self._out.append(b"\n")
        self.broker.loop.call_later(self._beat_every, self._beat)

    def _check_beats(self) -> None:
        if self.ending:
            return
        # Generous: only a client that sends none at all fails the test.
        limit = 3 * self._beats_due + 1.0
        if not self.stalled and time.monotonic() - self.last_read > limit:
            self.conversation.protest(f"no heartbeat for {limit:g} s")
            return
        self.broker.loop.call_later(self._beats_due, self._check_beats)

    def stall(self, *, write: bool = True) -> None:
        """Stop reading. With ``write=False``, also stop writing."""
        self.stalled, self.frozen = True, not write

    def resume(self) -> None:
        """Read and write again."""
        self.stalled = self.frozen = False
        self.last_read = time.monotonic()
        self.work()
        self.broker.loop.wake()

    def cut(self, *, reset: bool = False) -> None:
        """End the connection. With ``reset``, send RST immediately. Otherwise, first
        write the queued bytes, unless the broker has stopped writing."""
        if reset or self.frozen or self._handshaking:
            self.end("cut by the script", reset=reset)
        else:
            self.hang_up()

    def hang_up(self) -> None:
        """Write the queued bytes, then end the connection."""
        if not self.ending:
            self._leaving = True
            self.broker.loop.call_later(2.0, lambda: self.end("it took too long"))
            self._say_goodbye()
            self.broker.loop.wake()

    def _say_goodbye(self) -> None:
        # Closing with unread bytes resets the connection, and the client may never see
        # what was written last. So read on, discarding everything, until the client
        # closes too.
        if not (self._out or self._draining or self.closed):
            self._draining = True
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_WR)
            self._over()

    def end(self, reason: str, *, reset: bool = False) -> None:
        """End the connection now. Queued bytes are lost."""
        if self.closed:
            return
        logger.debug("connection %d ends: %s", self.number, reason)
        self.closed = True
        self.broker.loop.remove(self)
        if reset:
            self.sock.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
        self.sock.close()
        self._over()

    def _over(self) -> None:
        self.conversation.ended()
        self._on_end(self)
