"""Reads frames and writes bytes with a deadline, by means of stomp.py.

Hops 4 and 6 of a message. Any thread may queue frames. The thread of ``Writer`` joins
the queued frames into one write, and sends heartbeats when no frame is queued. It also
checks deadlines, even while the broker reads nothing.

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
from collections import deque
from collections.abc import Callable
from typing import Protocol

from ..envelope import broker_url
from ..lazy_imports import needs
from .frames import Frame, FrameParser, ProtocolError, Receipt
from .ledger import ON_WIRE, QUEUED, Ledger, Pending
from .options import Options

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


class FrameListener(Protocol):
    """Receives the events of the connection. Its methods are called on the I/O thread
    or on the writer's thread, and never raise."""

    def on_frames(self, frames: list[Frame | Receipt]) -> None:
        """Handle the frames that one read has completed, in order."""

    def on_lost(self, reason: str, *, silent: bool = False) -> None:
        """Handle the end of the connection. ``reason`` says why it ended. ``silent`` is
        true if the broker stopped reading or answering."""

    def on_progress(self) -> None:
        """Handle the progress of a write that has had to wait. Called each time such a
        write sends more bytes, because then the broker is reading again."""

    def tick(self) -> None:
        """Check the deadlines of frames. The connection's lock may be held."""


class Transport(BaseTransport):  # type: ignore[misc]  # stomp.py has no types
    """One TCP or TLS connection to one address. Each object is used for only one
    connection."""

    def __init__(
        self, address: tuple[str, int], listener: FrameListener, options: Options
    ) -> None:
        """Prepare the connection. ``start`` connects and raises ``OSError`` if that
        fails."""
        super().__init__(auto_decode=False)
        self.address = address
        #: Seconds of silence after which the broker counts as dead, if any.
        self.silence_limit: float | None = None
        self.listener = listener
        self.options = options
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
        give_up = time.monotonic() + self.options.connect_timeout
        connected = broker_url.connect(self.address, self.options, give_up)
        connected.setblocking(False)
        self._socket = connected

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
                        self.listener.on_frames(frames)
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

    def write(self, data: bytes, *, timeout: float) -> None:
        """Write all the bytes. While the broker reads nothing, deadlines take effect.
        If the write fails, close the connection and raise ``OSError``."""
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
                        self.listener.on_progress()
                except _RETRY:
                    if selector is None:
                        selector = selectors.DefaultSelector()
                        selector.register(self._socket, selectors.EVENT_WRITE)  # type: ignore[arg-type]  # connected
                    selector.select(0.05)
                    self.listener.tick()
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
        if self.options.tls is not None or self._socket is None:
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
                # Not by the TLS socket's own method, which ends TLS first: a write at
                # that moment would leave without encryption.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

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
        self.listener.on_lost(self._reason, silent=silent)


class Writer:
    """The queue of frames, and the thread that writes them. The connection's lock
    guards every attribute."""

    def __init__(
        self, transport: Transport, lock: threading.RLock, ledger: Ledger
    ) -> None:
        """Prepare a thread that writes queued frames to the transport."""
        self._transport = transport
        self._ledger = ledger
        self._heartbeat: float | None = None
        self._wake = threading.Condition(lock)
        self._queue: deque[tuple[bytes, Pending | None]] = deque()
        self._idle = False
        #: The monotonic time until which the idle thread sleeps.
        self._until = 0.0
        self._stopped = False
        #: Bytes queued and not yet taken for writing.
        self.queued_bytes = 0
        self._room = threading.Condition(lock)
        self._thread = threading.Thread(
            target=self._run,
            name=f"jms-writer-{transport.address[0]}:{transport.address[1]}",
            daemon=True,
        )

    def start(self, heartbeat: float | None) -> None:
        """Start the thread. ``heartbeat`` is the seconds between heartbeats, or None
        for no heartbeats."""
        self._heartbeat = heartbeat
        self._thread.start()

    def put(self, data: bytes, entry: Pending | None = None) -> None:
        """Queue one or more complete frames. The caller holds the lock."""
        self._queue.append((data, entry))
        self.queued_bytes += len(data)
        if self._idle:
            self._idle = False
            self._wake.notify()

    def put_now(self, data: bytes, entry: Pending) -> None:
        """Write a frame on the calling thread, to save a thread switch. If other frames
        are queued, or the socket would block, queue the frame instead. The caller holds
        the lock."""
        written = 0
        if self._idle and not self._queue:
            # The frame may be written before the next line runs, and so may its answer
            # arrive.
            entry.state = ON_WIRE
            written = self._transport.write_some(data)
            if not written:
                entry.state = QUEUED
        if not written:
            self.put(data, entry)
        elif written < len(data):
            self.put(data[written:])
        elif entry.deadline < self._until:
            self._idle = False
            self._wake.notify()

    def stop(self) -> None:
        """Stop writing. The caller holds the lock."""
        self._stopped = True
        self._queue.clear()
        self._wake.notify()
        self._room.notify_all()

    def wait_for_room(self, limit: int, seconds: float) -> bool:
        """Wait until at most ``limit`` bytes are queued, and return True. Return False
        after ``seconds``. The caller holds the lock."""
        return self._room.wait_for(
            lambda: self._stopped or self.queued_bytes <= limit, seconds
        )

    def join(self, timeout: float) -> None:
        """Wait for the thread to end. Do nothing if the thread never ran, or if it is
        the calling thread."""
        if self._thread is not threading.current_thread() and self._thread.ident:
            self._thread.join(timeout)

    def _run(self) -> None:
        timeout = self._transport.options.send_timeout
        try:
            while (data := self._next()) is not None:
                self._transport.write(data, timeout=timeout)
        except OSError:
            pass  # the transport has informed the connection
        except BaseException as error:
            # Without this thread, no deadline would ever be checked.
            self._transport.listener.on_lost(f"a fault of this client: {error!r}")
            raise

    def _next(self) -> bytes | None:
        """Wait for frames, a due heartbeat or a deadline. Return the bytes to write, or
        ``None`` to end the thread."""
        never = float("inf")
        beat = time.monotonic() + self._heartbeat if self._heartbeat else never
        with self._wake:
            while not self._queue and not self._stopped:
                now = time.monotonic()
                if now >= beat:
                    self._transport.listener.tick()
                    return b"\n"
                if now >= self._ledger.next_deadline:
                    self._transport.listener.tick()
                    continue
                moment = self._until = min(beat, self._ledger.next_deadline)
                self._idle = True
                self._wake.wait(None if moment == never else moment - now)
                self._idle = False
            return None if self._stopped else self._take()

    def _take(self) -> bytes:
        """Join queued frames up to the limit. Never split a frame."""
        parts: list[bytes] = []
        size = 0
        queue, most = self._queue, self._transport.options.coalesce_bytes
        while queue and (not parts or size + len(queue[0][0]) <= most):
            data, entry = queue.popleft()
            self.queued_bytes -= len(data)
            if entry is not None:
                if entry.state is not QUEUED:
                    continue  # cancelled, or its deadline passed while it waited
                entry.state = ON_WIRE
            parts.append(data)
            size += len(data)
        self._room.notify_all()
        return b"".join(parts)
