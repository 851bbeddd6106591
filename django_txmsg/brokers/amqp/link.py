"""One connection to RabbitMQ and its channels, in the hands of one thread at a time.

Whoever holds `owned` writes and reads: the session's thread while it asks the broker
something, and the heart of the process while that thread is busy elsewhere.
"""

from __future__ import annotations

import contextlib
import re
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import amqp
from amqp import spec

from ...errors import BrokerUnavailable
from . import frames
from .options import Options
from .transport import Transport

#: The channels of a link: for sends with confirms, for a subscription and its
#: transactions, and for questions, which cost their channel when they fail.
PUBLISHING, CONSUMING, ASKING = 1, 2, 3
#: Takes the method's payload after its ids, the properties and the body.
Content = Callable[[bytes, bytes, bytes], None]


class ChannelClosed(Exception):
    """The broker has closed a channel: `code` and `text` say why."""

    def __init__(self, channel: int, code: int, text: str) -> None:
        super().__init__(text)
        self.channel, self.code, self.text = channel, code, text


class _Connection(amqp.Connection):  # type: ignore[misc]
    """py-amqp's connection, on our transport and our reading of frames."""

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
        """Read until something came: what py-amqp's own waiting calls."""
        if not self._link.read(self._link.patience if timeout is None else timeout):
            raise TimeoutError("the broker does not answer")


class Link:
    """A connection, and what comes in for its channels."""

    def __init__(self, address: tuple[str, int], options: Options) -> None:
        """Connect and log in. Raises BrokerUnavailable."""
        self.options = options
        self.owned = threading.RLock()
        self.patience = options.connect_timeout
        #: Seconds, as client and server have agreed; 0 until then, and for none.
        self.heartbeat = 0.0
        #: Method of a channel -> who takes its content or arguments.
        self.contents: dict[tuple[int, tuple[int, int]], Content] = {}
        self.methods: dict[tuple[int, tuple[int, int]], Callable[[bytes], None]] = {}
        self._partial: dict[int, _Partial] = {}
        self._closing = False
        #: Why the broker reads nothing that is sent here, while it says so.
        self.blocked = ""
        self.methods[0, spec.Connection.Blocked] = self._on_blocked
        self.methods[0, spec.Connection.Unblocked] = self._on_unblocked
        self.transport = Transport(
            address,
            tls=options.tls,
            connect_timeout=options.connect_timeout,
            send_timeout=options.send_timeout,
        )
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
        told = str(self._connection.server_properties.get("version", ""))
        numbers = re.match(r"(\d+)\.(\d+)", told)
        #: Major and minor version of the server.
        self.version = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Own the link for a while. What py-amqp and the socket raise becomes
        BrokerUnavailable, except for ChannelClosed."""
        with self.owned:
            try:
                yield
            except ChannelClosed:
                raise
            except (amqp.AMQPError, OSError, struct.error, ValueError) as error:
                self.transport.close()
                raise BrokerUnavailable(said(error)) from error

    @contextlib.contextmanager
    def hurried(self) -> Iterator[None]:
        """Wait for an answer no longer than for a good-bye."""
        patience, self.patience = self.patience, self.options.close_timeout
        try:
            yield
        finally:
            self.patience = patience

    def channel(self, number: int) -> amqp.Channel:
        """Open the channel of this number."""
        return self._connection.channel(number)

    def write(self, data: bytes | bytearray) -> None:
        """Write frames that were made here."""
        self.transport.write(data)

    def read(self, timeout: float) -> bool:
        """Handle what the broker sends, until it was something else than heart-beats
        or `timeout` seconds have passed; returns whether it was."""
        listening = time.monotonic()
        deadline = listening + timeout
        while not self._handle():
            left = max(0.0, deadline - time.monotonic())
            if self.heartbeat:
                self.beat()
                heard_at = max(listening, self.transport.heard_at)
                if time.monotonic() - heard_at > 2 * self.heartbeat:
                    raise TimeoutError("the broker's heart-beats have stopped")
                left = min(left, self.heartbeat / 2)
            if not self.transport.read(left) and time.monotonic() >= deadline:
                return False
        return True

    def _handle(self) -> bool:
        """Handle what was read; returns whether there was more than heart-beats."""
        found = False
        for kind, channel, payload in self.transport.frames():
            if kind != frames.BEAT:
                found = True
                self._take(kind, channel, payload)
        return found

    def beat(self) -> None:
        """Send a heart-beat when it is time for one."""
        pause = time.monotonic() - self.transport.written_at
        if self.heartbeat and pause >= self.heartbeat / 2:
            # A line that is full is not idle, and others' heart-beats must not wait.
            self.transport.write_soon(frames.HEARTBEAT)

    def _on_blocked(self, arguments: bytes) -> None:
        reason = arguments[1 : 1 + arguments[0]].decode(errors="replace")
        self.blocked = f"the broker takes no messages: {reason or 'an alarm'}"

    def _on_unblocked(self, arguments: bytes) -> None:
        self.blocked = ""

    def hear(self) -> None:
        """Handle what the broker has sent by now, without waiting."""
        while self.transport.read(0.0):
            self._handle()

    def why_blocked(self) -> str:
        """Return why the broker reads nothing, if it has said so by now; "" otherwise.
        For a connection that is given up: whatever else it has said is lost."""
        with contextlib.suppress(*_LOST):
            self.hear()
        return self.blocked

    def close(self) -> None:
        """Say good-bye, and close the socket; never raises."""
        with self.owned:
            self.patience = self.options.close_timeout
            self._closing = True
            with contextlib.suppress(*_LOST):
                # A blocked connection is not read: its good-bye would not be heard.
                if self.transport.connected and not self.blocked:
                    self._connection.close()
            self.transport.close()

    def _take(self, kind: int, channel: int, payload: bytes) -> None:
        if kind == frames.METHOD:
            self._take_method(channel, payload)
        elif channel in self._partial and self._partial[channel].take(kind, payload):
            one = self._partial.pop(channel)
            one.taker(one.method, one.properties, b"".join(one.pieces))

    def _take_method(self, channel: int, payload: bytes) -> None:
        method = struct.unpack_from(">HH", payload)
        if method in (spec.Basic.Deliver, spec.Basic.Return):
            taker = self.contents.get((channel, method), _nobody)
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
    """A method whose content is on its way."""

    __slots__ = ("_missing", "method", "pieces", "properties", "taker")

    def __init__(self, method: bytes, taker: Content) -> None:
        self.method, self.taker = method, taker
        self.properties = b""
        self.pieces: list[bytes] = []
        self._missing = 0

    def take(self, kind: int, payload: bytes) -> bool:
        """Take a frame; returns whether it was the last one."""
        if kind == frames.HEADER:
            (self._missing,) = struct.unpack_from(">Q", payload, 4)
            self.properties = payload[12:]
        else:
            self.pieces.append(payload)
            self._missing -= len(payload)
        return self._missing <= 0


#: How a connection, or a channel of it, ends.
_LOST = (amqp.AMQPError, OSError, struct.error, ValueError, ChannelClosed)


def _nobody(method: bytes, properties: bytes, body: bytes) -> None:
    """Take what nobody waits for any more."""


def said(error: BaseException) -> str:
    """Return what an error of py-amqp or of the socket says, in one line."""
    text = getattr(error, "reply_text", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())
