"""Writes bytes with a deadline and reads frames, by means of stomp.py.

stomp.py provides the connection's life cycle and the I/O thread. ``Transport`` replaces
the methods of stomp.py that handle bytes, because these methods have known faults. The
differences are:

- each connection has a new transport object, because in stomp.py a second connect may
  never return;
- sockets are non-blocking for both TCP and TLS: a write has a deadline, the client
  detects that a peer has disappeared, and write errors reach the caller;
- the I/O thread only reads, and never runs user code;
- our own parser and encoder handle the frames, so headers are escaped correctly and no
  byte of a body is replaced.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Protocol

from ..envelope.broker_url import ConnectionOptions
from ..lazy_imports import needs
from .frames import Frame, FrameParser, ProtocolError, Receipt

_scan = os.environ.get("STOMP_SKIP_HOSTNAME_SCAN")
os.environ["STOMP_SKIP_HOSTNAME_SCAN"] = "1"  # importing it must not ask the DNS
try:
    with needs("django_txmsg.jms", "stomp", "stomp"):
        from stomp.transport import BaseTransport
finally:
    if _scan is None:
        del os.environ["STOMP_SKIP_HOSTNAME_SCAN"]

_READ_BYTES = 1 << 17
#: An option of Linux alone.
_QUICKACK: int | None = getattr(socket, "TCP_QUICKACK", None)
_RETRY = (
    ssl.SSLWantReadError,
    ssl.SSLWantWriteError,
    BlockingIOError,
    InterruptedError,
)


def _until(give_up: float) -> float:
    """Return the seconds until the monotonic time ``give_up``, but at least 0.01,
    because a time-out of 0 would make a socket non-blocking."""
    return max(0.01, give_up - time.monotonic())


class FrameListener(Protocol):
    """Receives the events of the connection. Its methods are called on the I/O thread,
    and never raise."""

    def on_frames(self, frames: list[Frame | Receipt]) -> None:
        """Handle the frames that one read has completed, in order."""

    def on_lost(self, reason: str, *, silent: bool = False) -> None:
        """Handle the end of the connection. ``reason`` says why it ended. ``silent`` is
        true if the broker stopped reading or answering."""

    def on_progress(self) -> None:
        """Handle the progress of a write that has had to wait. Called each time such a
        write sends more bytes, because then the broker is reading again."""


class Transport(BaseTransport):  # type: ignore[misc]  # stomp.py has no types
    """One TCP or TLS connection to one address. Each object is used for only one
    connection."""

    def __init__(
        self,
        address: tuple[str, int],
        listener: FrameListener,
        options: ConnectionOptions,
    ) -> None:
        """Prepare the connection. ``start`` connects and raises ``OSError`` if that
        fails."""
        super().__init__(auto_decode=False)
        self.address = address
        #: Seconds of silence after which the broker counts as dead, if any.
        self.silence_limit: float | None = None
        self._listener = listener
        self._options = options
        self._socket: socket.socket | None = None
        # OpenSSL does not allow a read and a write of one connection at a time; each
        # is non-blocking, so neither waits for the other.
        self._write_lock = threading.Lock()
        self._socket_lock = (
            self._write_lock if options.tls else contextlib.nullcontext()
        )
        self._reason = ""
        self.override_threading(self._start_thread)

    def _start_thread(self, run: Callable[[], None]) -> threading.Thread:
        name = f"jms-reader-{self.address[0]}:{self.address[1]}"
        thread = threading.Thread(target=run, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending; the thread would close it
            if self._socket is not None:
                self._socket.close()
            raise
        return thread

    def attempt_connection(self) -> None:
        """Open the socket. (stomp.py's own method hides the reason for a failure, and
        retries.)"""
        give_up = time.monotonic() + self._options.connect_timeout
        raw = self._connect(give_up)
        try:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected = raw
            if (tls := self._options.tls) is not None:
                raw.settimeout(_until(give_up))
                connected = tls.wrap_socket(raw, server_hostname=self.address[0])
            connected.setblocking(False)
        except BaseException:
            raw.close()
            raise
        self._socket = connected

    def _connect(self, give_up: float) -> socket.socket:
        """Try the host's IP addresses in turn, and connect to the first address that
        answers. Return the connected socket. All attempts share the deadline
        ``give_up``."""
        error: OSError | None = None
        for family, kind, protocol, _, address in socket.getaddrinfo(
            *self.address, type=socket.SOCK_STREAM
        ):
            try:
                raw = socket.socket(family, kind, protocol)
            except OSError as unsupported:
                error = unsupported
                continue
            try:
                raw.settimeout(_until(give_up))
                raw.connect(address)
            except OSError as refused:
                raw.close()
                error = refused
            else:
                return raw
        raise error or OSError("the host's name has no address")

    def receive(self) -> bytes:
        """Read until the connection ends. stomp.py calls this on its I/O thread.

        Returns empty bytes, which end the loop of stomp.py.
        """
        parser = FrameParser()
        data = b""
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._socket, selectors.EVENT_READ)  # type: ignore[arg-type]  # connected
                while (data := self._read(selector)) and self.running:
                    frames = parser.feed(data)
                    if frames:
                        self._listener.on_frames(frames)
            self._over("the broker closed the connection")
        except (OSError, ValueError) as error:
            silent = isinstance(error, TimeoutError)
            self._over(str(error) or repr(error), silent=silent)
        except ProtocolError as error:
            if data.startswith(b"AMQP"):
                self._over("this is its AMQP port; use amqp://, or its STOMP port")
            else:
                self._over(f"the broker's bytes are not STOMP: {error}")
        except Exception as error:  # stomp.py would end the thread with a mere log line
            self._over(f"a fault of this client: {error!r}")
            raise
        return b""

    def _read(self, selector: selectors.BaseSelector) -> bytes:
        last = time.monotonic()
        while True:
            try:
                with self._socket_lock:
                    data = self._socket.recv(_READ_BYTES)  # type: ignore[union-attr]  # connected
                    self._acknowledge_at_once()
                return data
            except _RETRY:
                limit, silent = self.silence_limit, time.monotonic() - last
                if limit is not None and silent >= limit:
                    raise TimeoutError(
                        f"no heartbeat from the broker for {silent:.1f} s"
                    ) from None
                # Without a limit yet, check again soon: CONNECTED is about to set it.
                selector.select(0.5 if limit is None else limit - silent)

    def _acknowledge_at_once(self) -> None:
        """Make the kernel acknowledge received data without its usual delay of 40 ms.

        ActiveMQ leaves Nagle's algorithm on, so a receipt after a delivery waits for
        the TCP acknowledgement of the delivery. Linux forgets this setting after each
        read.
        """
        if _QUICKACK is not None:
            self._socket.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)  # type: ignore[union-attr]  # connected

    def write(
        self, data: bytes, *, timeout: float, tick: Callable[[], None] | None = None
    ) -> None:
        """Write all the bytes.

        While the broker reads nothing, call ``tick`` repeatedly, so that deadlines take
        effect. If the write fails, close the connection and raise ``OSError``.
        """
        give_up = time.monotonic() + timeout
        view = memoryview(data)
        selector: selectors.BaseSelector | None = None
        try:
            while view:
                try:
                    with self._write_lock:
                        sent = self._socket.send(view)  # type: ignore[union-attr]  # connected
                    view = view[sent:]
                    give_up = time.monotonic() + timeout
                    if selector is not None:
                        self._listener.on_progress()
                except _RETRY:
                    if selector is None:
                        selector = selectors.DefaultSelector()
                        selector.register(self._socket, selectors.EVENT_WRITE)  # type: ignore[arg-type]  # connected
                    selector.select(0.05)
                    if tick is not None:
                        tick()
                    if time.monotonic() >= give_up:
                        raise TimeoutError(
                            f"the broker has read nothing for {timeout:g} s"
                        ) from None
        except (OSError, ValueError, AttributeError) as error:
            # Part of a frame may have been written: nothing may follow it on this
            # connection.
            silent = isinstance(error, TimeoutError)
            self._over(f"writing failed: {error}", silent=silent)
            self.disconnect_socket()
            raise OSError(str(error)) from error
        finally:
            if selector is not None:
                selector.close()

    def write_some(self, data: bytes) -> int:
        """Write as many bytes as the socket accepts without blocking, and return their
        number.

        Over TLS, write nothing and return 0, because a TLS write may have to wait for
        the thread that reads. Also return 0 if the write fails. The next ``write`` then
        reports the error.
        """
        if self._options.tls is not None or self._socket is None:
            return 0
        try:
            with self._write_lock:
                return self._socket.send(data)
        except OSError:
            return 0

    def disconnect_socket(self) -> None:
        """End the connection, which also ends the I/O thread."""
        self.running = False
        connected = self._socket
        if connected is None:
            return
        with self._write_lock:
            with contextlib.suppress(OSError, ValueError):
                if isinstance(connected, ssl.SSLSocket):
                    connected.unwrap()
            with contextlib.suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)

    def drop(self) -> None:
        """End the connection. A finalizer calls this when nothing refers to the
        connection any more. Takes no lock."""
        self.running = False
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def cleanup(self) -> None:
        """Close the socket. stomp.py calls this at the end of the I/O thread.

        The socket stays open while a writer uses it. Otherwise the operating system
        might give the same file descriptor to another socket.
        """
        if self._socket is not None:
            with self._write_lock:
                self._socket.close()

    def abandon(self) -> None:
        """Close the inherited socket in a forked child, without writing a byte."""
        self.running = False
        if self._socket is not None:
            with contextlib.suppress(OSError):
                os.close(self._socket.detach())

    def join(self, timeout: float) -> None:
        """Wait for the I/O thread, unless this is the I/O thread."""
        thread = self.io_thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _over(self, reason: str, *, silent: bool = False) -> None:
        self._reason = self._reason or reason
        self._listener.on_lost(self._reason, silent=silent)
