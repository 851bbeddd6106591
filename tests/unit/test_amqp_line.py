"""Writes and heartbeats on a slow, stalled or full AMQP connection, with real
sockets."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from amqp import spec

from django_txmsg.brokers.amqp import frames, session
from django_txmsg.brokers.amqp.link import Link, Options, Transport, _Partial
from django_txmsg.errors import BrokerUnavailable
from django_txmsg.jms.frames import KEPT_OF_TOO_LONG, MAX_BODY_BYTES
from tests.faults import wait_until

#: Connection.Start: the version, no properties, one mechanism and one locale.
START = b"\0\x09\0\0\0\0" + struct.pack(">I", 5) + b"PLAIN\0\0\0\5en_US"


class Line:
    """A transport over a pair of sockets with small buffers. The test has the peer's
    socket."""

    def __init__(self, send_timeout: float) -> None:
        near, self.far = socket.socketpair()
        for end in (near, self.far):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        options = Options(connect_timeout=1, send_timeout=send_timeout)
        self.transport = Transport(("", 0), options)
        self.transport.sock, self.transport.connected = near, True
        self.read = bytearray()

    def drain(self, pause: float, stop: threading.Event) -> None:
        """Read a little data at a time, as a slow peer does."""
        self.far.settimeout(0.2)
        while not stop.is_set():
            try:
                self.read += self.far.recv(8192)
            except TimeoutError:
                continue
            stop.wait(pause)


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line(send_timeout=0.4)
    yield made
    made.transport.close()
    made.far.close()


def test_a_write_may_take_longer_than_its_time_out_while_bytes_flow(line: Line) -> None:
    stop = threading.Event()
    reader = threading.Thread(target=line.drain, args=(0.05, stop))
    reader.start()
    data, began = bytes(range(256)) * 1000, time.monotonic()
    try:
        line.transport.write(data)
        assert time.monotonic() - began > 2 * 0.4
        wait_until(lambda: len(line.read) == len(data))
    finally:
        stop.set()
        reader.join()
    assert bytes(line.read) == data


def test_a_write_that_stands_still_is_a_time_out(line: Line) -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        line.transport.write(b"x" * 1_000_000)
    assert time.monotonic() - began < 30
    assert not line.transport.connected


def test_a_heartbeat_never_blocks_and_is_written_whole(
    line: Line,
) -> None:
    while True:  # until it is full
        line.transport.write_soon(frames.HEARTBEAT)
        if line.transport._unsent:
            break
    began = time.monotonic()
    for _ in range(100):
        line.transport.write_soon(frames.HEARTBEAT)
    assert time.monotonic() - began < 0.4
    assert len(line.transport._unsent) <= len(frames.HEARTBEAT)
    stop = threading.Event()
    reader = threading.Thread(target=line.drain, args=(0.0, stop))
    reader.start()
    try:
        line.transport.write(b"the end")
        wait_until(lambda: line.read.endswith(b"the end"))
    finally:
        stop.set()
        reader.join()
    beats = bytes(line.read.removesuffix(b"the end"))
    assert beats == frames.HEARTBEAT * (len(beats) // len(frames.HEARTBEAT))


def test_a_header_nested_to_any_depth_is_text_or_a_problem() -> None:
    """RabbitMQ delivers such a header. An error would end the stage's connection, and
    the stage would receive the message again for ever."""
    for depth in range(1, 1200):
        value = b"D\0\0\0\0\1"
        for _ in range(depth):
            value = b"A" + struct.pack(">I", len(value)) + value
        table = b"\1n" + value
        reader = frames.Reader(b"\x20\0" + struct.pack(">I", len(table)) + table)
        headers = reader.headers()
        assert reader.problem or headers["n"] == "[" * depth + '"1"' + "]" * depth


def test_of_a_body_that_is_too_long_only_the_beginning_is_kept() -> None:
    frame, taken = bytes(1 << 17), list[tuple[int, int]]()
    for size in (MAX_BODY_BYTES, MAX_BODY_BYTES + len(frame)):
        content = _Partial(b"", lambda *_: None)
        over = content.take(frames.HEADER, struct.pack(">HHQH", 60, 0, size, 0))
        for _ in range(size // len(frame)):
            assert not over
            over = content.take(frames.BODY, frame)
        assert over
        taken.append((content.size, sum(map(len, content.pieces))))
    assert taken == [
        (MAX_BODY_BYTES, MAX_BODY_BYTES),
        (MAX_BODY_BYTES + len(frame), KEPT_OF_TOO_LONG),
    ]


class Beating:
    """A connection with only the attributes that the heartbeat thread uses."""

    def __init__(self, transport: Transport, heartbeat: float = 0.1) -> None:
        self.transport, self.heartbeat, self.due = transport, heartbeat, 0.0
        self.owned = threading.RLock()

    def beat(self) -> None:
        Link.beat(self)  # type: ignore[arg-type]


def test_a_blocked_connection_delays_no_other_heartbeat(line: Line) -> None:
    other = Line(send_timeout=30.0)
    line.transport._options = Options(send_timeout=30.0)
    while not line.transport._unsent:
        line.transport.write_soon(frames.HEARTBEAT)
    links: list[Any] = [Beating(line.transport), Beating(other.transport)]
    try:
        for one in links:
            one.transport.written_at = 0.0
        began = time.monotonic()
        session._beat(links)
        assert time.monotonic() - began < 5
        other.far.settimeout(5)
        assert other.far.recv(100) == frames.HEARTBEAT
    finally:
        other.transport.close()
        other.far.close()


def test_a_connection_that_is_dropped_unclosed_is_not_kept_alive(line: Line) -> None:
    link: Any = Beating(line.transport, heartbeat=400)
    session._heart().add(link)
    wait_until(partial(getattr, link, "due"))  # the thread has looked at it, and waits
    kept = weakref.ref(link)
    del link
    wait_until(lambda: kept() is None)


def test_a_login_that_never_ends_has_one_time_out_for_all_its_steps() -> None:
    """The server begins the login again and again, so each step gets an answer."""
    over = threading.Event()

    def serve(listening: socket.socket) -> None:
        client, _ = listening.accept()
        with client, contextlib.suppress(OSError):
            while not over.wait(0.05):
                client.sendall(frames.method(0, spec.Connection.Start, START))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = threading.Thread(target=serve, args=(listening,))
        server.start()
        end = threading.Timer(30, over.set)
        end.start()
        began = time.monotonic()
        try:
            with pytest.raises(BrokerUnavailable, match="does not answer"):
                Link(listening.getsockname(), Options(connect_timeout=0.5))
            assert time.monotonic() - began < 15
        finally:
            end.cancel()
            over.set()
            server.join()


def test_a_frame_that_is_larger_than_agreed_ends_the_connection() -> None:
    def serve(listening: socket.socket) -> None:
        client, _ = listening.accept()
        with client:
            client.settimeout(30)
            client.sendall(struct.pack(">BHI", frames.METHOD, 0, 2**31))
            while client.recv(100):
                pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = threading.Thread(target=serve, args=(listening,))
        server.start()
        try:
            with pytest.raises(BrokerUnavailable, match="a frame of 2147483648 bytes"):
                Link(listening.getsockname(), Options())
        finally:
            server.join()


def test_the_addresses_of_a_host_share_the_time_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        port = full.getsockname()[1]
        for _ in range(4):  # in the queue of connections, which then is full
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        address = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [address] * 100)
        began = time.monotonic()

        with pytest.raises(BrokerUnavailable, match="timed out"):
            Link(("many", port), Options(connect_timeout=0.3))

    assert time.monotonic() - began < 15  # and not a hundred times 0.3
