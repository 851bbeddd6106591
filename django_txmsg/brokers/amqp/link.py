"""One connection to RabbitMQ and its channels, used by one thread at a time.

Only the thread that holds the lock `owned` writes and reads. The session's thread holds
this lock during a request. At other times the process's heartbeat thread may take the
lock to send a heartbeat.

The options come from the URL `amqp://user:password@host:5672/vhost?heartbeat=10`.
"""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import unquote

import amqp
from amqp import spec

from ...envelope import broker_url
from ...envelope.broker_url import ConnectionOptions, without_password
from ...errors import BrokerUnavailable
from ...jms.frames import KEPT_OF_TOO_LONG, MAX_BODY_BYTES
from . import frames

DEFAULT_PORTS = {"amqp": 5672, "amqps": 5671}
_BANNER = b"AMQP\x00\x00\x09\x01"
_HEADER = struct.Struct(">BHI")
_AT_ONCE = 256 * 1024
_END = 0xCE
#: Most bytes of a frame, if no longer one was agreed at the login. RabbitMQ splits a
#: body into agreed frames, but never the headers. They also grow in its queues.
LONGEST_HEADERS = 64 * 1024 * 1024

#: Type, channel and payload.
Frame = tuple[int, int, bytes]


@dataclass(frozen=True, slots=True)
class Options(ConnectionOptions):
    """The options of a session."""

    user: str = "guest"
    password: str = field(default="guest", repr=False)
    #: Virtual host; also the path of the URL.
    vhost: str = "/"
    #: Seconds between heartbeats in both directions; 0 for none.
    heartbeat: int = 10
    #: Most unconfirmed sends before the next ones wait.
    max_in_flight: int = 1000
    #: Whether missing queues are declared.
    declare: bool = True
    #: The type of a declared queue.
    queue_type: Literal["quorum", "classic"] = "quorum"


def read_url(url: str) -> tuple[Options, list[tuple[str, int]]]:
    """Return the options and addresses of a URL.

    Raises ValueError for a malformed URL or an unknown option, and OSError or
    ssl.SSLError if a certificate file cannot be read.
    """
    parts, query = broker_url.read_url(url)
    if parts.fragment:
        raise ValueError(
            f'{without_password(url)} is not a broker URL: percent-encode a "#"'
        )
    given = {}
    if len(parts.path) > 1 and "vhost" not in query:
        given["vhost"] = unquote(parts.path[1:])
    return broker_url.read_connection(url, Options, DEFAULT_PORTS, given)


class Transport:
    """The socket of one connection, with deadlines for reads and writes. Only the
    thread that owns the link uses the socket. This class replaces py-amqp's transport,
    which reads a frame in two calls and writes each message separately.
    """

    def __init__(self, address: tuple[str, int], options: Options) -> None:
        self._address, self._options = address, options
        self._received = bytearray()
        #: What `write_soon()` could not write yet.
        self._unsent = b""
        self.sock: socket.socket | None = None
        self.connected = False
        #: When bytes were last written, and when any were last received.
        self.written_at = self.read_at = time.monotonic()
        self._has_read = False
        #: The deadline to connect and log in.
        self.give_up = self.read_at + options.connect_timeout

    def connect(self) -> None:
        """Connect to the server and send the protocol header. Raises OSError."""
        self.sock = broker_url.connect(self._address, self._options, self.give_up)
        self.connected = True
        self.write(_BANNER)

    def _timed(self, timeout: float) -> socket.socket:
        """Set the socket's time-out, and return the socket. Raises OSError if the
        socket is closed."""
        if self.sock is None:
            raise OSError("the connection is closed")
        self.sock.settimeout(timeout)
        return self.sock

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write all bytes. Raises TimeoutError if the server accepts no byte during the
        send time-out. After any error the connection is unusable, because only a part
        of a frame may have been written."""
        sock = self._timed(self._options.send_timeout)
        view = memoryview(self._unsent + data if self._unsent else data)
        try:
            while view:
                view = view[sock.send(view) :]
        except BaseException:
            self.connected = False
            raise
        self._unsent = b""
        self.written_at = time.monotonic()

    def write_soon(self, data: bytes) -> None:
        """Write a heartbeat without waiting. If the socket does not accept all bytes,
        the rest is written before the next write. Until then, further heartbeats are
        dropped."""
        sock = self._timed(0.0)
        self._unsent = self._unsent or data
        try:
            self._unsent = self._unsent[sock.send(self._unsent) :]
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except BaseException:
            self.connected = False
            raise
        self.written_at = time.monotonic()

    def read(self, timeout: float) -> bool:
        """Read the bytes that have arrived, and return True. If no byte arrives within
        `timeout` seconds, return False. Raises OSError if the server has closed the
        connection."""
        sock = self._timed(max(0.0, timeout))
        try:
            piece = sock.recv(_AT_ONCE)
        except (BlockingIOError, TimeoutError, ssl.SSLWantReadError):
            return False
        if not piece:
            self.connected = False
            raise OSError("the broker has ended the connection" + self.doubt())
        self._received += piece
        self.read_at, self._has_read = time.monotonic(), True
        return True

    def doubt(self) -> str:
        """If the server has sent nothing, return a hint for an error message: the port
        may belong to another protocol. Otherwise return ""."""
        if self._has_read:
            return ""
        return ". Perhaps the port is not its AMQP port (5672, with TLS 5671)"

    def frames(self, most: int) -> Iterator[Frame]:
        """Yield the complete frames that were read. Each frame is removed from the
        buffer before it is yielded, because the caller may raise, or may read more
        frames. Raises OSError for a frame of more than `most` bytes and of more than
        LONGEST_HEADERS."""
        while len(self._received) >= _HEADER.size:
            kind, channel, size = _HEADER.unpack_from(self._received)
            end = _HEADER.size + size
            if end >= max(most, LONGEST_HEADERS):
                raise OSError(f"the broker announced a frame of {size} bytes")
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


#: The channels of a link: for sends with confirms, for a subscription and its
#: transactions, and for requests, whose failure closes their channel.
PUBLISHING, CONSUMING, ASKING = 1, 2, 3
#: Takes the method's payload after its ids, the properties, the body, and the length
#: of the body. If the body is too long, it takes only the beginning of the body.
Content = Callable[[bytes, bytes, bytes, int], None]


class ChannelClosed(Exception):
    """The broker has closed a channel. `code` and `text` are the broker's reason."""

    def __init__(self, channel: int, code: int, text: str) -> None:
        super().__init__(text)
        self.channel, self.code, self.text = channel, code, text


#: Errors after which a connection is lost. struct.error and ValueError come from
#: frames that cannot be read: RabbitMQ cuts the text of its reason to close the
#: connection after 252 bytes, also in the middle of a character.
LOST = (amqp.AMQPError, OSError, struct.error, ValueError)


class _Connection(amqp.Connection):  # type: ignore[misc]
    """py-amqp's connection, with our transport and frame parser."""

    def __init__(self, link: Link, transport: Transport, options: Options) -> None:
        self._link, self._own = link, transport
        super().__init__(
            host="",
            userid=options.user,
            password=options.password,
            login_method="PLAIN",
            virtual_host=options.vhost,
            heartbeat=options.heartbeat,
            connect_timeout=options.connect_timeout,
            client_properties={"product": "django_txmsg"},
        )

    def Transport(self, *_: Any, **__: Any) -> Transport:  # noqa: N802 - py-amqp's name
        return self._own

    def drain_events(self, timeout: float | None = None) -> None:
        """Read until a frame arrives. py-amqp calls this while it waits for an answer.
        It passes a `timeout` for each step of the login, which has one deadline."""
        login = self._own.give_up - time.monotonic()
        if not self._link.read(self._link.patience if timeout is None else login):
            raise TimeoutError("the broker does not answer" + self._own.doubt())


class Link:
    """A connection, and the handlers for its channels."""

    def __init__(self, address: tuple[str, int], options: Options) -> None:
        """Connect and log in. Raises BrokerUnavailable."""
        self.options = options
        self.owned = threading.RLock()
        self.patience = options.connect_timeout
        #: Seconds, as client and server have agreed; 0 until then, and for none.
        self.heartbeat = 0.0
        #: When the heartbeat thread looks at the link again.
        self.due = 0.0
        #: Method of a channel -> handler of its content or arguments.
        self.contents: dict[tuple[int, tuple[int, int]], Content] = {}
        self.methods: dict[tuple[int, tuple[int, int]], Callable[[bytes], None]] = {}
        self._partial: dict[int, _Partial] = {}
        self._closing = False
        #: The reason for which the broker has blocked this connection, while it is
        #: blocked.
        self.blocked = ""
        self.methods[0, spec.Connection.Blocked] = self._on_blocked
        self.methods[0, spec.Connection.Unblocked] = self._on_unblocked
        self.transport = Transport(address, options)
        self._connection = _Connection(self, self.transport, options)
        try:
            with self.asking():
                self._connection.connect()
        except BaseException:
            self.transport.close()
            raise
        self.patience = options.send_timeout
        self.frame_max: int = self._connection.frame_max
        self.heartbeat = float(self._connection.heartbeat or 0)
        version = str(self._connection.server_properties.get("version", ""))
        numbers = re.match(r"(\d+)\.(\d+)", version)
        #: Major and minor version of the server.
        self.version = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Hold the lock `owned` while the block runs. Turn errors of py-amqp and of the
        socket into BrokerUnavailable. Raise ChannelClosed unchanged."""
        with self.owned:
            try:
                yield
            except ChannelClosed:
                raise
            except LOST as error:
                self.transport.close()
                raise BrokerUnavailable(error_text(error)) from error

    @contextlib.contextmanager
    def hurried(self) -> Iterator[None]:
        """While the block runs, wait for each answer no longer than the close
        time-out."""
        patience, self.patience = self.patience, self.options.close_timeout
        try:
            yield
        finally:
            self.patience = patience

    def channel(self, number: int) -> amqp.Channel:
        """Open the channel with this number."""
        return self._connection.channel(number)

    def read(self, timeout: float) -> bool:
        """Handle the frames that arrive. Return True as soon as a frame has arrived
        that is not a heartbeat. Return False if no such frame arrives within `timeout`
        seconds."""
        listening = time.monotonic()
        deadline = listening + timeout
        while not self._handle():
            left = max(0.0, deadline - time.monotonic())
            if self.heartbeat:
                self.beat()
                read_at = max(listening, self.transport.read_at)
                if time.monotonic() - read_at > 2 * self.heartbeat:
                    raise TimeoutError("the broker's heartbeats have stopped")
                left = min(left, self.heartbeat / 2)
            if not self.transport.read(left) and time.monotonic() >= deadline:
                return False
        return True

    def _handle(self) -> bool:
        """Handle the frames in the buffer. Return True if any of them was not a
        heartbeat."""
        found = False
        for kind, channel, payload in self.transport.frames(self._connection.frame_max):
            if kind != frames.BEAT:
                found = True
                self._take(kind, channel, payload)
        return found

    def beat(self) -> None:
        """Send a heartbeat if one is due."""
        pause = time.monotonic() - self.transport.written_at
        if self.heartbeat and pause >= self.heartbeat / 2:
            # A full connection is not idle, and other links' heartbeats must not wait.
            self.transport.write_soon(frames.HEARTBEAT)

    def _on_blocked(self, arguments: bytes) -> None:
        reason = arguments[1 : 1 + arguments[0]].decode(errors="replace")
        self.blocked = f"the broker takes no messages: {reason or 'an alarm'}"

    def _on_unblocked(self, arguments: bytes) -> None:
        self.blocked = ""

    def hear(self) -> None:
        """Handle the frames that the broker has sent so far, without waiting."""
        while self.transport.read(0.0):
            self._handle()

    def why_blocked(self) -> str:
        """Return the reason why the broker has blocked this connection, or "" if the
        connection is not blocked. This hides errors of the connection, so call it only
        just before you close the connection."""
        with contextlib.suppress(*LOST, ChannelClosed):
            self.hear()
        return self.blocked

    def close(self) -> None:
        """Close the connection and the socket. Never raises."""
        with self.owned:
            self.patience = self.options.close_timeout
            self._closing = True
            with contextlib.suppress(*LOST, ChannelClosed):
                # The broker does not read a blocked connection, so a close would get no
                # answer.
                if self.transport.connected and not self.blocked:
                    self._connection.close()
            self.transport.close()

    def _take(self, kind: int, channel: int, payload: bytes) -> None:
        if kind == frames.METHOD:
            self._take_method(channel, payload)
        elif channel in self._partial and self._partial[channel].take(kind, payload):
            one = self._partial.pop(channel)
            one.taker(one.method, one.properties, b"".join(one.pieces), one.size)

    def _take_method(self, channel: int, payload: bytes) -> None:
        method = struct.unpack_from(">HH", payload)
        if method in (spec.Basic.Deliver, spec.Basic.Return):
            taker = self.contents.get((channel, method), lambda *_: None)
            self._partial[channel] = _Partial(payload[4:], taker)
        elif (channel, method) in self.methods:
            self.methods[channel, method](payload[4:])
        elif method == spec.Channel.Close:
            self._channel_closed(channel, payload)
        elif channel in (self._connection.channels or ()):
            self._connection.on_inbound_method(channel, method, payload, None)

    def _channel_closed(self, channel: int, payload: bytes) -> None:
        code, length = struct.unpack_from(">HB", payload, 4)
        text = payload[7 : 7 + length].decode(errors="replace")
        self.transport.write(frames.method(channel, spec.Channel.CloseOk, b""))
        self._partial.pop(channel, None)
        closed = (self._connection.channels or {}).get(channel)
        if closed is not None:
            closed.collect()
        if not self._closing:
            raise ChannelClosed(channel, code, text)


class _Partial:
    """A received method whose content has not arrived completely. If the body is too
    long, only its beginning is kept, as over STOMP."""

    __slots__ = ("_kept", "_missing", "method", "pieces", "properties", "size", "taker")

    def __init__(self, method: bytes, taker: Content) -> None:
        self.method, self.taker = method, taker
        self.properties = b""
        self.pieces: list[bytes] = []
        self.size = self._missing = self._kept = 0

    def take(self, kind: int, payload: bytes) -> bool:
        """Add a frame. Return True if the content is now complete."""
        if kind == frames.HEADER:
            (self.size,) = struct.unpack_from(">Q", payload, 4)
            self._missing = self.size
            self.properties = payload[12:]
        else:
            most = KEPT_OF_TOO_LONG if self.size > MAX_BODY_BYTES else self.size
            if piece := payload[: most - self._kept]:
                self.pieces.append(piece)
                self._kept += len(piece)
            self._missing -= len(payload)
        return self._missing <= 0


def error_text(error: BaseException) -> str:
    """Return the text of an exception from py-amqp or from the socket, as one line."""
    text = getattr(error, "reply_text", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())
